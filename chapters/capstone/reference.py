"""Our policy. Try your own first: python -m chapters capstone run

Five ideas, one for each method. A request that cannot be answered in time is sent away before it costs anything. The
one with the least to compute comes first: more requests become good in the same time. A step is as long as the request
that is closest to the limit of TPOT allows. Draft tokens are checked where enough of them have been accepted. A
block that has been found again is worth more than one that is merely young.
"""

import math

from chapters.capstone.views import Block, Request, Setup, State

SAFETY = 0.95  # of the limits: a step's end is known only when it is there
LEAST_CHANCE = 0.25  # that a draft token is accepted; below that, its token's time is worth more
KEPT_S = 20.0  # for each doubling of its uses, a block counts as so many seconds younger
PRIOR = 4.0  # draft tokens of others with the same beginning that count as much as all of one's own


class Policy:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.running: dict[int, Request] = {}  # at the last step
        self.of_beginning: dict[str, tuple[int, int]] = {}  # (held, checked) of those that have ended

    def refuse(self, state: State) -> list[int]:
        setup = self.setup
        late = []
        for request in state.waiting:
            left = request.num_left
            num_steps = math.ceil(left / setup.max_num_batched_tokens)
            soonest_s = state.now + num_steps * setup.step_s + left * setup.token_s
            if request.first_token_s is None and soonest_s > request.arrival_s + setup.ttft_limit_s:
                late.append(request.id)
        return late

    def order(self, state: State) -> list[int]:
        def first(request: Request) -> tuple[bool, int]:
            return request.first_token_s is None, request.num_left

        return [request.id for request in sorted(state.waiting, key=first)]

    def token_budget(self, state: State) -> int:
        setup, spare_s = self.setup, [math.inf]
        for request in state.running:
            if request.first_token_s is not None:
                allowed_s = SAFETY * setup.tpot_limit_s * request.num_generated_tokens
                left_s = request.first_token_s + allowed_s - state.now
                if left_s > 0:  # else it is lost already, and nobody waits for it
                    spare_s.append(left_s)
        most = (min(spare_s) - setup.step_s) / setup.token_s
        return int(max(len(state.running) + 1, min(most, setup.max_num_batched_tokens)))

    def num_draft_tokens(self, state: State) -> dict[int, int]:
        self._learn(state)
        wanted = {}
        for request in state.running:
            held, checked = self.of_beginning.get(request.beginning, (0, 0))
            expected = (held + 1) / (checked + 2)
            chance = (request.num_accepted + PRIOR * expected) / (request.num_checked + PRIOR)
            if request.first_token_s is not None and chance > LEAST_CHANCE:
                most = int(math.log(LEAST_CHANCE) / math.log(min(chance, 0.95)))
                wanted[request.id] = min(most, self.setup.max_draft_tokens)
        return wanted

    def worth(self, state: State, block: Block) -> float:
        return state.now + KEPT_S * math.log2(1 + block.num_uses)

    def snapshots(self, num_tokens: int, num_matched: int) -> dict[int, bool] | None:
        return None

    def _learn(self, state: State) -> None:
        """Take over what became of the draft tokens of those that have gone."""
        running = {request.id: request for request in state.running}
        for request in self.running.values():
            if request.id not in running:
                held, checked = self.of_beginning.get(request.beginning, (0, 0))
                self.of_beginning[request.beginning] = held + request.num_accepted, checked + request.num_checked
        self.running = running
