"""What the lab and the exercises of chapter 6 share: the work of a step, and a machine that does it."""

from dataclasses import dataclass, replace

from nanovllm.core.scheduler import ScheduledChunk
from nanovllm.core.sequence import Sequence


@dataclass(frozen=True)
class StepCost:
    """What a step computes and what it reads. See `step_cost` in exercise.py for how each number is counted."""

    linear_flops: int
    attention_flops: int
    weight_bytes: int
    kv_bytes: int

    @property
    def flops(self) -> int:
        return self.linear_flops + self.attention_flops

    @property
    def read_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.read_bytes


@dataclass(frozen=True)
class Machine:
    """A model's weights and the speed of a machine: enough to predict how long a step takes, without attention."""

    weight_bytes: float  # read once a step
    flops_per_token: float  # two for each weight
    bytes_per_s: float
    flops_per_s: float


def decode_chunks(batch_size: int, context: int) -> list[ScheduledChunk]:
    """A decode step: each sequence computes the last of its `context` tokens."""
    return [ScheduledChunk(Sequence([0] * context), context - 1, context, context - 1) for _ in range(batch_size)]


def prompt_chunk(start: int, end: int, num_prompt_tokens: int) -> ScheduledChunk:
    return ScheduledChunk(Sequence([0] * num_prompt_tokens), start, end, start)


# Of the demo model in bf16, by the tokens of its context: a step in which one sequence decodes.
ONE_DECODE = {
    64: StepCost(linear_flops=268_959_744, attention_flops=4_423_680, weight_bytes=268_959_744, kv_bytes=1_474_560),
    256: StepCost(linear_flops=268_959_744, attention_flops=17_694_720, weight_bytes=268_959_744, kv_bytes=5_898_240),
}


def demo_decodes(batch_size: int, context: int) -> StepCost:
    """So many sequences that decode together: they share the weights, and nothing else."""
    one = ONE_DECODE[context]
    return replace(
        one,
        linear_flops=batch_size * one.linear_flops,
        attention_flops=batch_size * one.attention_flops,
        kv_bytes=batch_size * one.kv_bytes,
    )
