"""Rules that a student finds in an evening, and our policy without one of its methods (scale.py).

For teachers: what the scale measures. A class takes over what its base classes do.
"""

from chapters.capstone import policy, reference
from chapters.capstone.views import Block, Request, State


class RefuseHopeless(policy.Policy):
    """Those who cannot get a first token in time, even alone, are sent away."""

    def refuse(self, state: State) -> list[int]:
        setup = self.setup
        late = []
        for request in state.waiting:
            soonest_s = state.now + setup.step_s + request.num_left * setup.token_s
            if request.first_token_s is None and soonest_s > request.arrival_s + setup.ttft_limit_s:
                late.append(request.id)
        return late


class ShortestFirst(RefuseHopeless):
    def order(self, state: State) -> list[int]:
        return [request.id for request in sorted(state.waiting, key=lambda request: request.num_prompt_tokens)]


class CachedFirst(RefuseHopeless):
    """The one with the least to compute comes first, after those who have been preempted."""

    def order(self, state: State) -> list[int]:
        return [request.id for request in sorted(state.waiting, key=self.rank)]

    def rank(self, request: Request) -> tuple[bool, float]:
        return request.first_token_s is None, request.num_left


class SmallBudget(RefuseHopeless):
    """A step takes as long as the TPOT limit."""

    def token_budget(self, state: State) -> int:
        most = int((self.setup.tpot_limit_s - self.setup.step_s) / self.setup.token_s)
        return max(most, len(state.running) + 1)


class TwoDrafts(RefuseHopeless):
    def num_draft_tokens(self, state: State) -> dict[int, int]:
        return {request.id: 2 for request in state.running if request.first_token_s is not None}


class OftenUsedStay(RefuseHopeless):
    def worth(self, state: State, block: Block) -> float:
        return block.num_uses


class Combined(CachedFirst, SmallBudget):
    """The best of the above together. And nobody is admitted unless an eighth of the blocks is free."""

    def order(self, state: State) -> list[int]:
        is_full = state.num_free_blocks < self.setup.num_blocks // 8
        return [] if state.running and is_full else super().order(state)


class CombinedWithDrafts(Combined, TwoDrafts, OftenUsedStay):
    """All of the above together."""


class AnswerLengths(CombinedWithDrafts):
    """And the longest answer so far to a prompt that began alike counts as much as the prompt."""

    def order(self, state: State) -> list[int]:
        self.longest = getattr(self, "longest", dict[str, int]())
        for request in state.running:
            known = self.longest.get(request.beginning, 0)
            self.longest[request.beginning] = max(known, request.num_generated_tokens)
        return super().order(state)

    def rank(self, request: Request) -> tuple[bool, float]:
        return request.first_token_s is None, request.num_left + self.longest.get(request.beginning, 200)


class SlackBudget(CombinedWithDrafts):
    """All but the small budget: a step takes as long as the request closest to the TPOT limit allows, as in ours."""

    token_budget = reference.Policy.token_budget


class LengthsAndSlack(AnswerLengths):
    """Both ideas: our token_budget, and an order that knows how long answers were."""

    token_budget = reference.Policy.token_budget


SIMPLE = (
    RefuseHopeless,
    ShortestFirst,
    CachedFirst,
    SmallBudget,
    TwoDrafts,
    OftenUsedStay,
    Combined,
    CombinedWithDrafts,
    AnswerLengths,
    SlackBudget,
    LengthsAndSlack,
)


def without(method: str) -> type[reference.Policy]:
    """Our policy, with this method as policy.py has it."""
    methods = {method: getattr(policy.Policy, method)}
    if method == "refuse":  # it is where our policy learns, too
        methods[method] = lambda self, state: self.learn(state) or []
    return type(f"without {method}", (reference.Policy,), methods)


WITHOUT = tuple(map(without, ("refuse", "order", "token_budget", "num_draft_tokens", "worth")))
WITHOUT_SNAPSHOTS = without("snapshots")  # asked only with --hybrid
