"""Suspects: a step has failed, and one of its requests may be why. It is found, and the others are answered.

After a failed step every sequence waits, with the tokens from before it (LLMEngine.restart). The step's requests are
divided into two groups, and each group runs alone until all its sequences have got two tokens: one with their prompts,
which are computed anew, and one as any later token. If a step of a group fails, the group is divided again; a request
that fails alone is the culprit. With one culprit among n requests about log2(n) more steps fail, and each request
computes its prompt as often.
"""

from collections import Counter, deque

from nanovllm.request import Request

MAX_FAILED_STEPS = 32  # of one request: some may fail together and never alone


class Suspects:
    """Those that have not been cleared yet. groups: the first one is on trial, and nobody else may run."""

    def __init__(self) -> None:
        self.groups: deque[list[Request]] = deque()
        self._num_failed_steps: Counter[str] = Counter()  # by request id, of unfinished requests
        self._num_tokens: dict[int, int] = {}  # seq_id -> how many it had when its trial began

    def step_failed(self, worked_on: list[Request], unfinished: dict[str, Request]) -> list[Request]:
        """Take in a failed step. Returns the requests that are given up.

        worked_on: the step's requests. unfinished: all of the engine's.
        """
        ids = {request.request_id for request in worked_on}
        on_trial = self.groups.popleft() if self.groups else []
        waited = [request for request in on_trial if request.request_id not in ids]
        self._num_failed_steps = Counter({i: n for i, n in self._num_failed_steps.items() if i in unfinished})
        self._num_failed_steps.update(ids)
        is_over = any(self._num_failed_steps[request_id] > MAX_FAILED_STEPS for request_id in ids)
        given_up = worked_on if is_over or len(worked_on) == 1 else []
        half = len(worked_on) // 2
        halves = [] if given_up else [worked_on[:half], worked_on[half:]]
        self.groups.extendleft(group for group in reversed([*halves, waited]) if group)
        return given_up

    def next_group(self) -> list[Request]:
        """Begin the trial of the first group, if there is one."""
        group = self.groups[0] if self.groups else []
        samples = [sample for request in group for sample in request.samples]
        self._num_tokens = {sample.seq.seq_id: len(sample.seq.tokens) for sample in samples}
        return group

    def has_passed(self) -> bool:
        """Has each sequence of the group on trial got two tokens, or ended?"""
        going_on = [sample.seq for request in self.groups[0] for sample in request.samples if not sample.finished]
        return all(len(seq.tokens) >= self._num_tokens[seq.seq_id] + 2 for seq in going_on)
