"""Parts of lab 2: one request through every hand-off of the engine, with the real objects printed.

The engine makes its steps itself. A Tap stands at the hand-offs, lets everything pass, and writes down what went by.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.pretty import pretty_repr
from rich.table import Table

from chapters.patching import replaced
from chapters.story import WIDTH
from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.engine import LLMEngine

ROOT = Path(__file__).parents[2]

CONTROL_PLANE_ALONE = """
import sys
for name in ("torch", "numpy", "transformers"):
    sys.modules[name] = None  # from here on, importing it raises ImportError
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence

scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32)
scheduler.add(Sequence([11, 12, 13, 14, 15, 16, 17, 18, 19, 20]))
for made_up in (101, 102, 103):
    output = scheduler.schedule()
    spans = [(chunk.start, chunk.end, chunk.reaches_end) for chunk in output.chunks]
    scheduler.update(output, [[made_up] if output.chunks[0].reaches_end else []])
    print(spans, output.chunks[0].seq)
try:
    import nanovllm.worker.model_runner
except ImportError as error:
    print("the data plane:", error)
"""


@dataclass
class Step:
    """What went by in one step. Sequences change later, so they are written down as text at once."""

    scheduled: str = ""
    owners: list[str] = field(default_factory=list)  # of each chunk, the id of its request
    spans: list[str] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    batch: Any = None
    sampling: Any = None
    logits: Any = None  # [R, vocab_size], before the sampler changes them
    sampled_token_ids: list[list[int]] = field(default_factory=list)  # of each chunk
    ended: list[str] = field(default_factory=list)  # what update() returned
    after_update: list[str] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)


class Tap:
    """Listens at the hand-offs inside LLMEngine.step()."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.steps: list[Step] = []

    def step(self) -> Step:
        """Let the engine make one step. Returns what went by."""
        self.steps.append(Step())
        with self._listening():
            self.steps[-1].outputs = self.engine.step()
        return self.steps[-1]

    @contextmanager
    def _listening(self) -> Iterator[None]:
        from nanovllm.worker import model_runner

        engine, seen = self.engine, self.steps[-1]

        def after_schedule(output: Any) -> None:
            seen.scheduled = pretty_repr(output, max_width=WIDTH)
            seen.owners = [chunk.seq.request_id for chunk in output.chunks]
            seen.spans = [f"[{chunk.start}, {chunk.end})" for chunk in output.chunks]
            seen.samples = [chunk.reaches_end for chunk in output.chunks]

        def after_pack(work: Any) -> None:
            seen.batch, seen.sampling = work

        def before_sample(logits: Any, sampling: Any) -> None:
            seen.logits = logits.clone()

        def after_run(result: Any) -> None:
            seen.sampled_token_ids = result.sampled_token_ids

        def before_update(output: Any, sampled_token_ids: list[list[int]]) -> None:
            self._updated = [chunk.seq for chunk in output.chunks]

        def after_update(ended: Any) -> None:
            seen.ended, seen.after_update = list(map(repr, ended)), list(map(repr, self._updated))

        with ExitStack() as stack:
            for owner, name, before, after in (
                (engine.scheduler, "schedule", None, after_schedule),
                (model_runner, "pack", None, after_pack),
                (engine.model_runner, "_sample", before_sample, None),
                (engine.model_runner, "run", None, after_run),
                (engine.scheduler, "update", before_update, after_update),
            ):
                stack.enter_context(replaced(owner, name, _tapped(getattr(owner, name), before, after)))
            yield


def _tapped(function: Callable, before: Callable | None, after: Callable | None) -> Callable:
    def tapped(*args: Any) -> Any:
        if before is not None:
            before(*args)
        result = function(*args)
        if after is not None:
            after(result)
        return result

    return tapped


def repr_of(params: SamplingParams) -> str:
    """The fields that differ from the defaults."""
    default = SamplingParams()
    changed = {name: value for name, value in vars(params).items() if value != getattr(default, name)}
    return f"SamplingParams({', '.join(f'{name}={value!r}' for name, value in changed.items())})"


def steps_table(llm: LLM, steps: list[Step], first: int) -> Table:
    """One row for each chunk of each step."""
    decode = llm.get_tokenizer().decode
    table = Table("step", "of", "chunk", "input_ids", "slots", "seqlens_k", "sampled", "output", show_edge=False)
    for number, step in enumerate(steps, start=first):
        batch = step.batch
        outputs = {output.request_id: output.outputs[0].finish_reason or "goes on" for output in step.outputs}
        ends = batch.cu_seqlens_q.tolist()
        for b, owner in enumerate(step.owners):
            rows = slice(ends[b], ends[b + 1])
            ids, slots = spaced(batch.input_ids[rows].tolist()), first_to_last(batch.slot_mapping[rows].tolist())
            token = ", ".join(f"{token_id} {decode([token_id])!r}" for token_id in step.sampled_token_ids[b])
            cells = step.spans[b], ids, slots, str(batch.seqlens_k[b].item()), token, outputs.get(owner, "")
            table.add_row(str(number) if b == 0 else "", owner, *map(escape, cells))
    return table


def spaced(numbers: list[int]) -> str:
    return " ".join(map(str, numbers))


def first_to_last(slots: list[int]) -> str:
    """Slots one after another as a range: 16-19."""
    in_a_row = len(slots) > 1 and slots == list(range(slots[0], slots[-1] + 1))
    return f"{slots[0]}-{slots[-1]}" if in_a_row else spaced(slots)
