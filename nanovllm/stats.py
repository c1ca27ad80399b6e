"""EngineStats: what an engine has done so far, as numbers."""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from nanovllm.core.sequence import SequenceStatus
from nanovllm.features.speculation.rates import DraftRates

if TYPE_CHECKING:
    from nanovllm.core.scheduler import SchedulerOutput


@dataclass
class EngineStats(DraftRates):
    """Counters since the engine was built.

    Prefill counts tokens that were known before their step, decode those computed one by one and accepted draft tokens,
    output those sampled. num_draft_tokens were computed, num_accepted_tokens became output (chapter 13).
    """

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_finished_requests: int = 0
    step_time_s: float = 0.0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __sub__(self, earlier: "EngineStats") -> "EngineStats":
        """Between two moments."""
        return EngineStats(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))

    def count_scheduled(self, output: "SchedulerOutput") -> None:
        """A step is about to be computed."""
        for chunk in output.chunks:
            if chunk.seq.status is SequenceStatus.PREFILL:
                self.num_prefill_tokens += chunk.end - chunk.start
            else:
                self.num_decode_tokens += 1

    def count_step(self, output: "SchedulerOutput", num_finished: int, seconds: float) -> None:
        """A step has succeeded."""
        self.num_steps += bool(output.chunks)
        self.num_finished_requests += num_finished
        self.step_time_s += seconds
        for chunk in output.chunks:
            if chunk.reaches_end:
                num_new_tokens = len(chunk.seq.tokens) - chunk.known_end
                self.num_decode_tokens += max(num_new_tokens - 1, 0)
                self.count(len(chunk.draft_token_ids), num_new_tokens)
