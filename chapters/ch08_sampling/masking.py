"""The parts of the lab of chapter 8 on masks: what they leave of a distribution, and where they come from."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from chapters.patching import replaced
from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.grammar import masks
from nanovllm.worker import model_runner
from nanovllm.worker.sampler import SamplingBatch, sample, sample_rows

CAPITAL = "The capital of France is"
CITIES = (" London", " Le Havre", " Berlin")
AS_JSON = "The capital of France is Paris. As JSON:"
TEXT_SCHEMA = {"type": "string"}


def masked(logits: Tensor, params: SamplingParams, **parts: Any) -> tuple[Tensor, int]:
    """What the engine's sample() leaves of the logits of a sequence with these parts, and the token it takes."""
    seq, logits = Sequence([0], params), logits[None].clone()
    seq.parts = parts
    [token_id], _ = sample(logits, SamplingBatch.from_sequences([seq]))
    return logits[0], token_id


class MaskedStep(NamedTuple):
    """One row of one step of the engine: what the model gave, what the masks left of it, and the token."""

    before: Tensor  # [vocab_size]
    after: Tensor
    token_id: int
    was_ready: bool  # the mask, when the logits came


@contextmanager
def masks_watched() -> Iterator[tuple[list[MaskedStep], list[float]]]:
    """Collects the engine's steps of one sequence with a grammar, and the seconds that each mask took."""
    steps, seconds = list[MaskedStep](), list[float]()
    bits = masks._bits

    def timed_bits(grammars: list) -> Tensor:
        started = time.perf_counter()
        found = bits(grammars)
        seconds.append(time.perf_counter() - started)
        return found

    def watched_sample(logits: Tensor, batch: SamplingBatch, *kernels: Any) -> Any:
        before = logits[0].clone()
        pending = None if batch.processors is None else batch.processors.pending
        was_ready = pending is not None and pending._future is not None and pending._future.done()
        found = sample_rows(logits, batch, *kernels)
        steps.append(MaskedStep(before, logits[0].clone(), int(found.token_ids[0]), was_ready))
        return found

    with replaced(masks, "_bits", timed_bits), replaced(model_runner, "sample_rows", watched_sample):
        yield steps, seconds
