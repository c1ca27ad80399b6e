"""Our policy. Try your own first: python -m chapters capstone run

A request costs machine time: the tokens of its prompt that are not in the cache, the tokens of its answer, and the
memory and the seat that it holds meanwhile. What an answer will cost is learned from requests that began alike: how
long their answers were, and how many of their draft tokens were accepted. Then:

- refuse: those who cannot get a first token in time, even alone;
- order: the cheapest first. A request waits if its cost is above the price at which the machine was full lately, if
  memory would run out while it is there, or if its prompt could not be computed in time;
- token_budget: a step takes as long as the request that is closest to the TPOT limit allows;
- num_draft_tokens: as many as are likely enough to be accepted, the fewer the more requests share the step;
- worth: a block that has been found again counts as younger than it is;
- snapshots: where a prompt leaves what is cached, and at its end.
"""

import math
from collections import Counter, deque

from chapters.capstone.views import Block, Request, Setup, State

SAFETY = 0.99  # of the TPOT limit
WINDOW_S = 10.0  # the price is found from the requests that came in this time
FULL = 1.5  # how much more cost than the window has seconds: the three kinds of cost overlap
GROWTH = 0.7  # of what answers are expected to grow, so much is kept free: they do not all grow to the end
PRIOR_ANSWERS, PRIOR_TOKENS = 0.25, 100.0  # what a new beginning is taken for: a quarter of an answer of usual length
PRIOR_CHECKED, PRIOR_CHANCE = 4.0, 0.7  # and four draft tokens, of which 70 % were accepted
OFTEN_CHANCE = 0.25  # for an estimate of the cost: draft tokens are asked for down to this chance
MEMORY_WEIGHT, SLOT_WEIGHT = 1.0, 0.7  # of the shares of memory and of a step's tokens, against that of the seats
KEPT_S = 20.0  # for each doubling of its uses, a block counts as so many seconds younger


class Kind:
    """What is known of requests that have one beginning, or of all."""

    def __init__(self) -> None:
        self.num_ended = 0
        self.num_tokens = 0  # of the answers that have ended
        self.num_growing = 0  # of those that have not
        self.num_checked = 0
        self.num_accepted = 0

    def add(self, request: Request) -> None:
        self.num_ended += 1
        self.num_tokens += request.num_generated_tokens + 1  # the last token came with the end
        self.num_checked += request.num_checked
        self.num_accepted += request.num_accepted


class Policy:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.price = math.inf
        self.priced_s = -1.0  # when
        self.num_seen = 0  # requests; their ids are 0, 1, 2, ...
        self.seen: Counter[str] = Counter()  # beginning -> requests
        self.kinds: dict[str, Kind] = {"": Kind()}  # "": of beginnings that came once
        self.all = Kind()
        self.live: dict[int, Request] = {}  # those who waited or ran before the last step
        self.recent: deque[Request] = deque()  # those who came within the window

    # -- what is learned ------------------------------------------------------------------------------------------

    def learn(self, state: State) -> None:
        for request in state.waiting:
            if request.id >= self.num_seen:
                self.seen[request.beginning] += 1
                self.recent.append(request)
        self.num_seen = max([self.num_seen, *(request.id + 1 for request in state.waiting)])
        while self.recent and self.recent[0].arrival_s < state.now - WINDOW_S:
            self.recent.popleft()
        live = {request.id: request for request in state.waiting + state.running}
        for request in self.live.values():
            if request.id not in live and request.first_token_s is not None:  # answered
                self.all.add(request)
                self.kinds.setdefault(request.beginning, Kind()).add(request)
                if self.seen[request.beginning] == 1:
                    self.kinds[""].add(request)
        self.live = live
        for kind in self.kinds.values():
            kind.num_growing = 0
        for request in live.values():
            self.kind_of(request).num_growing += request.num_generated_tokens

    def kind_of(self, request: Request) -> Kind:
        name = request.beginning if self.seen[request.beginning] > 1 else ""
        return self.kinds.setdefault(name, Kind())

    def answer_tokens(self, request: Request) -> float:
        """How long its answer will be: all tokens of its kind for each answer that has ended. Those that still grow
        count, so that long answers are noticed long before the first of them ends."""
        usual = (self.all.num_tokens + 2 * PRIOR_TOKENS) / (self.all.num_ended + 2)
        kind = self.kind_of(request)
        return (kind.num_tokens + kind.num_growing + PRIOR_ANSWERS * usual) / (kind.num_ended + PRIOR_ANSWERS)

    def tokens_to_come(self, request: Request) -> float:
        expected = self.answer_tokens(request)
        return max(expected - request.num_generated_tokens, 0.3 * expected, 8)

    def chance(self, request: Request) -> float:
        """That a draft token is accepted: its own ones, and those of its kind as much as four of its own."""
        kind = self.kinds.get(request.beginning) or self.kind_of(request)
        of_kind = (kind.num_accepted + PRIOR_CHECKED * PRIOR_CHANCE) / (kind.num_checked + PRIOR_CHECKED)
        return (request.num_accepted + PRIOR_CHECKED * of_kind) / (request.num_checked + PRIOR_CHECKED)

    def drafts_down_to(self, request: Request, least: float) -> int:
        """The draft tokens that are all accepted with at least this chance."""
        chance = min(self.chance(request), 0.97)
        return min(int(math.log(least) / math.log(chance)), self.setup.max_draft_tokens) if chance > least else 0

    def speed(self, request: Request) -> float:
        """Tokens in a step: one, and the draft tokens that are accepted."""
        chance = min(self.chance(request), 0.95)
        return (1 - chance ** (self.drafts_down_to(request, OFTEN_CHANCE) + 1)) / (1 - chance)

    def cost(self, request: Request) -> float:
        """Seconds of the whole machine, at steps that are as long as the TPOT limit."""
        setup = self.setup
        answer, speed = self.answer_tokens(request), self.speed(request)
        stay_s = answer / speed * setup.tpot_limit_s
        slots = request.num_left + answer * (1 + self.drafts_down_to(request, OFTEN_CHANCE)) / speed
        slots_a_second = (setup.tpot_limit_s - setup.step_s) / setup.token_s / setup.tpot_limit_s
        memory = (request.num_left + answer / 2) / (setup.num_blocks * setup.block_size)
        seat = 1 / setup.max_num_seqs
        return SLOT_WEIGHT * slots / slots_a_second + (MEMORY_WEIGHT * memory + seat) * stay_s

    def set_price(self, now: float) -> None:
        """The cost of the dearest request that the machine has room for, if it takes those of the window by cost."""
        room_s = FULL * min(WINDOW_S, max(now, 1.0))
        self.price, self.priced_s = math.inf, now
        for cost in sorted(map(self.cost, self.recent)):
            room_s -= cost
            if room_s < 0:
                self.price = cost
                break

    # -- what is decided ------------------------------------------------------------------------------------------

    def refuse(self, state: State) -> list[int]:
        self.learn(state)
        setup = self.setup
        late = []
        for request in state.waiting:
            num_steps = math.ceil(request.num_left / setup.max_num_batched_tokens)
            soonest_s = state.now + num_steps * setup.step_s + request.num_left * setup.token_s
            if request.first_token_s is None and soonest_s > request.arrival_s + setup.ttft_limit_s:
                late.append(request.id)
        return late

    def order(self, state: State) -> list[int]:
        setup = self.setup
        if state.now > self.priced_s + 0.5:
            self.set_price(state.now)
        new = sorted((request for request in state.waiting if request.first_token_s is None), key=self.cost)
        preempted = [request for request in state.waiting if request.first_token_s is not None]
        guests = [(self.tokens_to_come(request), self.speed(request)) for request in state.running]
        beginnings = {request.beginning for request in state.running}
        prompts_left = sum(max(request.num_left - 1, 0) for request in state.running)
        free_tokens = state.num_free_blocks * setup.block_size - prompts_left
        step_tokens = self.token_budget(state) - sum(max(request.num_left, 1) for request in state.running)
        tokens_a_second = (1 - setup.step_s / setup.tpot_limit_s) / setup.token_s
        chosen = []
        for request in preempted + new:
            size = request.num_left
            if request.beginning not in beginnings:
                size += request.num_cached_tokens  # cached, but of nobody who runs: they count as free so far
            mine = self.tokens_to_come(request), self.speed(request)
            num_steps = mine[0] / mine[1]  # that it stays; so long the others grow, too
            growth = GROWTH * sum(min(left, num_steps * speed) for left, speed in [*guests, mine])
            if size + growth > free_tokens:
                continue
            if request.first_token_s is None and state.running:
                left_s = request.arrival_s + setup.ttft_limit_s - state.now
                if self.cost(request) > self.price or request.num_left > step_tokens + left_s * tokens_a_second:
                    continue
            free_tokens -= size
            step_tokens -= request.num_left
            guests.append(mine)
            beginnings.add(request.beginning)
            chosen.append(request.id)
        if not chosen and not state.running:  # somebody must run
            chosen = [request.id for request in (preempted + new)[:1]]
        return chosen

    def token_budget(self, state: State) -> int:
        setup = self.setup
        spare_s = [math.inf]
        for request in state.running:
            if request.first_token_s is not None:
                allowed_s = SAFETY * setup.tpot_limit_s * request.num_generated_tokens
                left_s = request.first_token_s + allowed_s - state.now
                if left_s > 0:  # else it is lost already, and nobody waits for it
                    spare_s.append(left_s)
        most = (min(spare_s) - setup.step_s) / setup.token_s
        return int(max(len(state.running) + 1, min(most, setup.max_num_batched_tokens)))

    def num_draft_tokens(self, state: State) -> dict[int, int]:
        """An accepted one saves its request a token's time and its share of a step; one more token costs its time."""
        setup = self.setup
        saved_s = setup.token_s + setup.step_s / max(len(state.running), 1)
        answered = [request for request in state.running if request.first_token_s is not None]
        return {request.id: self.drafts_down_to(request, setup.token_s / saved_s) for request in answered}

    def worth(self, state: State, block: Block) -> float:
        return state.now + KEPT_S * math.log2(1 + block.num_uses)

    def snapshots(self, num_tokens: int, num_matched: int) -> dict[int, bool] | None:
        """Where prompts part, others have parted before: wanted. The end of a prompt may be wanted by the next turn."""
        size = self.setup.block_size
        last = (num_tokens - 1) // size * size
        positions = {last: False} if last > 0 else {}
        if 0 < num_matched < num_tokens:
            positions[num_matched] = True
        return positions
