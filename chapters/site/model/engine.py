"""What a page has in place of an LLM: the engine's control plane, and kernels.js for the model."""

import json
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from chapters.ch08_sampling.theory import reshape
from chapters.ch13_guess_and_check.again import noise
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.features.speculation.choose import Speculation
from nanovllm.sampling_params import SamplingParams

Kernels = Callable[[str], str]  # a step as JSON -> what came out of it


class Step(NamedTuple):
    """What the model said: for each row with logits the most likely token, and the logits if they are wanted."""

    output: SchedulerOutput
    chosen: list[int]
    logits: list[list[float]]
    seconds: float

    @property
    def chunk(self) -> ScheduledChunk:
        [chunk] = self.output.chunks
        return chunk


class PageEngine:
    """One text at a time, whose next step is computed, and taken when its tokens are known.

    layout: of an image (image.py); speculation: proposes draft tokens, if a lesson sets it; pending: a step that is
    computed and not taken.
    """

    def __init__(self, layout: dict[str, Any], kernels: Kernels) -> None:
        self.layout, self.kernels = layout, kernels
        self.scheduler = Scheduler(
            BlockManager(layout["num_blocks"], layout["block_size"]),
            max_num_seqs=1,
            max_num_batched_tokens=layout["max_rows"],
            max_model_len=layout["max_model_len"],
            eos_token_ids=frozenset(layout["eos_token_ids"]),
        )
        self.speculation: Speculation | None = None
        self.pending: Step | None = None

    def begin(self, prompt_token_ids: list[int], params: SamplingParams) -> Sequence:
        """A new text instead of the one before, whose blocks stay in the prefix cache.

        Raises ValueError for one that is too long; then the one before goes on.
        """
        before, seq = list(self.scheduler.seqs), Sequence(prompt_token_ids, params)
        self.scheduler.add(seq)
        if self.pending is not None:
            self.take(self.pending.chosen)
        self.scheduler.abort(*before)
        return seq

    def compute(self, wants_logits: bool = False) -> Step:
        """Steps up to the next one that samples. It waits to be taken."""
        while True:
            drafts = {} if self.speculation is None else self.speculation.propose(self.scheduler)
            output = self.scheduler.schedule(drafts)
            started = time.perf_counter()
            try:
                [chunk] = output.chunks
                found = self._run(chunk, logits=list(range(chunk.num_logits)) if wants_logits else [])
            except BaseException:
                self.scheduler.restart(list(self.scheduler.seqs.values()))
                raise
            step = Step(output, found["chosen"], found["logits"], time.perf_counter() - started)
            if chunk.reaches_end:
                self.pending = step
                return step
            self.scheduler.update(output, [[]])

    def take(self, token_ids: list[int]) -> list[Sequence]:
        """Append the tokens that the pending step's rows sampled. Returns the sequence if it has ended."""
        assert self.pending is not None
        step, self.pending = self.pending, None
        return self.scheduler.update(step.output, [token_ids])

    def sample(self) -> list[int]:
        """A token for each row of the pending step, as the engine's sampler draws it."""
        assert self.pending is not None
        step, seqs = self.pending, self.pending.chunk.sampled_seqs()
        if seqs[0].sampling_params.temperature == 0:
            return step.chosen
        return [
            draw(reshape(row, seq.sampling_params).after, noise(seq))
            for row, seq in zip(step.logits, seqs, strict=True)
        ]

    def attention(self, layer: int) -> list[list[float]]:
        """What each head of a layer pays to each token, seen from the last known one: its row is computed again."""
        assert self.pending is not None
        chunk = self.pending.chunk
        again = ScheduledChunk(chunk.seq, chunk.known_end - 1, chunk.known_end, write_start=chunk.known_end)
        return self._run(again, watch=layer)["attention"]

    def _run(self, chunk: ScheduledChunk, **wanted: Any) -> dict[str, Any]:
        """What worker/batch.py packs, of one sequence, and the tasks that worker/cpu/c_kernels.py makes of it."""
        table, size, num_rows = chunk.seq.block_table, self.layout["block_size"], chunk.end - chunk.start
        positions = range(chunk.start, chunk.end)
        slots = [table[i // size] * size + i % size if i >= chunk.write_start else -1 for i in positions]
        tile = self.layout["task_rows"] if num_rows > self.layout["few_rows"] else 1
        tasks = [[r, min(tile, num_rows - r), 0, chunk.start + r + 1] for r in range(0, num_rows, tile)]
        logits_rows = list(range(num_rows - chunk.num_logits, num_rows))
        inputs = [chunk.token_ids, list(positions), slots, logits_rows]
        return json.loads(self.kernels(json.dumps({"inputs": inputs, "table": table, "tasks": tasks, **wanted})))


def draw(probs: Iterable[float], number: float) -> int:
    """The first token whose cumulative probability exceeds a number in [0, 1)."""
    cumulative = list(accumulate(probs))
    return bisect_right(cumulative, number * cumulative[-1])
