"""Lab of chapter 5: the real Scheduler and BlockManager, stepped by hand. Actions are in batching.py, pictures here.

There is no model here. A scheduler is told the token ids that each chunk sampled, through update(), and that is all
it ever sees of a model; so the stage may choose the tokens itself.
"""

from collections.abc import Iterable
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chapters.app import explorer
from chapters.ch05_scheduler import page
from chapters.ch05_scheduler.batching import (
    ACTIONS,
    REQUESTS,
    Comparison,
    StaticStage,
    idle_share,
    letter,
    mean_num_steps,
    num_computed_tokens,
    summary,
)
from chapters.draw import color_of, draw_free_queue, pool_cells
from chapters.stage import EOS, Stage, Step
from chapters.story import Story
from nanovllm.core.scheduler import ScheduledChunk
from nanovllm.core.sequence import Sequence

# -- pictures of a stage ----------------------------------------------------------------------------------------------


def panels(world: Comparison) -> list[tuple[str, RenderableType]]:
    ours, static = world.ours, world.static
    used = ours.steps[-1].num_tokens if ours.steps else 0
    budget, seats = ours.scheduler.max_num_batched_tokens, ours.scheduler.max_num_seqs
    return [
        (f"Step {len(ours.steps)}: {used} of {budget} tokens; * samples", draw_step(ours)),
        (f"Running, {seats} seats; tokens are prompt+generated", draw_sequences(ours)),
        (f"Pool, blocks of {ours.manager.block_size} tokens", draw_memory(ours)),
        (summary("Continuous", ours), draw_timeline(ours)),
        (summary("Static batches", static), draw_timeline(static)),
    ]


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


def draw_step(stage: Stage) -> Text:
    if not stage.steps:
        return Text("no step yet: press s", "dim")
    step = stage.steps[-1]
    text = _chunks(stage, step) if step.chunks else Text("nothing to compute")
    for what, seqs in (("preempted", step.preempted), ("ended", step.finished)):
        if seqs:
            text.append(f"  | {what}: ").append(_labels(stage, seqs))
    return text


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


def make_app(model: str | None) -> Any:
    return explorer("Chapter 5: the scheduler", Comparison(), panels, ACTIONS, page=page)


# -- the story ------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    story.say("The Scheduler and the BlockManager are the engine's. A stage samples in the model's place.")
    _one_request(story)
    _static_and_continuous(story)
    _budget(story)
    _preemption(story)
    _head_of_the_line(story)
    _price_of_preemption(story)
    _endings(story)


def _one_request(story: Story) -> None:
    story.part("One request, from WAITING to FINISHED")
    stage = Stage(max_num_batched_tokens=6)
    seq = stage.add(10, 3)
    table = Table("step", "chunk", "samples", "state after it", "len(tokens)", "computed", show_edge=False)
    table.add_row("", "", "", seq.status.name, str(len(seq.tokens)), str(seq.num_computed_tokens))
    while stage.has_unfinished():
        [chunk] = stage.step().chunks
        work = f"{chunk.start}..{chunk.end}", str(seq.tokens[-1]) if chunk.reaches_end else "", seq.status.name
        table.add_row(str(len(stage.steps)), *work, str(len(seq.tokens)), str(seq.num_computed_tokens))
    story.say(
        "The prompt has 10 tokens, the budget is 6 tokens a step, and the answer has 3 tokens (the last is EOS, id 0)."
    )
    story.show(table)
    story.say(
        "Computed chases len(tokens). When it gets there the step samples, and is one behind again. "
        "The last token is never computed: nobody asks what comes after it."
    )


def _static_and_continuous(story: Story) -> None:
    story.part("Eight requests, four seats: static and continuous batching")
    options: dict = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    stages: dict[str, Stage] = {"static batches": StaticStage(32, **options), "continuous": Stage(32, **options)}
    for title, stage in stages.items():
        for request in REQUESTS:
            stage.add(*request)
        stage.run()
        story.say(f"{title} (P prefill, d decode, . waits, - has ended and keeps its seat):")
        story.show(draw_timeline(stage))
    table = Table("", "steps", "idle seats", "tokens a step", "steps from arrival to end", show_edge=False)
    for title, stage in stages.items():
        numbers = f"{idle_share(stage):.0%}", f"{num_computed_tokens(stage) / len(stage.steps):.1f}"
        table.add_row(title, str(len(stage.steps)), *numbers, f"{mean_num_steps(stage):.1f}")
    story.show(table)
    [computed] = {num_computed_tokens(stage) for stage in stages.values()}
    story.say(f"Both computed the same {computed} tokens. What differs is how many steps they are spread over.")


def _budget(story: Story) -> None:
    story.part("A budget of 8 tokens a step")
    stage = Stage(max_num_batched_tokens=8)
    stage.add(5, 6)
    stage.add(3, 6)
    stage.step()
    stage.add(17, 3)
    stage.add(2, 2)
    stage.run()
    story.say("A and B run. Then C comes with 17 tokens, and D with 2. A star marks the chunks that sample.")
    story.show(draw_trace(stage))
    story.say(
        "Decodes come first, one token each; what is left goes to C's prompt. D comes in only when C's prompt is done: "
        "one sequence at most is in the middle of its prompt, the last one."
    )


def _preemption(story: Story) -> None:
    story.part("The pool runs dry")
    stage = Stage(7, max_num_batched_tokens=32)
    for num_prompt_tokens, num_answer_tokens in ((7, 4), (7, 8), (5, 8)):
        stage.add(num_prompt_tokens, num_answer_tokens)
    while stage.scheduler.num_preemptions == 0:
        before = Group(draw_sequences(stage), draw_memory(stage))
        num_computed = {seq.seq_id: seq.num_computed_tokens for seq in stage.scheduler.running}
        stage.step()
    [victim] = stage.steps[-1].preempted
    name, number = stage.names[victim.seq_id], len(stage.steps)
    pool = f"{len(stage.manager.blocks)} blocks of {stage.manager.block_size} tokens"
    story.say(f"{pool}, three sequences with prompts of 7, 7 and 5 tokens. Before step {number}:")
    story.show(before)
    story.say(f"After step {number}, which preempted {name}:")
    story.show(Group(draw_sequences(stage), draw_memory(stage)))
    story.say(
        f"{name} keeps its {len(victim.tokens)} tokens, {victim.num_generated_tokens} of them generated, and nothing "
        f"else: num_computed_tokens={victim.num_computed_tokens}, block_table={victim.block_table}."
    )
    while not victim.block_table:
        stage.step()
    chunk = stage.steps[-1].chunks[-1]
    story.say(
        f"Step {len(stage.steps)} admits {name} again: {victim.num_cached_tokens} tokens found cached, {chunk.start}.."
        f"{chunk.end} computed, {num_computed[victim.seq_id] - chunk.start} of them for the second time."
    )
    stage.run()
    story.show(draw_timeline(stage))
    story.show(draw_trace(stage, number - 2, number + 3))
    assert [seq.num_generated_tokens for seq in stage.seqs.values()] == [4, 8, 8]
    story.say("Everybody got the answer it would have got alone. C's came later.")


def _head_of_the_line(story: Story) -> None:
    story.part("The first that does not fit holds up the line")
    stage = Stage(8)
    stage.add(14, 4)
    stage.step()
    stage.add(20, 2)
    stage.add(3, 2)
    stage.step()
    story.say("A runs in 4 of 8 blocks. B needs 5 blocks. C needs 1, would fit, and stands behind B:")
    story.show(Group(draw_sequences(stage), draw_memory(stage)))
    stage.run()
    story.show(draw_trace(stage))


def _price_of_preemption(story: Story) -> None:
    story.part("What a small pool costs")
    table = Table("blocks", "prefix cache", "steps", "preemptions", "tokens computed", "of them again", show_edge=False)
    for num_blocks in (40, 20, 16, 12, 8):
        for caching in (True, False):
            stage = Stage(num_blocks, max_num_batched_tokens=64, max_num_seqs=8, enable_prefix_caching=caching)
            for num_prompt_tokens, num_answer_tokens in REQUESTS:
                stage.add(num_prompt_tokens + 4, num_answer_tokens + 6)
            stage.run()
            num_needed = sum(len(seq.tokens) - 1 for seq in stage.seqs.values())
            again = num_computed_tokens(stage) - num_needed
            counts = len(stage.steps), stage.scheduler.num_preemptions, num_computed_tokens(stage), again
            table.add_row(str(num_blocks), "on" if caching else "off", *map(str, counts))
    story.say(
        "Eight requests with longer prompts and answers run, at most eight at a time, in smaller and smaller pools:"
    )
    story.show(table)
    story.say("The tokens of every sequence are the same in all ten rows. Only the work differs.")


def _endings(story: Story) -> None:
    story.part("How a sequence ends")
    stage = Stage(16, max_model_len=12)
    cases: list[tuple[str, list[int], dict]] = [
        ("EOS", [11, EOS], {}),
        ("ignore_eos=True, max_tokens=4", [11, EOS], {"ignore_eos": True, "max_tokens": 4}),
        ("stop_token_ids=[99]", [11, 12, 99], {"stop_token_ids": [99]}),
        ("min_tokens=2", [EOS, EOS, EOS, EOS], {"min_tokens": 2}),
        ("EOS is the last one allowed", [11, EOS], {"max_tokens": 2}),
        ("max_model_len=12", list(range(11, 30)), {}),
    ]
    table = Table("", "rule", "generated", "finish_reason", "stop_reason", show_edge=False)
    for _, answer, params in cases:
        stage.add(8, answer, **params)
    stage.run()
    for seq, (rule, _, _) in zip(stage.seqs.values(), cases, strict=True):
        shown = " ".join("EOS" if token == EOS else str(token) for token in seq.generated_token_ids)
        table.add_row(stage.names[seq.seq_id], rule, shown, str(seq.finish_reason), str(seq.stop_reason))
    story.say("The prompts have 8 tokens. The table shows what the lab sampled, and why the scheduler ended each:")
    story.show(table)
