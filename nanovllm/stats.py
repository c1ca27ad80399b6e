"""EngineStats: what an engine has done so far, as numbers."""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.core.scheduler import SchedulerOutput


class TokenCounts:
    """Counters of output tokens and draft tokens, and what follows from them."""

    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int

    def count(self, num_draft_tokens: int, num_new_tokens: int, sign: int = 1) -> None:
        """Count a step that has checked draft tokens and given new tokens. sign=-1 undoes that."""
        self.num_output_tokens += sign * num_new_tokens
        self.num_draft_tokens += sign * num_draft_tokens
        self.num_accepted_tokens += sign * max(num_new_tokens - 1, 0)

    @property
    def acceptance_rate(self) -> float | None:
        """The share of draft tokens that became output; None where there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """How many tokens a sequence gets in a step that samples for it. None before the first such step.

        It gets the accepted draft tokens and one more. So the steps are the output tokens minus the accepted ones.
        """
        if self.num_output_tokens == 0:
            return None
        return self.num_output_tokens / max(self.num_output_tokens - self.num_accepted_tokens, 1)


@dataclass
class EngineStats(TokenCounts):
    """Counters since the engine was built.

    num_prefill_tokens      tokens computed for sequences that had not sampled since their admission
    num_decode_tokens       tokens computed one by one after that, and accepted draft tokens
    num_output_tokens       tokens that were sampled
    num_draft_tokens        draft tokens that were computed (chapter 13)
    num_accepted_tokens     draft tokens that became output, but for one that ended its sequence
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
        """What has been counted between two snapshots."""
        return EngineStats(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))

    def count_step(self, output: "SchedulerOutput", num_finished: int, seconds: float) -> None:
        """Count a step that has succeeded."""
        if output.chunks:
            self.num_steps += 1
        self.num_finished_requests += num_finished
        self.step_time_s += seconds
        for chunk in output.chunks:
            if chunk.is_prefill:
                self.num_prefill_tokens += chunk.known_end - chunk.start
            else:
                self.num_decode_tokens += 1
            if chunk.reaches_end:
                num_new_tokens = len(chunk.seq.tokens) - chunk.known_end
                self.num_decode_tokens += max(num_new_tokens - 1, 0)
                self.count(len(chunk.draft_token_ids), num_new_tokens)
