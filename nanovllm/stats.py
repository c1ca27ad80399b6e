"""EngineStats: what an engine has done so far, as numbers."""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from nanovllm.core.sequence import SequenceStatus

if TYPE_CHECKING:
    from nanovllm.core.scheduler import SchedulerOutput


class DraftRates:
    """Counters of output tokens and draft tokens, and what follows from them."""

    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def count(self, num_draft_tokens: int, num_new_tokens: int, sign: int = 1) -> None:
        """A step has checked draft tokens and given new tokens. sign: -1 takes it back."""
        self.num_output_tokens += sign * num_new_tokens
        self.num_draft_tokens += sign * num_draft_tokens
        self.num_accepted_tokens += sign * max(num_new_tokens - 1, 0)

    @property
    def acceptance_rate(self) -> float | None:
        """The share of draft tokens that became output; None where there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step gives a sequence it samples for: 1, and the accepted ones. None before the first."""
        return self.num_output_tokens / (self.num_output_tokens - self.num_accepted_tokens or 1) or None


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
