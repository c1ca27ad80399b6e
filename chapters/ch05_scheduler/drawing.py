"""Parts of lab 5: the real Scheduler and BlockManager, stepped by hand. Actions are in batching.py, pictures here.

There is no model here. A scheduler is told the token ids that each chunk sampled, through update(), and that is all
it ever sees of a model; so the stage may choose the tokens itself.
"""

from collections.abc import Iterable

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chapters.ch05_scheduler.batching import letter
from chapters.draw import color_of, draw_free_queue, pool_cells
from chapters.stage import Stage, Step
from nanovllm.core.scheduler import ScheduledChunk
from nanovllm.core.sequence import Sequence


def draw_sequences(stage: Stage) -> RenderableType:
    table = Table("", "state", "tokens", "computed", "last step", "block table", show_edge=False, pad_edge=False)
    last = {c.seq.seq_id: _range(c) for c in stage.steps[-1].chunks} if stage.steps else {}
    for seq in stage.scheduler.running:
        counts = f"{seq.num_prompt_tokens}+{seq.num_generated_tokens}", str(seq.num_computed_tokens)
        work, blocks = last.get(seq.seq_id, ""), " ".join(map(str, seq.block_table))
        table.add_row(_label(stage, seq), seq.status.name, *counts, work, blocks)
    waiting = Text("waiting: ")
    for seq in stage.scheduler.waiting:
        waiting.append(_label(stage, seq)).append(f" {len(seq.tokens)} tokens  ")
    return Group(table, waiting if stage.scheduler.waiting else Text("nobody waits", "dim"))


def draw_memory(stage: Stage) -> RenderableType:
    cells = pool_cells(stage.manager, [*stage.scheduler.running, *stage.hogs], stage.names)
    return Group(Columns(cells), draw_free_queue(stage.manager, 18))


def draw_trace(stage: Stage, first: int = 0, last: int | None = None) -> Table:
    """The steps as a table."""
    table = Table("step", "chunks", "tokens", "preempted", "ended", show_edge=False, pad_edge=False)
    for number, step in list(enumerate(stage.steps, start=1))[first:last]:
        ends = _labels(stage, step.preempted), _labels(stage, step.finished)
        table.add_row(str(number), _chunks(stage, step), str(step.num_tokens), *ends)
    return table


def draw_timeline(stage: Stage, limit: int = 30) -> Text:
    """Rows are sequences, columns are steps."""
    first, text = max(len(stage.steps) - limit, 0), Text()
    for seq in stage.seqs.values():
        if stage.ended.get(seq.seq_id, first + 1) <= first and len(stage.seqs) > 8:
            continue
        text.append("\n" if text else "").append(_label(stage, seq)).append(" ")
        for number in range(first, len(stage.steps)):
            sign = letter(stage, seq, number)
            text.append(f" {sign}", f"bold {color_of(seq)}" if sign in "Pd" else "dim")
    return text


def _range(chunk: ScheduledChunk) -> str:
    return f"{chunk.start}..{chunk.end}{'*' if chunk.reaches_end else ''}"


def _chunks(stage: Stage, step: Step) -> Text:
    return Text("  ").join(_label(stage, chunk.seq).append(f" {_range(chunk)}", "none") for chunk in step.chunks)


def _label(stage: Stage, seq: Sequence) -> Text:
    return Text().append(stage.names[seq.seq_id], color_of(seq))


def _labels(stage: Stage, seqs: Iterable[Sequence]) -> Text:
    return Text(" ").join(_label(stage, seq) for seq in seqs)
