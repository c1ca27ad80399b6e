"""Lab of chapter 5: the real Scheduler and BlockManager, stepped by hand.

There is no model here. A scheduler is told one token id for each sequence that sampled, through update(), and that is
all it ever sees of a model; so the lab may choose the tokens itself. It has decided beforehand when each sequence will
answer EOS, and it does not tell the scheduler.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chapters.draw import color_of, draw_free_queue, pool_cells
from chapters.story import Story
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from chapters.explorer import Explorer

EOS = 0
BLOCK_SIZE = 4
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# (tokens of the prompt, tokens that the lab will answer, EOS included)
REQUESTS = [(6, 3), (4, 12), (9, 5), (5, 2), (7, 9), (3, 4), (8, 10), (5, 3)]


class Work(NamedTuple):
    """A chunk as it was when scheduled: afterwards its sequence has more tokens, and chunk.samples changes."""

    seq: Sequence
    start: int
    end: int
    samples: bool
    status: SequenceStatus

    def __str__(self) -> str:
        return f"{self.start}..{self.end}{'*' if self.samples else ''}"


class Step(NamedTuple):
    work: list[Work]
    preempted: list[Sequence]
    finished: list[Sequence]
    num_tokens: int
    idle: set[int]  # seq_ids that hold a slot of a static batch although they have ended


class World:
    """A scheduler, its block manager, and the lab in the place of the model."""

    def __init__(
        self,
        num_blocks: int = 16,
        *,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 32,
        enable_prefix_caching: bool = True,
    ) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            eos_token_ids=frozenset([EOS]),
        )
        self.seqs: list[Sequence] = []  # all there ever were, in the order of arrival
        self.hogs: list[Sequence] = []
        self.steps: list[Step] = []
        self.names: dict[int, str] = {}
        self._answers: dict[int, list[int]] = {}
        self._arrived: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    # -- what one can do ------------------------------------------------------------------------------------------

    def add(self, num_prompt_tokens: int, answer: int | list[int], **params: Any) -> Sequence:
        """A request. answer: the tokens that the lab will sample for it, or how many (the last is EOS then)."""
        number = len(self.seqs)
        first = 1000 * (number + 1)  # every request has tokens of its own: no shared prefixes in this chapter
        if isinstance(answer, int):
            answer = [*range(first + 500, first + 499 + answer), EOS]
        options: dict = {"max_tokens": None} | params
        seq = Sequence(list(range(first, first + num_prompt_tokens)), SamplingParams(**options))
        self._queue(seq)
        self.seqs.append(seq)
        self.names[seq.seq_id] = NAMES[number % 26] + (str(number // 26) if number >= 26 else "")
        self._answers[seq.seq_id] = answer
        self._arrived[seq.seq_id] = len(self.steps)
        return seq

    def step(self) -> Step:
        """One step of an engine: schedule, sample (the lab's part), update."""
        output = self.scheduler.schedule()
        work = [Work(c.seq, c.start, c.end, c.samples, c.seq.status) for c in output.chunks]
        token_ids = [self._sample(w.seq) for w in work if w.samples]
        finished = self.scheduler.update(output, token_ids)
        self.check()
        self.steps.append(Step(work, output.preempted, finished, output.num_tokens, set()))
        self._ended.update((seq.seq_id, len(self.steps)) for seq in finished)
        return self.steps[-1]

    def run(self, limit: int = 1000) -> None:
        while self.has_unfinished() and len(self.steps) < limit:
            self.step()

    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished()

    def abort(self, seq: Sequence) -> None:
        self.scheduler.abort(seq.seq_id)
        self._ended.setdefault(seq.seq_id, len(self.steps))

    def take_blocks(self, num_blocks: int) -> None:
        """A hog: a Sequence that holds real blocks of the pool and never runs. ValueError when it may not have them."""
        num_left = len(self.manager.blocks) - sum(len(hog.block_table) for hog in self.hogs) - num_blocks
        if num_left < self.manager.num_blocks_for(self.scheduler.max_model_len):
            raise ValueError(f"Refused: one sequence of max_model_len={self.scheduler.max_model_len} must always fit.")
        hog = Sequence([EOS])
        if not self.manager.append_slots(hog, num_blocks * BLOCK_SIZE):
            raise ValueError(f"{num_blocks} blocks are not free now, and a hog cannot preempt. Step, then try again.")
        self.names[hog.seq_id] = "hog"
        self.hogs.append(hog)

    def give_blocks(self) -> None:
        for hog in self.hogs:
            self.manager.free(hog)
        self.hogs = []

    def check(self) -> None:
        """The engine's own checks. The scheduler's counts references, and does not know hogs."""
        (self.manager if self.hogs else self.scheduler).check_integrity()

    # -- what one can ask -----------------------------------------------------------------------------------------

    @property
    def num_computed_tokens(self) -> int:
        return sum(step.num_tokens for step in self.steps)

    @property
    def idle_share(self) -> float:
        """Of the seats of all steps, how many had no work?"""
        num_slots = len(self.steps) * self.scheduler.max_num_seqs
        return 1 - sum(len(step.work) for step in self.steps) / num_slots if num_slots else 0.0

    @property
    def mean_num_steps(self) -> float:
        """From a request's arrival to its end, mean over the requests that have ended."""
        spans = [end - self._arrived[seq_id] for seq_id, end in self._ended.items()]
        return sum(spans) / max(len(spans), 1)

    # -- pictures -------------------------------------------------------------------------------------------------

    def draw_sequences(self) -> RenderableType:
        table = Table("", "state", "tokens", "computed", "last step", "block table", show_edge=False, pad_edge=False)
        last = {w.seq.seq_id: w for w in self.steps[-1].work} if self.steps else {}
        for seq in self.scheduler.running:
            counts = f"{seq.num_prompt_tokens}+{seq.num_generated_tokens}", str(seq.num_computed_tokens)
            work, blocks = str(last.get(seq.seq_id, "")), " ".join(map(str, seq.block_table))
            table.add_row(self._label(seq), seq.status.name, *counts, work, blocks)
        waiting = Text("waiting: ")
        for seq in self.scheduler.waiting:
            waiting.append(self._label(seq)).append(f" {len(seq.tokens)} tokens  ")
        return Group(table, waiting if self.scheduler.waiting else Text("nobody waits", "dim"))

    def draw_step(self) -> Text:
        if not self.steps:
            return Text("no step yet: press s", "dim")
        step, text = self.steps[-1], Text()
        for work in step.work:
            text.append(self._label(work.seq)).append(f" {work}  ")
        if not step.work:
            text.append("nothing to compute")
        for what, seqs in (("preempted", step.preempted), ("ended", step.finished)):
            if seqs:
                text.append(f"| {what}: ").append(self._list(seqs)).append(" ")
        return text

    def draw_memory(self) -> RenderableType:
        cells = pool_cells(self.manager, [*self.scheduler.running, *self.hogs], self.names)
        return Group(Columns(cells), draw_free_queue(self.manager, 18))

    def draw_trace(self, first: int = 0, last: int | None = None) -> Table:
        """The steps as a table."""
        table = Table("step", "chunks", "tokens", "preempted", "ended", show_edge=False, pad_edge=False)
        for number, step in list(enumerate(self.steps, start=1))[first:last]:
            chunks = Text("  ").join(Text().append(self._label(w.seq)).append(f" {w}") for w in step.work)
            ends = self._list(step.preempted), self._list(step.finished)
            table.add_row(str(number), chunks, str(step.num_tokens), *ends)
        return table

    def draw_timeline(self, limit: int = 30) -> Text:
        """Rows are sequences, columns are steps."""
        first = max(len(self.steps) - limit, 0)
        text = Text()
        for seq in self.seqs:
            if self._ended.get(seq.seq_id, first + 1) <= first and len(self.seqs) > 8:
                continue
            text.append("\n" if text else "").append(self._label(seq)).append(" ")
            for number, step in list(enumerate(self.steps))[first:]:
                letter = self._letter(seq, number, step)
                text.append(f" {letter}", f"bold {color_of(seq)}" if letter in "Pd" else "dim")
        return text

    # -- helpers --------------------------------------------------------------------------------------------------

    def _queue(self, seq: Sequence) -> None:
        self.scheduler.add(seq)

    def _sample(self, seq: Sequence) -> int:
        answer, at = self._answers[seq.seq_id], seq.num_generated_tokens
        return answer[at] if at < len(answer) else seq.tokens[0] + 500 + at

    def _letter(self, seq: Sequence, number: int, step: Step) -> str:
        for work in step.work:
            if work.seq is seq:
                return "P" if work.status is SequenceStatus.PREFILL else "d"
        if seq in step.preempted:
            return "x"
        if seq.seq_id in step.idle:
            return "-"
        waits = self._arrived[seq.seq_id] <= number < self._ended.get(seq.seq_id, number + 1)
        return "." if waits else " "

    def _label(self, seq: Sequence) -> Text:
        return Text(self.names[seq.seq_id], color_of(seq))

    def _list(self, seqs: Iterable[Sequence]) -> Text:
        return Text(" ").join(map(self._label, seqs))


class StaticWorld(World):
    """The same scheduler, fed as a static batcher feeds a model: a new batch only when the whole last one has ended."""

    def __init__(self, num_blocks: int = 16, **options: Any) -> None:
        super().__init__(num_blocks, **options)
        self.held_back: list[Sequence] = []
        self._batch: list[Sequence] = []

    def step(self) -> Step:
        if not self.scheduler.has_unfinished():
            batch_size = self.scheduler.max_num_seqs
            self._batch, self.held_back = self.held_back[:batch_size], self.held_back[batch_size:]
            for seq in self._batch:
                self.scheduler.add(seq)
        ended = {seq.seq_id for seq in self._batch if seq.status is SequenceStatus.FINISHED}
        step = super().step()
        step.idle.update(ended)
        return step

    def has_unfinished(self) -> bool:
        return bool(self.held_back) or super().has_unfinished()

    def abort(self, seq: Sequence) -> None:
        if seq in self.held_back:
            self.held_back.remove(seq)
        super().abort(seq)

    def _queue(self, seq: Sequence) -> None:
        self.held_back.append(seq)


class Comparison:
    """What the app plays with: the same requests to a scheduler, and to one that is fed in static batches."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> str:
        self.ours, self.static = World(), StaticWorld()
        for request in REQUESTS[:3]:
            self._add_to_both(request)
        return "Three requests wait. Press s."

    def step(self) -> str:
        if self.ours.has_unfinished():
            self.ours.step()
        if self.static.has_unfinished():
            self.static.step()
        return "" if self.ours.has_unfinished() else "All requests have ended. Press a to add some."

    def add(self) -> str:
        num_prompt_tokens, num_answer_tokens = REQUESTS[len(self.ours.seqs) % len(REQUESTS)]
        seq = self._add_to_both((num_prompt_tokens, num_answer_tokens))
        name = self.ours.names[seq.seq_id]
        return f"{name}: EOS will be its token number {num_answer_tokens}. The scheduler isn't told."

    def abort(self) -> str:
        oldest = next(iter([*self.ours.scheduler.running, *self.ours.scheduler.waiting]), None)
        if oldest is None:
            return "There is nobody to abort."
        self.ours.abort(oldest)
        self.static.abort(self.static.seqs[self.ours.seqs.index(oldest)])
        return f"{self.ours.names[oldest.seq_id]} is gone, and its blocks are free."

    def take(self) -> str:
        self.ours.take_blocks(2)
        return "A hog holds two more blocks. Step until somebody needs one and there is none."

    def give(self) -> str:
        self.ours.give_blocks()
        return "All blocks of the hogs are in the pool again."

    def panels(self) -> list[tuple[str, RenderableType]]:
        ours, static = self.ours, self.static
        used = ours.steps[-1].num_tokens if ours.steps else 0
        budget, seats = ours.scheduler.max_num_batched_tokens, ours.scheduler.max_num_seqs
        return [
            (f"Step {len(ours.steps)}: {used} of {budget} tokens; * samples", ours.draw_step()),
            (f"Running, {seats} seats; tokens are prompt+generated", ours.draw_sequences()),
            (f"Pool, blocks of {BLOCK_SIZE} tokens", ours.draw_memory()),
            (_summary("Continuous", ours), ours.draw_timeline()),
            (_summary("Static batches", static), static.draw_timeline()),
        ]

    def _add_to_both(self, request: tuple[int, int]) -> Sequence:
        self.static.add(*request)
        return self.ours.add(*request)


def _summary(title: str, world: World) -> str:
    counts = f"{len(world.steps)} steps, {world.idle_share:.0%} of seats idle"
    tokens = world.num_computed_tokens / max(len(world.steps), 1)
    return f"{title}: {counts}, {tokens:.1f} tokens a step, {world.scheduler.num_preemptions} preempted"


def make_app(model: str | None) -> "Explorer":
    from chapters.explorer import Action, Explorer

    actions = [
        Action("s", "step", "step"),
        Action("a", "add", "add"),
        Action("x", "abort", "abort"),
        Action("m", "take", "take"),
        Action("M", "give", "give"),
        Action("r", "reset", "reset"),
    ]
    return Explorer("Chapter 5: the scheduler", Comparison(), actions)


# -- the story ------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    story.say("The Scheduler and the BlockManager are the engine's. The lab samples in the model's place.")
    _one_request(story)
    _static_and_continuous(story)
    _budget(story)
    _preemption(story)
    _head_of_the_line(story)
    _price_of_preemption(story)
    _endings(story)


def _one_request(story: Story) -> None:
    story.part("One request, from WAITING to FINISHED")
    world = World(max_num_batched_tokens=6)
    seq = world.add(10, 3)
    table = Table("step", "chunk", "samples", "state after it", "len(tokens)", "computed", show_edge=False)
    table.add_row("", "", "", seq.status.name, str(len(seq.tokens)), str(seq.num_computed_tokens))
    while world.has_unfinished():
        [work] = world.step().work
        samples = str(seq.tokens[-1]) if work.samples else ""
        row = f"{work.start}..{work.end}", samples, seq.status.name, str(len(seq.tokens)), str(seq.num_computed_tokens)
        table.add_row(str(len(world.steps)), *row)
    story.say("A prompt of 10 tokens, a budget of 6 tokens a step, an answer of 3 tokens (the last is EOS, id 0).")
    story.show(table)
    story.say(
        "Computed chases len(tokens). When it gets there the step samples, and is one behind again. "
        "The last token is never computed: nobody asks what comes after it."
    )


def _static_and_continuous(story: Story) -> None:
    story.part("Eight requests, four seats: static and continuous batching")
    options: dict = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    worlds: dict[str, World] = {"static batches": StaticWorld(32, **options), "continuous": World(32, **options)}
    for title, world in worlds.items():
        for request in REQUESTS:
            world.add(*request)
        world.run()
        story.say(f"{title} (P prefill, d decode, . waits, - has ended and keeps its seat):")
        story.show(world.draw_timeline())
    table = Table("", "steps", "idle seats", "tokens a step", "steps from arrival to end", show_edge=False)
    for title, world in worlds.items():
        numbers = f"{world.idle_share:.0%}", f"{world.num_computed_tokens / len(world.steps):.1f}"
        table.add_row(title, str(len(world.steps)), *numbers, f"{world.mean_num_steps:.1f}")
    story.show(table)
    computed = {world.num_computed_tokens for world in worlds.values()}
    assert len(computed) == 1
    story.say(f"Both computed the same {computed.pop()} tokens. What differs is how many steps they are spread over.")


def _budget(story: Story) -> None:
    story.part("A budget of 8 tokens a step")
    world = World(max_num_batched_tokens=8)
    world.add(5, 6)
    world.add(3, 6)
    world.step()
    world.add(17, 3)
    world.add(2, 2)
    world.run()
    story.say("A and B run. Then C comes with 17 tokens, and D with 2. A star marks the chunks that sample.")
    story.show(world.draw_trace())
    story.say(
        "Decodes first, one token each; what is left goes to C's prompt. D comes in only when C's prompt is done: "
        "one sequence at most is in the middle of its prompt, the last one."
    )


def _preemption(story: Story) -> None:
    story.part("The pool runs dry")
    world = World(8, max_num_batched_tokens=32)
    for num_answer_tokens in (4, 8, 8):
        world.add(7, num_answer_tokens)
    while world.scheduler.num_preemptions == 0:
        before = Group(world.draw_sequences(), world.draw_memory())
        world.step()
    [victim] = world.steps[-1].preempted
    name, number = world.names[victim.seq_id], len(world.steps)
    story.say(f"8 blocks of {BLOCK_SIZE} tokens, three sequences of 7 prompt tokens. Before step {number}:")
    story.show(before)
    story.say(f"After step {number}, which preempted {name}:")
    story.show(Group(world.draw_sequences(), world.draw_memory()))
    story.say(
        f"{name} keeps its {len(victim.tokens)} tokens, {victim.num_generated_tokens} of them generated, and nothing "
        f"else: num_computed_tokens={victim.num_computed_tokens}, block_table={victim.block_table}."
    )
    while not victim.block_table:
        world.step()
    again = world.steps[-1].work[-1]
    story.say(
        f"Step {len(world.steps)} admits {name} again: {victim.num_cached_tokens} tokens found in cached blocks, "
        f"{again.start}..{again.end} computed anew."
    )
    world.run()
    story.show(world.draw_timeline())
    story.show(world.draw_trace(number - 2, number + 3))
    assert [seq.num_generated_tokens for seq in world.seqs] == [4, 8, 8]
    story.say("Everybody got the answer it would have got alone. C's came later.")


def _head_of_the_line(story: Story) -> None:
    story.part("The first that does not fit holds up the line")
    world = World(8)
    world.add(14, 4)
    world.step()
    world.add(20, 2)
    world.add(3, 2)
    world.step()
    story.say("A runs in 4 of 8 blocks. B needs 5 blocks. C needs 1, would fit, and stands behind B:")
    story.show(Group(world.draw_sequences(), world.draw_memory()))
    world.run()
    story.show(world.draw_trace())


def _price_of_preemption(story: Story) -> None:
    story.part("What a small pool costs")
    table = Table("blocks", "prefix cache", "steps", "preemptions", "tokens computed", "of them again", show_edge=False)
    for num_blocks in (40, 20, 16, 12, 8):
        for caching in (True, False):
            world = World(num_blocks, max_num_batched_tokens=64, max_num_seqs=8, enable_prefix_caching=caching)
            for num_prompt_tokens, num_answer_tokens in REQUESTS:
                world.add(num_prompt_tokens + 4, num_answer_tokens + 6)
            world.run()
            assert all(seq.status is SequenceStatus.FINISHED for seq in world.seqs)
            num_needed = sum(len(seq.tokens) - 1 for seq in world.seqs)
            again = world.num_computed_tokens - num_needed
            counts = len(world.steps), world.scheduler.num_preemptions, world.num_computed_tokens, again
            table.add_row(str(num_blocks), "on" if caching else "off", *map(str, counts))
    story.say("Eight requests with longer prompts and answers, at most eight at a time, in smaller and smaller pools:")
    story.show(table)
    story.say("The tokens of every sequence are the same in all ten rows. Only the work differs.")


def _endings(story: Story) -> None:
    story.part("How a sequence ends")
    world = World(16, max_model_len=12)
    cases: list[tuple[str, list[int], dict]] = [
        ("EOS", [11, EOS], {}),
        ("ignore_eos=True, max_tokens=4", [11, EOS], {"ignore_eos": True, "max_tokens": 4}),
        ("stop_token_ids=[99]", [11, 12, 99], {"stop_token_ids": [99]}),
        ("min_tokens=3", [EOS, EOS, EOS, EOS], {"min_tokens": 3}),
        ("EOS is the last one allowed", [11, EOS], {"max_tokens": 2}),
        ("max_model_len=12", list(range(11, 30)), {}),
    ]
    table = Table("", "rule", "generated", "finish_reason", "stop_reason", show_edge=False)
    for _, answer, params in cases:
        world.add(8, answer, **params)
    world.run()
    for seq, (rule, _, _) in zip(world.seqs, cases, strict=True):
        shown = " ".join("EOS" if token == EOS else str(token) for token in seq.generated_token_ids)
        table.add_row(world.names[seq.seq_id], rule, shown, str(seq.finish_reason), str(seq.stop_reason))
    story.say("Prompts of 8 tokens. What the lab sampled, and why the scheduler ended each:")
    story.show(table)
