"""What an engine has done so far, as numbers: EngineStats counts, snapshot() gathers the counters of all parts."""

from dataclasses import asdict, astuple, dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.core.sequence import SequenceStatus

if TYPE_CHECKING:
    from nanovllm.core.scheduler import SchedulerOutput
    from nanovllm.engine import LLMEngine

CACHE_STATS = "queries hits misses evictions collisions hit_rate recent_hit_rate evictions_per_s".split()


class GuessRates:
    """Counters of tokens and guesses (chapter 13), and what follows from them."""

    num_output_tokens: int
    num_guessed_tokens: int
    num_accepted_tokens: int

    def count(self, num_guesses: int, num_taken: int, sign: int = 1) -> None:
        """A step has checked guesses and given tokens. sign: -1 takes it back."""
        self.num_output_tokens += sign * num_taken
        self.num_guessed_tokens += sign * num_guesses
        self.num_accepted_tokens += sign * max(num_taken - 1, 0)

    @property
    def acceptance_rate(self) -> float | None:
        """The share of guesses that became output; None where nothing was guessed."""
        return self.num_accepted_tokens / self.num_guessed_tokens if self.num_guessed_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step gives a sequence it samples for: 1, and the guesses that hold. None before the first."""
        return self.num_output_tokens / (self.num_output_tokens - self.num_accepted_tokens or 1) or None


@dataclass
class EngineStats(GuessRates):
    """Counters since the engine was built. Prefill counts tokens known before their step, decode those computed one by
    one and guesses that held, output those sampled. guessed: guesses that were computed; accepted: those that became
    output (chapter 13)."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_output_tokens: int = 0
    num_finished_requests: int = 0
    step_time_s: float = 0.0
    num_guessed_tokens: int = 0
    num_accepted_tokens: int = 0

    def __sub__(self, earlier: "EngineStats") -> "EngineStats":
        """Between two moments."""
        return EngineStats(*(a - b for a, b in zip(astuple(self), astuple(earlier), strict=True)))

    def note_scheduled(self, output: "SchedulerOutput") -> None:
        """A step is about to be computed."""
        for chunk in output.chunks:
            if chunk.seq.status is SequenceStatus.PREFILL:
                self.num_prefill_tokens += chunk.end - chunk.start
            else:
                self.num_decode_tokens += 1

    def note_step(self, output: "SchedulerOutput", num_finished: int, seconds: float) -> None:
        """A step has succeeded."""
        self.num_steps += bool(output.chunks)
        self.num_finished_requests += num_finished
        self.step_time_s += seconds
        for chunk in output.chunks:
            if chunk.samples:
                num_taken = len(chunk.seq.tokens) - chunk.known_end
                self.num_decode_tokens += max(num_taken - 1, 0)
                self.count(len(chunk.guesses), num_taken)


def snapshot(engine: "LLMEngine") -> dict[str, Any]:
    """See LLM.stats."""
    scheduler, manager = engine.scheduler, engine.block_manager
    cache, states, num_blocks = manager.stats.snapshot(), manager.count_states(), len(manager.blocks)
    return {
        **asdict(engine.stats),
        "acceptance_rate": engine.stats.acceptance_rate,
        "tokens_per_step": engine.stats.tokens_per_step,
        "num_waiting": len(scheduler.waiting),
        "num_running": len(scheduler.running),
        "num_preemptions": scheduler.num_preemptions,
        "prefix_cache": {name: getattr(cache, name) for name in CACHE_STATS}
        | {"utilization": states["cached"] / num_blocks},
        "kv_pool": {
            "num_blocks": num_blocks,
            "block_size": manager.block_size,
            "num_bytes": engine.kv_pool.num_bytes,
            **{f"num_{state}_blocks": count for state, count in states.items()},
            "usage": states["referenced"] / num_blocks,
        },
    }
