"""Lab of chapter 4: the same requests in two memories of the same size, and who runs out first.

The paged memory is the engine's BlockManager. The contiguous one is a small first-fit allocator that lives in this file
only: it is what paging is compared with, and nothing in the engine looks like it.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.draw import color_of, draw_free_queue, draw_pool, draw_sequences
from chapters.story import Story
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.attention import paged_attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import rotary_and_write

if TYPE_CHECKING:
    from chapters.explorer import Explorer

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 4, 32, 32
GROUPS_PER_ROW = 8
SYSTEM_PROMPT = list(range(1, 9))  # every prompt begins with these 8 tokens: two full blocks


@dataclass(frozen=True)
class Request:
    """A prompt, and how many tokens it may get at most. Its end can come earlier, and nobody knows when."""

    prompt: list[int]
    max_tokens: int

    @property
    def limit(self) -> int:
        return len(self.prompt) + self.max_tokens


def requests() -> list[Request]:
    """Prompts of 9 to 16 tokens that may get 6 to 20 more."""
    lengths = (10, 14), (13, 6), (9, 20), (16, 6), (11, 12), (9, 16), (12, 14), (10, 17), (9, 8), (14, 9), (11, 20)
    own = [[100 * i + j for j in range(length)] for i, (length, _) in enumerate(lengths, start=1)]
    return [Request(SYSTEM_PROMPT + rest[8:], m) for rest, (_, m) in zip(own, lengths, strict=True)]


class ContiguousMemory:
    """Each sequence gets one stretch of slots, the first that is long enough, and keeps it until it ends."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.reserved: dict[str, range] = {}

    def holes(self) -> list[range]:
        taken = sorted(self.reserved.values(), key=lambda slots: slots.start)
        starts, ends = [0, *(slots.stop for slots in taken)], [*(slots.start for slots in taken), self.num_slots]
        return [range(start, end) for start, end in zip(starts, ends, strict=True) if start < end]

    def reserve(self, name: str, size: int) -> bool:
        hole = next((hole for hole in self.holes() if len(hole) >= size), None)
        if hole is not None:
            self.reserved[name] = range(hole.start, hole.start + size)
        return hole is not None

    @property
    def num_free(self) -> int:
        return self.num_slots - sum(map(len, self.reserved.values()))


class TwoMemories:
    """Both memories and what happens to them. Whatever is done is done to both."""

    def __init__(
        self,
        num_blocks: int = NUM_BLOCKS,
        *,
        reserve_longest: bool = True,
        caching: bool = False,
        source: list[Request] | None = None,
    ) -> None:
        self.source, self.reserve_longest, self.caching = source or requests(), reserve_longest, caching
        self._start(num_blocks)

    def _start(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=self.caching)
        self.seqs: dict[str, Sequence] = {}  # in the paged memory, oldest first
        self.contiguous = ContiguousMemory(num_blocks * BLOCK_SIZE)
        self.lengths: dict[str, int] = {}  # in the contiguous one: tokens stored
        self.limits: dict[str, int] = {}
        self.colors: dict[str, str] = {}
        self.names: dict[int, str] = {}  # seq_id -> name, for the drawings
        self.refused = {"contiguous": 0, "paged": 0}
        self.num_stalls = 0
        self.num_requests = 0

    # -- what can be done -----------------------------------------------------------------------------------------

    def admit(self) -> str:
        """The next request asks both for room."""
        request = self.source[self.num_requests % len(self.source)]
        name = chr(ord("A") + self.num_requests % 26)
        if name in self.seqs or name in self.lengths:
            return f"{name} is still running: let it end first"
        self.num_requests += 1
        self.limits.pop(name, None)  # of a request long gone: the order of this dict is the order of arrival
        self.limits[name] = min(request.limit, MAX_MODEL_LEN)
        said = []

        size = MAX_MODEL_LEN if self.reserve_longest else self.limits[name]
        if self.contiguous.reserve(name, size):
            self.lengths[name] = len(request.prompt)
            said.append(f"contiguous reserves {size} slots,")
        else:
            self.refused["contiguous"] += 1
            longest = max(map(len, self.contiguous.holes()), default=0)
            said.append(f"contiguous refuses (wants {size}, longest hole {longest}),")

        seq = Sequence(request.prompt)
        self.colors[name], self.names[seq.seq_id] = color_of(seq), name
        if self.manager.allocate_with_prefix(seq):
            self.seqs[name] = seq
            seq.status = SequenceStatus.DECODE
            self._computed(seq)
            said.append(f"paged takes blocks {' '.join(map(str, seq.block_table))}")
        else:
            self.refused["paged"] += 1
            wanted = self.manager.num_blocks_for(len(seq.tokens))
            said.append(f"paged refuses (wants {wanted} blocks, {len(self.manager.free_blocks)} free)")
        return f"{name}, {len(request.prompt)} tokens: {' '.join(said)}"

    def grow(self) -> str:
        """Every sequence gets one token more; those that reach their limit end."""
        stalled = []
        for name in [*self.lengths]:
            self.lengths[name] += 1
            if self.lengths[name] == self.limits[name]:
                self._end_contiguous(name)
        for name, seq in [*self.seqs.items()]:
            if len(seq.tokens) == seq.num_computed_tokens:  # else the token of last time still waits for its slot
                seq.append(10_000 + len(seq.tokens))
            if not self.manager.append_slots(seq):
                stalled.append(name)
                continue
            self._computed(seq)
            if seq.num_computed_tokens == self.limits[name]:
                self.manager.free(self.seqs.pop(name))
        self.num_stalls += len(stalled)
        self.manager.check_integrity()
        return f"append_slots said False to {', '.join(stalled)}: no block is free" if stalled else ""

    def end_oldest(self) -> str:
        """The oldest request that runs anywhere comes to its end."""
        oldest = [next(iter(running), None) for running in (self.lengths, self.seqs)]
        names = [name for name in oldest if name is not None]
        if not names:
            return "nothing is running: admit a request"
        name = min(names, key=lambda n: list(self.limits).index(n))
        if name in self.lengths:
            self._end_contiguous(name)
        if name in self.seqs:
            self.manager.free(self.seqs.pop(name))
        return f"{name} ends"

    def switch_reservation(self) -> str:
        self.reserve_longest = not self.reserve_longest
        self._start(len(self.manager.blocks))
        return f"Begun anew: contiguous now reserves {self._reservation}."

    def switch_caching(self) -> str:
        self.caching = not self.caching
        self._start(len(self.manager.blocks))
        return f"Begun anew: prefix caching is {'on: full blocks are shared' if self.caching else 'off'}."

    def shrink(self) -> str:
        num_blocks = len(self.manager.blocks)
        self._start(num_blocks - 8 if num_blocks > 8 else NUM_BLOCKS)
        return f"Begun anew with {len(self.manager.blocks)} blocks, {self.contiguous.num_slots} slots each."

    def reset(self) -> str:
        self._start(NUM_BLOCKS)
        return "Begun anew."

    # -- pictures -------------------------------------------------------------------------------------------------

    def panels(self) -> list[tuple[str, Group | Text | Table]]:
        paged = Group(self.draw_paged(), draw_free_queue(self.manager, limit=12))
        caching = f", prefix caching {'on' if self.caching else 'off'}"
        return [
            (f"contiguous: reserves {self._reservation}", self.draw_contiguous()),
            (f"paged: the engine's BlockManager, blocks of {BLOCK_SIZE}{caching}", paged),
            ("both", self.count()),
            ("sequences in the paged memory", draw_sequences(self.seqs.values(), self.names)),
        ]

    def draw_contiguous(self) -> Text:
        """A letter for each slot: capital where a token is stored, small where reserved and empty."""
        cells = [("·", "dim")] * self.contiguous.num_slots
        for name, slots in self.contiguous.reserved.items():
            for index, slot in enumerate(slots):
                cells[slot] = self._cell(name, index < self.lengths[name])
        return self._draw_cells("slot", BLOCK_SIZE, cells, [""] * (len(cells) // BLOCK_SIZE))

    def draw_paged(self) -> Text:
        """The same for the pool: = is cached and nobody's, +1 behind a block says that one more shares it."""
        cells: list[tuple[str, str]] = []
        for block in self.manager.blocks:
            cells += [("=", "white on grey37") if block.block_hash else ("·", "dim")] * BLOCK_SIZE
        for name, seq in reversed(self.seqs.items()):
            for index in range(len(seq.block_table) * BLOCK_SIZE):
                slot = seq.block_table[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE
                cells[slot] = self._cell(name, index < seq.num_computed_tokens)
        shared = [f"+{block.ref_count - 1}" if block.ref_count > 1 else "" for block in self.manager.blocks]
        return self._draw_cells("block", 1, cells, shared)

    def count(self) -> Table:
        table = Table("", *COLUMNS, box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for name, numbers in self.counters().items():
            table.add_row(name, *(str(numbers[column]) for column in COLUMNS))
        return table

    def counters(self) -> dict[str, dict[str, int]]:
        """What the table shows, in slots and sequences. A shared slot is taken once and serves several tokens."""
        num_taken = self.contiguous.num_slots - self.contiguous.num_free
        num_tokens = sum(self.lengths.values())
        longest = max(map(len, self.contiguous.holes()), default=0)
        contiguous = len(self.lengths), self.refused["contiguous"], 0, num_tokens, num_taken, num_taken - num_tokens
        num_free = len(self.manager.free_blocks) * BLOCK_SIZE
        num_taken = self.contiguous.num_slots - num_free
        filled = {  # (block, offset) of every token
            (seq.block_table[i // BLOCK_SIZE], i % BLOCK_SIZE)
            for seq in self.seqs.values()
            for i in range(seq.num_computed_tokens)
        }
        num_tokens = sum(seq.num_computed_tokens for seq in self.seqs.values())
        paged = len(self.seqs), self.refused["paged"], self.num_stalls, num_tokens, num_taken, num_taken - len(filled)
        return {
            "contiguous": dict(zip(COLUMNS, (*contiguous, self.contiguous.num_free, longest), strict=True)),
            "paged": dict(zip(COLUMNS, (*paged, num_free, num_free), strict=True)),
        }

    # -- helpers --------------------------------------------------------------------------------------------------

    @property
    def _reservation(self) -> str:
        return f"max_model_len = {MAX_MODEL_LEN}" if self.reserve_longest else "prompt + max_tokens"

    def _computed(self, seq: Sequence) -> None:
        """What the scheduler notes when it has scheduled all of a sequence's tokens."""
        seq.num_computed_tokens = len(seq.tokens)
        self.manager.register_prefix(seq)

    def _end_contiguous(self, name: str) -> None:
        del self.lengths[name], self.contiguous.reserved[name]

    def _cell(self, name: str, stored: bool) -> tuple[str, str]:
        return (name, f"black on {self.colors[name]}") if stored else (name.lower(), self.colors[name])

    def _draw_cells(self, unit: str, step: int, cells: list[tuple[str, str]], marks: list[str]) -> Text:
        text = Text()
        for group, mark in enumerate(marks):
            if group % GROUPS_PER_ROW == 0:
                text.append("\n" if group else "").append(f"{unit} {group * step:>3}  ", "dim")
            for cell, style in cells[group * BLOCK_SIZE : (group + 1) * BLOCK_SIZE]:
                text.append(cell, style)
            text.append(f"{mark:<3}")
        return text


COLUMNS = ("running", "refused", "stalls", "tokens", "taken", "empty", "free", "fits")


def make_app(model: str | None = None) -> "Explorer":
    from chapters.explorer import Action, Explorer

    actions = [
        Action("a", "admit", "admit"),
        Action("g", "grow", "grow"),
        Action("f", "end", "end_oldest"),
        Action("p", "limit", "switch_reservation"),
        Action("c", "share", "switch_caching"),
        Action("m", "less", "shrink"),
        Action("r", "new", "reset"),
    ]
    return Explorer("4. PagedAttention: two memories, the same requests", TwoMemories(), TwoMemories.panels, actions)


# -- a day's work: the same requests to the end -----------------------------------------------------------------------

EOS, WORD = 0, 1
POOL_SLOTS, LONGEST = 16_384, 2_048


@dataclass
class Totals:
    """Of a run until nobody waits any more; `steps` until nobody runs any more."""

    steps: int = 0
    busy_steps: int = 0
    running: int = 0
    stored: int = 0
    empty: int = 0
    table_entries: int = 0
    preempted: int = 0

    def add(self, running: int, stored: int, taken: int) -> None:
        self.busy_steps += 1
        self.running += running
        self.stored += stored
        self.empty += taken - stored

    def row(self) -> list[str]:
        shares = [amount / self.busy_steps / POOL_SLOTS for amount in (self.stored, self.empty)]
        shares.append(1 - sum(shares))
        return [f"{self.running / self.busy_steps:.1f}", *(f"{share:.1%}" for share in shares), f"{self.steps:,}"]


def make_jobs(num_jobs: int = 200) -> list[tuple[Request, int]]:
    """Requests with lengths as they are met in chats: most short, a few long. With each, the tokens it will get."""
    rng = random.Random(0)
    jobs = []
    for _ in range(num_jobs):
        num_prompt = min(max(int(rng.lognormvariate(5, 0.9)), 8), 1_500)
        max_tokens = rng.choice([128, 256, 512])
        jobs.append(
            (Request([WORD] * num_prompt, max_tokens), min(max(int(rng.lognormvariate(4.5, 0.8)), 4), max_tokens))
        )
    return jobs


def run_contiguous(jobs: list[tuple[Request, int]], size_of: Callable[[Request], int]) -> Totals:
    """First come, first served, as the engine's scheduler does it, with stretches of slots."""
    memory, totals = ContiguousMemory(POOL_SLOTS), Totals()
    waiting = deque(enumerate(jobs))
    running: dict[str, list[int]] = {}  # index -> [tokens stored, tokens at its end]
    while waiting or running:
        while waiting and memory.reserve(str(waiting[0][0]), size_of(waiting[0][1][0])):
            index, (request, num_output) = waiting.popleft()
            running[str(index)] = [len(request.prompt), len(request.prompt) + num_output - 1]
        if waiting:
            stored = sum(length for length, _ in running.values())
            totals.add(len(running), stored, POOL_SLOTS - memory.num_free)
        totals.steps += 1
        for name, progress in [*running.items()]:
            if progress[0] == progress[1]:
                del running[name], memory.reserved[name]
            progress[0] += 1
    return totals


def run_paged(jobs: list[tuple[Request, int]], block_size: int) -> Totals:
    """The engine's scheduler and block manager; only the model is missing: we say what it would have sampled."""
    manager, totals = BlockManager(POOL_SLOTS // block_size, block_size, enable_prefix_caching=False), Totals()
    limits = dict(max_num_seqs=len(jobs), max_num_batched_tokens=POOL_SLOTS, max_model_len=LONGEST)
    scheduler = Scheduler(manager, **limits, eos_token_ids=frozenset([EOS]))
    num_outputs = {}
    for request, num_output in jobs:
        seq = Sequence(request.prompt, SamplingParams(max_tokens=request.max_tokens))
        num_outputs[seq.seq_id] = num_output
        scheduler.add(seq)
    while scheduler.has_unfinished():
        output = scheduler.schedule()
        if scheduler.waiting:
            stored = sum(seq.num_computed_tokens for seq in scheduler.running)
            taken = POOL_SLOTS - len(manager.free_blocks) * block_size
            totals.add(len(scheduler.running), stored, taken)
            totals.table_entries += sum(len(seq.block_table) for seq in scheduler.running)
        totals.steps += 1
        ends = [chunk.seq.num_generated_tokens + 1 == num_outputs[chunk.seq.seq_id] for chunk in output.chunks]
        scheduler.update(output, [EOS if end else WORD for end in ends])
    totals.preempted = scheduler.num_preemptions
    return totals


# -- attention over a block table -------------------------------------------------------------------------------------


def attend(table: list[int], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Batch, Batch]:
    """Put K/V of 10 prompt tokens and of 1 more into the blocks of `table` and attend: [11, num_heads, head_dim].

    All other blocks are full of other numbers, as if they were other sequences'.
    """
    trash = torch.Generator().manual_seed(9)
    shape = 16, BLOCK_SIZE, *k.shape[1:]
    kv_layer = torch.randn(shape, generator=trash), torch.randn(shape, generator=trash)
    seq = Sequence(list(range(len(q))))
    seq.block_table = table
    outs, batches = [], []
    for start, end in ((0, 10), (10, 11)):  # the prompt in one step, then one token
        output = SchedulerOutput([ScheduledChunk(seq, start, end, write_start=start)], [], end - start)
        batch = Batch.from_scheduler_output(output, BLOCK_SIZE)
        rows = q[start:end].clone(), k[start:end].clone(), v[start:end]
        no_rotation = torch.ones(end - start, q.shape[2] // 2), torch.zeros(end - start, q.shape[2] // 2)
        rotary_and_write(*rows, no_rotation, kv_layer, batch)
        outs.append(paged_attention(rows[0], *kv_layer, batch))
        batches.append(batch)
    return torch.cat(outs), batches[0], batches[1]


# -- the story --------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    tell_reserving(story)
    tell_growing(story)
    tell_holes(story)
    tell_dry(story)
    tell_totals(story)
    tell_attention(story)
    tell_sharing(story)
    tell_no_copies(story)


def tell_reserving(story: Story) -> None:
    story.part("The same requests, the same memory")
    story.say(
        f"Two memories of {NUM_BLOCKS * BLOCK_SIZE} slots, each slot for the K and V of one token. Requests come one "
        f"after another; the model allows {MAX_MODEL_LEN} tokens, prompt and output together, and nobody knows when an "
        f"answer will end. The contiguous memory reserves {MAX_MODEL_LEN} slots in one piece for each. The paged one "
        f"is the engine's BlockManager with {NUM_BLOCKS} blocks of {BLOCK_SIZE}: blocks for what is there."
    )
    world = TwoMemories()
    for _ in range(10):
        story.console.print(world.admit(), style="dim")
    story.console.print()
    story.say("The contiguous memory. A capital letter is a stored token, a small one a slot reserved and empty:")
    story.show(world.draw_contiguous())
    story.say("The paged memory:")
    story.show(world.draw_paged())
    story.say(
        "From tokens on, the table counts slots. Taken: given to somebody; empty: the part of it without a token; "
        "fits: the longest request that would still be let in. Stalls: how often append_slots said False."
    )
    story.show(world.count())


def tell_growing(story: Story) -> None:
    story.part("A sequence grows, its table now and then")
    story.say(
        "One sequence of 7 tokens in a pool that others have left. Each token needs a slot, every fourth one a block:"
    )
    manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    others = [Sequence([WORD] * num_tokens) for num_tokens in (4, 48, 8, 20, 4, 40)]
    for other in others:
        manager.allocate_with_prefix(other)
    for index in (0, 4, 2, 5, 3, 1):
        manager.free(others[index])
    seq = Sequence([WORD] * 7)
    manager.allocate_with_prefix(seq)
    table = Table("what happens", "tokens stored", "block table", "slot of the newest", "head of the free queue")
    for step in range(7):
        if step:
            seq.append(WORD)
            assert manager.append_slots(seq)
        seq.num_computed_tokens = len(seq.tokens)
        last = seq.num_computed_tokens - 1
        block = seq.block_table[last // BLOCK_SIZE]
        slot = f"{block} x {BLOCK_SIZE} + {last % BLOCK_SIZE} = {block * BLOCK_SIZE + last % BLOCK_SIZE}"
        head = " ".join(map(str, manager.eviction_candidates(4)))
        what = "append_slots" if step else "allocate_with_prefix"
        table.add_row(what, str(seq.num_computed_tokens), " ".join(map(str, seq.block_table)), slot, head)
    story.show(table)


def tell_holes(story: Story) -> None:
    story.part("Reserving less, and the holes that it leaves")
    story.say(
        "A request says how long its answer may become: max_tokens. So contiguous could reserve the prompt and that, "
        "and more fit. Five requests come, and six tokens later two of them have reached their limits:"
    )
    world = TwoMemories(reserve_longest=False)
    for _ in range(5):
        story.console.print(world.admit(), style="dim")
    for _ in range(6):
        world.grow()
    story.console.print()
    story.show(world.draw_contiguous())
    story.say("The next request:")
    story.console.print(world.admit(), style="dim")
    story.console.print()
    story.show(world.count())
    numbers = world.counters()["contiguous"]
    story.say(
        f"{numbers['free']} slots are free, but the longest piece has {numbers['fits']}. A free block has no "
        "such problem: any block will do. More requests, and the paged memory takes the blocks that the others left, "
        "wherever they lie:"
    )
    for _ in range(5):
        story.console.print(world.admit(), style="dim")
    story.console.print()
    story.show(world.draw_paged())
    story.show(draw_sequences(world.seqs.values(), world.names))


def tell_dry(story: Story) -> None:
    story.part("The price: a pool can run dry in the middle")
    story.say(
        "A reservation is a promise that a sequence can grow to its end. The paged memory promised nothing. Nine "
        "requests are in, 3 blocks are free; everybody grows:"
    )
    world = TwoMemories()
    for _ in range(9):
        world.admit()
    for step in range(1, 5):
        said = world.grow()
        free = len(world.manager.free_blocks)
        story.console.print(f"token {step}: {said or 'everybody has a slot'} ({free} free)", style="dim")
    story.console.print()
    story.say(
        "append_slots changed nothing where it said False, so those sequences are as they were, with one token waiting "
        "for its slot. The oldest ends, and its blocks serve the others:"
    )
    for _ in range(2):
        story.console.print(world.end_oldest(), style="dim")
        said = world.grow()
        free = len(world.manager.free_blocks)
        story.console.print(f"one token: {said or 'everybody has a slot'} ({free} free)", style="dim")
    story.console.print()
    story.say("In the engine nobody waits for that: the scheduler takes the blocks of the youngest (chapter 5).")


def tell_totals(story: Story) -> None:
    jobs = make_jobs()
    story.part(f"{len(jobs)} requests to the end")
    num_tokens = [len(request.prompt) for request, _ in jobs]
    story.say(
        f"A pool of {POOL_SLOTS:,} slots, max_model_len {LONGEST:,}, {len(jobs)} requests at once. Prompts have "
        f"{min(num_tokens)} to {max(num_tokens):,} tokens, {sum(num_tokens) / len(jobs):.0f} on average; answers "
        f"{sum(n for _, n in jobs) / len(jobs):.0f} on average, and max_tokens is 128, 256 or 512. In a step everybody "
        "gets a token. The paged rows are the engine's Scheduler and BlockManager, without a model. Shares of the pool "
        "are averages over the steps in which somebody waits."
    )
    table = Table("", "at once", "tokens", "taken, empty", "free", "steps", "preempted")
    for title, totals in (
        ("contiguous, max_model_len", run_contiguous(jobs, lambda request: LONGEST)),
        ("contiguous, prompt + max_tokens", run_contiguous(jobs, lambda request: request.limit)),
        ("paged, blocks of 16", run_paged(jobs, 16)),
    ):
        table.add_row(title, *totals.row(), str(totals.preempted))
    story.show(table)
    story.say("What the size of a block changes:")
    table = Table("block size", "at once", "tokens", "taken, empty", "free", "steps", "blocks in a table")
    for block_size in (1, 4, 16, 64, 256):
        totals = run_paged(jobs, block_size)
        table.add_row(str(block_size), *totals.row(), f"{totals.table_entries / totals.running:.1f}")
    story.show(table)


def tell_attention(story: Story) -> None:
    story.part("Attention does not mind")
    story.say(
        "The same 11 tokens (random q, k, v; 4 query heads, 2 KV heads of 8) are written into a KV tensor of 16 blocks "
        "by the engine's rotary_and_write and read by its paged_attention: the prompt of 10 in one step, then the next."
    )
    generator = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(11, heads, 8, generator=generator) for heads in (4, 2, 2))
    tables = {"in order": [0, 1, 2], "scattered": [13, 2, 7], "backwards": [15, 14, 13]}
    results = {name: attend(block_table, q, k, v) for name, block_table in tables.items()}
    table = Table("block table", "slots of tokens 0 to 9", "of token 10", "same bits")
    for name, (out, prompt, decode) in results.items():
        same = str(torch.equal(out, results["in order"][0]))
        slots = [" ".join(map(str, batch.slot_mapping.tolist())) for batch in (prompt, decode)]
        table.add_row(f"{name}: {tables[name]}", *slots, same)
    story.show(table)
    wrong = attend([13, 2, 7], q, k, v)[0], attend([2, 13, 7], q, k, v)[0]
    story.say(
        "The numbers are the same to the last bit: first the blocks are gathered in the order of the table, and from "
        "there on nobody can tell where they lay. Even a table in another order gives the same, as long as writing and "
        f"reading go by the same table: [13, 2, 7] and [2, 13, 7] are equal: {torch.equal(*wrong)}."
    )


def tell_sharing(story: Story) -> None:
    story.part("Shared blocks are counted")
    story.say(
        "Prefix caching on. A and B have the same prompt of 10 tokens; C begins with the same 8 and goes on in its own "
        "way. Only full blocks are shared; +2 means that two more sequences have the block in their tables:"
    )
    first = requests()[0]
    world = TwoMemories(12, caching=True, source=[first, first, Request([*SYSTEM_PROMPT, 70, 71, 72], 9)])
    for _ in range(3):
        world.admit()
    story.show(draw_pool(world.manager, world.seqs.values(), world.names))
    story.show(draw_sequences(world.seqs.values(), world.names))
    table = Table("", *(f"block {i}" for i in range(5)), "free queue", title="reference counts", title_style="dim")
    for what in ("all three run", "A ends", "B ends", "C ends"):
        if what.endswith("ends"):
            world.end_oldest()
        refs = [str(block.ref_count) for block in world.manager.blocks[:5]]
        table.add_row(what, *refs, " ".join(map(str, world.manager.free_blocks)))
    story.show(table)
    story.say("Blocks 0 and 1 came last into the queue and still have their names: a later request can find them.")
    story.show(draw_pool(world.manager, [], world.names))


def tell_no_copies(story: Story) -> None:
    story.part("Nobody writes into a shared block")
    story.say(
        "The engine's Scheduler and Batch, blocks of 4. Y repeats X's prompt of 10 tokens, Z only its first 8. Slots "
        "that a step writes; -1 is not written:"
    )
    manager = BlockManager(16, BLOCK_SIZE)
    scheduler = Scheduler(manager, max_num_seqs=8, max_num_batched_tokens=64, max_model_len=MAX_MODEL_LEN)
    prompt = list(range(10))
    table = Table("", "block table", "found", "computes", "slots written")
    for name, tokens in (("X", prompt), ("Y", prompt), ("Z", prompt[:8])):
        scheduler.add(Sequence(tokens))
        output = scheduler.schedule()
        seq = scheduler.running[-1]
        chunk = next(chunk for chunk in output.chunks if chunk.seq is seq)
        slots = Batch.from_scheduler_output(output, BLOCK_SIZE).slot_mapping[-(chunk.end - chunk.start) :].tolist()
        positions = f"{chunk.start}" if chunk.end - chunk.start == 1 else f"{chunk.start} to {chunk.end - 1}"
        blocks = " ".join(map(str, seq.block_table))
        table.add_row(name, blocks, str(seq.num_cached_tokens), positions, " ".join(map(str, slots)))
        scheduler.update(output, [WORD] * sum(chunk.samples for chunk in output.chunks))
        scheduler.check_integrity()
    story.show(table)
    story.say(
        "Y computes positions 8 and 9 again and writes them into a block of its own. Z has nothing left to write: it "
        "computes its last token once more, for the logits, and leaves the block as it is."
    )
