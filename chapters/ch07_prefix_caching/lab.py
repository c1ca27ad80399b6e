"""Lab of chapter 7: requests that share beginnings, on the engine's own BlockManager; then a real model, and six traps.

The simulator splits texts into words and counts each as a token, so that a block of four tokens can be read. It plays
the scheduler's part by hand, and the model's: which word comes next is looked up in a list. All the rest (names, hits,
reference counts, the free queue, evictions) is what the engine does. In the second half a real model runs.
"""

import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import xxhash
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from chapters.ch07_prefix_caching import traps
from chapters.draw import draw_free_queue, pool_cells
from chapters.grading import replaced
from chapters.story import Story, one_core
from nanovllm import LLM, SamplingParams
from nanovllm.core import block_manager
from nanovllm.core.block_manager import Block, BlockEvent, BlockManager, FreeBlockQueue
from nanovllm.core.sequence import Sequence

if TYPE_CHECKING:
    from chapters.explorer import Explorer

BLOCK_SIZE, NUM_BLOCKS = 4, 24
LINE = 74  # characters of a request's picture in a row: a terminal of 80, less frame and scroll bar
SALTS = [None, "alice", "bob"]
KINDS = {
    "hit": ("=", "black on green"),
    "miss": ("+", "black on cyan"),
    "own": ("·", "black on yellow"),
    "wrong": ("!", "white on red"),
}
FAULTS: dict[str, Callable[[], AbstractContextManager]] = {
    "": nullcontext,
    "tokens named without their parent": lambda: traps.named(traps.without_parent),
    "bytes(token_ids)": lambda: traps.named(traps.as_bytes),
    "references stay raised": traps.references_stay,
    "hits left in the free queue": traps.hits_stay_free,
    "names stay": traps.names_stay,
}
ANSWER = "yes the lamp is lit and the boats come home before the fog is here".split()

# -- what is asked ----------------------------------------------------------------------------------------------------

SYSTEM = "you keep a small lighthouse answer in short clear words and stay polite"
QUESTIONS = (
    "who lights the lamp at night",
    "how far does the light reach",
    "who lights the lamp in winter when it snows",
    "may I visit",
    "how many steps lead up to the lamp",
)
INSTRUCTIONS = "answer from this page"
PAGES = (
    "page one the tower was built of grey stone by forty men",
    "page two the keeper has a boat a dog and nine hens",
    "page three in winter the supply ship comes once a month",
)
STORIES = (
    "a train left the valley at dawn with no one aboard",
    "bake the bread until its crust sounds hollow",
    "seven lamps hung over the bridge and none was lit",
    "write the name of the river that runs past your house",
)
WORKLOADS = ("one system prompt", "a conversation", "pages and questions", "nothing shared")


def prompts(workload: str, answers: list[str]) -> Iterator[str]:
    """Texts without end. answers: of the requests so far, filled in as they end (a conversation needs the last)."""
    history = ""
    for number in count():
        question = QUESTIONS[number % len(QUESTIONS)]
        if workload == "one system prompt":
            yield f"{SYSTEM} {question}"
        elif workload == "a conversation":
            history = f"{history} {answers[-1] if answers else ''} {question}" if number else f"{SYSTEM} {question}"
            yield history
        elif workload == "pages and questions":
            yield f"{INSTRUCTIONS} {PAGES[number * 2 % len(PAGES)]} {question}"
        else:
            yield f"{number} {STORIES[number % len(STORIES)]}"


@dataclass
class Request:
    """A sequence, and what is remembered of it when it has ended and its block table is empty."""

    name: str
    seq: Sequence
    table: list[int]
    num_hits: int
    num_full: int  # blocks with a name
    computed: int  # prompt tokens that were computed
    running: bool = True
    wrong: set[int] = field(default_factory=set)  # its blocks that held, at some time, K/V of another text


class Simulator:
    """A BlockManager, the requests that came to it, and the words they are made of."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, workload: str = WORKLOADS[0]) -> None:
        self.words: dict[int, str] = {}
        self.workload, self.salt, self.fault = workload, SALTS[0], ""
        self._start(num_blocks)

    def _start(self, num_blocks: int) -> None:
        with FAULTS[self.fault]():
            self.manager = BlockManager(num_blocks, BLOCK_SIZE)
        self.manager.on_event = self._note
        self.forgotten: list[str] = []  # what was evicted since the last action
        self.written: dict[int, list[int]] = {}  # block -> the text up to its end, when its K/V was computed
        self.requests: list[Request] = []
        self.names: dict[int, str] = {}
        self.answers: list[str] = []
        self.num_refused = 0
        self._prompts = {workload: prompts(workload, self.answers) for workload in WORKLOADS}
        self._example: Iterator[str] | None = None

    # -- what can be done -----------------------------------------------------------------------------------------

    def send(self) -> str:
        """The next request of the workload. A conversation's next turn comes when the last one has its answer."""
        if self.workload == "a conversation" and self.running:
            self.grow()
            self.grow()
            self.end_oldest()
        return self.typed(next(self._prompts[self.workload]))

    def typed(self, text: str) -> str:
        """A request with this text."""
        if not text.split():
            return "Type some words: each counts as a token."
        self.forgotten = []
        with FAULTS[self.fault]():
            said = self._admit(text)
        return said + self._aftermath()

    def _admit(self, text: str) -> str:
        name = chr(ord("A") + len(self.requests) % 26)
        seq = Sequence(self.ids(text), cache_salt=self.salt)
        if not self.manager.allocate_with_prefix(seq):
            self.num_refused += 1
            wanted = self.manager.num_blocks_for(len(seq.tokens))
            free = f"those that nobody holds must be free, and {len(self.manager.free_blocks)} are"
            return f"Refused: it needs {wanted} blocks; {free}. End a request (e)."
        self.names[seq.seq_id] = name
        num_hits = seq.num_registered_blocks
        computed = len(seq.tokens) - seq.num_cached_tokens
        self.requests.append(Request(name, seq, [], num_hits, 0, computed))
        self._compute(self.requests[-1])
        all_known = " (all are known: the last one is computed for its logits)" if computed == 1 else ""
        return f"{name}: {len(seq.tokens)} tokens; blocks found: {num_hits}; tokens computed: {computed}{all_known}"

    def grow(self) -> str:
        """Every running request gets a word more."""
        if not self.running:
            return "Nothing is running: send a request (n)."
        self.forgotten = []
        with FAULTS[self.fault]():
            for request in self.running:
                seq = request.seq
                if len(seq.tokens) == seq.num_computed_tokens:  # else last time's word still waits for its slot
                    word = ANSWER[(sum(seq.tokens[: seq.num_prompt_tokens]) + seq.num_generated_tokens) % len(ANSWER)]
                    seq.append(self.ids(word)[0])
                if not self.manager.append_slots(seq):
                    return f"No block is free for the next word of {request.name}. End a request (e)."
                self._compute(request)
        return self._aftermath()

    def end_oldest(self) -> str:
        """The oldest running request ends; what it had stays findable."""
        if not self.running:
            return "Nothing is running: send a request (n)."
        request = self.running[0]
        seq, request.running = request.seq, False
        self.answers.append(self.text(seq.generated_token_ids))
        self.manager.free(seq)
        self._check()
        return f"{request.name} ends. Its blocks go to the tail of the free queue, the last one first."

    def next_workload(self) -> str:
        self.workload = WORKLOADS[(WORKLOADS.index(self.workload) + 1) % len(WORKLOADS)]
        return f"Requests are now: {self.workload}. The cache stays as it is."

    def next_salt(self) -> str:
        self.salt = SALTS[(SALTS.index(self.salt) + 1) % len(SALTS)]
        return f"Requests now come {f'with the salt {self.salt}' if self.salt else 'without a salt'}."

    def shrink(self) -> str:
        num_blocks = len(self.manager.blocks)
        self._start({24: 12, 12: 8}.get(num_blocks, NUM_BLOCKS))
        return f"Begun anew with {len(self.manager.blocks)} blocks."

    def next_fault(self) -> str:
        """Another of the six traps, or none; begins anew. (The sixth needs a model: there is nothing to draw.)"""
        faults = list(FAULTS)
        self.fault = faults[(faults.index(self.fault) + 1) % len(faults)]
        self._start(len(self.manager.blocks))
        return f"Begun anew, {f'with a fault: {self.fault}' if self.fault else 'without a fault'}."

    def reset(self) -> str:
        self.__init__()  # type: ignore[misc]
        return "Begun anew."

    def example(self) -> str:
        """The next step of the worked example of vLLM's document; the first begins it."""
        if self._example is None:
            self.salt, self.fault = None, ""
            self._start(10)
            self._example = example(self)
        said = next(self._example, None)
        if said is None:
            self._example = None
            return "That was the example. Press x to see it again, r for a new pool."
        return said

    # -- helpers --------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request.running]

    def ids(self, text: str) -> list[int]:
        """A word's token id is a hash of it: 32 bits, as large as an id may be."""
        ids = [xxhash.xxh32_intdigest(word.encode()) for word in text.split()]
        self.words.update(zip(ids, text.split(), strict=True))
        return ids

    def text(self, token_ids: list[int]) -> str:
        return " ".join(self.words[token_id] for token_id in token_ids)

    def _compute(self, request: Request) -> None:
        """What the scheduler notes when it has scheduled all of a sequence's tokens."""
        seq, first = request.seq, request.seq.num_computed_tokens // BLOCK_SIZE
        for index in range(first, len(seq.block_table)):
            if self.manager.blocks[seq.block_table[index]].block_hash is None:  # else its K/V is there
                self.written[seq.block_table[index]] = seq.tokens[: (index + 1) * BLOCK_SIZE]
        seq.num_computed_tokens = len(seq.tokens)
        self.manager.register_prefix(seq)
        self._check()
        request.table, request.num_full = [*seq.block_table], seq.num_registered_blocks

    def _check(self) -> None:
        if not self.fault:
            self.manager.check_integrity()

    def _note(self, event: BlockEvent) -> None:
        if event.kind == "evict":
            words = self.text(self.written[event.block_id][-BLOCK_SIZE:])
            self.forgotten.append(f"{event.block_id} ({words})")

    def _aftermath(self) -> str:
        """What was forgotten, and who reads K/V of another text now."""
        said = f"; forgotten: {', '.join(self.forgotten)}" if self.forgotten else ""
        wrong = []
        for request in self.running:
            for index, block_id in enumerate(request.seq.block_table):
                text = request.seq.tokens[: (index + 1) * BLOCK_SIZE]
                if self.written[block_id] != text and index not in request.wrong:
                    request.wrong.add(index)
                    words = self.text(self.written[block_id][-2 * BLOCK_SIZE :])
                    wrong.append(f"{request.name} reads block {block_id}, computed for “... {words}”")
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"{said}; WRONG: {wrong[0]}{more}" if wrong else said

    # -- pictures -------------------------------------------------------------------------------------------------

    def panels(self) -> list[tuple[str, RenderableType]]:
        num_blocks, salt = len(self.manager.blocks), f", salt {self.salt}" if self.salt else ""
        fault = f", FAULT: {self.fault}" if self.fault else ""
        return [
            (f"requests: {self.workload}{salt}{fault}", self.draw_requests(3)),
            (f"the pool: {num_blocks} blocks of {BLOCK_SIZE}; the free queue, head first", self.draw_memory()),
            (f"the hash map: {len(self.manager.hash_to_block)} names", self.draw_map(6)),
            ("counters; prompt tokens computed (█) and saved (░)", Group(self.draw_counters(), self.draw_chart())),
        ]

    def draw_requests(self, last: int) -> Text:
        """Each block in its colour: = found, + computed and now findable, · not full, so this request's alone.

        ! is a block whose K/V was computed for another text; there are none unless a fault is at work.
        """
        if not self.requests:
            return Text("none yet: n sends one, t types one, x plays the worked example", "dim")
        lines = []
        for request in self.requests[-last:]:
            state = "" if request.running else " (ended)"
            salt = f" salt {request.seq.cache_salt}" if request.seq.cache_salt else ""
            line = Text(f"{request.name}{state}{salt} ", "bold" if request.running else "dim")
            for index, block_id in enumerate(request.table):
                kind = "hit" if index < request.num_hits else "miss" if index < request.num_full else "own"
                kind = "wrong" if index in request.wrong else kind
                words = self.text(request.seq.tokens[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE])
                sign, style = KINDS[kind]
                cell = f" {sign}{block_id} {words} "
                if line.cell_len + len(cell) > LINE:  # a block is not torn
                    lines.append(line)
                    line = Text("  ")
                line.append(cell, style if request.running else f"{style} dim").append(" ")
            lines.append(line)
        return Text("\n").join(lines)

    def draw_counters(self) -> Table:
        stats, num_tokens = self.manager.stats, sum(request.seq.num_prompt_tokens for request in self.requests)
        saved = 1 - sum(request.computed for request in self.requests) / max(num_tokens, 1)
        columns = {
            "requests": len(self.requests),
            "hits": stats.hits,
            "misses": stats.misses,
            "prompt tokens": num_tokens,
            "prefill saved": f"{saved:.0%}" if self.requests else "0%",
            "evictions": stats.evictions,
            "refused": self.num_refused,
        }
        table = Table(*columns, box=None, pad_edge=False)
        table.add_row(*map(str, columns.values()))
        return table

    def draw_chart(self, height: int = 5, width: int = 36) -> Text:
        """Prompt tokens after each request, summed: full cells were computed (█), the others saved (░)."""
        if not self.requests:
            return Text("the chart begins with the first request", "dim")
        totals, computed = [0], [0]
        for request in self.requests:
            totals.append(totals[-1] + request.seq.num_prompt_tokens)
            computed.append(computed[-1] + request.computed)
        top = totals[-1]
        text = Text()
        for row in range(height, 0, -1):
            text.append(f"{top * row // height:>6} ", "dim")
            for total, done in list(zip(totals[1:], computed[1:], strict=True))[-width:]:
                level = top * (row - 0.5) / height
                cell, style = ("██", "cyan") if done > level else ("░░", "green") if total > level else ("  ", "")
                text.append(cell, style)
            text.append("\n" if row > 1 else "")
        return text

    def draw_memory(self) -> Group:
        cells = pool_cells(self.manager, [request.seq for request in self.running], self.names)
        return Group(Columns(cells), draw_free_queue(self.manager))

    def draw_map(self, last: int) -> Table:
        table = Table("name", "parent", "stands for", "blocks", box=None, pad_edge=False)
        entries = list(self.manager.hash_to_block.items())
        if len(entries) > last:
            table.add_row("...", "", f"{len(entries) - last} before these", "")
        for name, copies in entries[-last:]:
            block = next(iter(copies.values()))
            parent = block.parent_hash.hex()[:6] if block.parent_hash else "-"
            extra = "".join(f" ({key[0]} {key[1]})" for key in block.extra_keys)
            table.add_row(name.hex()[:6], parent, self.text(block.token_ids) + extra, " ".join(map(str, copies)))
        return table

    def draw_tree(self) -> Tree:
        """The same map, each name below its parent's."""
        trees: dict[bytes | None, Tree] = {None: Tree("(nothing before)")}
        for name, copies in self.manager.hash_to_block.items():
            block = next(iter(copies.values()))
            trees[name] = trees[block.parent_hash].add(f"{name.hex()[:6]}  {self.text(block.token_ids)}")
        return trees[None]


def make_app(model: str | None = None) -> "Explorer":
    from chapters.explorer import Action, Explorer

    actions = [
        Action("n", "send", "send"),
        Action("g", "word", "grow"),
        Action("e", "end", "end_oldest"),
        Action("x", "demo", "example"),
        Action("w", "kind", "next_workload"),
        Action("s", "salt", "next_salt"),
        Action("m", "less", "shrink"),
        Action("f", "trap", "next_fault"),
        Action("r", "new", "reset"),
    ]
    return Explorer(
        "7. Prefix caching: = found, + now cached, · its own, ! wrong", Simulator(), actions, ask="a prompt of yours"
    )


# -- the worked example -----------------------------------------------------------------------------------------------

EXAMPLE = "one cold morning the harbour lay silent under fog while two gulls circled above a red boat".split()
OTHER = "a dog began to bark".split()
LONG = "then rain fell on every roof in town while we ran home and shut the door".split()


def example(world: Simulator) -> Iterator[str]:
    """Ten blocks of four, three requests. Yields what each step shows, after it was done."""
    yield "Ten blocks, all free. The head of the queue is taken next."
    world.typed(" ".join(EXAMPLE[:15]))
    yield "A: 15 tokens, nothing is known. Blocks 0 to 2 are full and get names; block 3 has 3 of 4 tokens, and none."
    _append(world, EXAMPLE[15])
    _append(world, EXAMPLE[16])
    yield "A generates two tokens. The first fills block 3, which gets its name; the second needs block 4."
    world.typed(" ".join(EXAMPLE[:10] + OTHER[:4]))
    yield "B: 14 tokens, 10 as in A. Blocks 0 and 1 are found; the third agrees in 2 of 4 tokens, which is no hit."
    world.end_oldest()
    yield "A ends: 4, 3 and 2 go to the tail, and 2 and 3 keep their names. 0 and 1 stay, B uses them."
    world.end_oldest()
    yield "B ends: 6, 5, 1, 0. All ten are in the queue, and five of them can still be found."
    world.typed(" ".join(EXAMPLE[:12] + LONG + ["fast", "again"]))
    yield "C: 29 tokens, 12 as in A. 0, 1, 2 are found and leave the queue first; 7 8 9 4 3 are taken. 3 is forgotten."


def _append(world: Simulator, word: str) -> None:
    request = world.running[0]
    request.seq.append(world.ids(word)[0])
    assert world.manager.append_slots(request.seq)
    world._compute(request)


# -- other orders of forgetting ---------------------------------------------------------------------------------------


class ByRank(FreeBlockQueue):
    """A free queue that gives the block of lowest rank instead of its head, unnamed ones before all others.

    Only blocks without a cached child are given, so that a cached block's parent stays cached.
    """

    manager: BlockManager
    rank: Callable[[bytes], float]  # of a name

    def popleft(self) -> Block:
        blocks = [self.manager.blocks[block_id] for block_id in self]
        parents = {block.parent_hash for block in self.manager.blocks if block.block_hash is not None}
        leaves = [block for block in blocks if block.block_hash not in parents - {None}]
        block = min(leaves, key=lambda b: float("-inf") if b.block_hash is None else self.rank(b.block_hash))
        self.remove(block)
        return block


def bursts(num_rounds: int, num_strangers: int) -> list[Sequence]:
    """A system prompt of 4 blocks again and again, each time with a question of its own, and strangers between."""
    fresh, seqs = count(1000), []
    for _ in range(num_rounds):
        seqs.append(Sequence([*range(16), *(next(fresh) for _ in range(8))]))
        seqs += [Sequence([next(fresh) for _ in range(24)]) for _ in range(num_strangers)]
    return seqs


POLICIES = ("released longest ago (the engine's)", "fewest uses so far", "next use farthest away")


def hits_of(policy: str, seqs: list[Sequence], num_blocks: int) -> int:
    """Blocks found when the requests come one after another and this block is forgotten first."""
    with replaced(block_manager, "FreeBlockQueue", FreeBlockQueue if policy == POLICIES[0] else ByRank):
        manager = BlockManager(num_blocks, BLOCK_SIZE)
    uses: dict[bytes, list[int]] = {}  # name -> numbers of the requests that ask for it
    for number, seq in enumerate(seqs):
        for index in range(len(seq.tokens) // BLOCK_SIZE):
            uses.setdefault(manager.name_block(seq, index)[0], []).append(number)
    now = 0

    def rank(name: bytes) -> float:
        if policy == POLICIES[1]:
            return sum(use < now for use in uses[name])
        return -min((use for use in uses[name] if use > now), default=len(seqs))

    if isinstance(manager.free_blocks, ByRank):
        manager.free_blocks.manager, manager.free_blocks.rank = manager, rank
    for now, seq in enumerate(seqs):  # noqa: B007  rank() looks at it
        assert manager.allocate_with_prefix(seq)
        seq.num_computed_tokens = len(seq.tokens)
        manager.register_prefix(seq)
        manager.free(seq)
    manager.check_integrity()
    return manager.stats.hits


# -- the story --------------------------------------------------------------------------------------------------------

RULES = (
    "You answer questions of visitors at the lighthouse of Cape Farewell. The tower was built in 1871 of grey granite "
    "and stands forty metres above the sea. It is open from April to October, every day from nine to five, and closed "
    "in storms. A ticket costs six euros; children under ten come in free. There are two hundred and twelve steps, and "
    "no lift. Dogs may come along on a lead, but not up the tower. The lamp was lit with whale oil, then with petrol, "
    "and since 1954 by electricity; it is seen from thirty kilometres away. The last keeper left in 1988. In the shop "
    "there are maps, candles and hot soup. The bus from the harbour leaves every hour. Be short, and be kind. "
)
VISITORS = ("May I bring my dog?", "How much is a ticket for two?", "When was the tower built?", "Is there a lift?")
LETTERS = (
    "Dear Ms Green, thank you for your patience. We are glad to say that the board has agreed to your plan, and that "
    "the sum you asked for will be paid in May. The first part is for the roof of the old boathouse, the second for "
    "two new boats and the pay of a teacher. Please send us the bills as they come in, and a picture when it is done.",
    "Dear Ms Green, thank you for your patience. We are sorry to say that the board could not agree to your plan, and "
    "that no sum will be paid this year. The roof of the old boathouse is thought to be past mending, and there is no "
    "teacher to be had. Please do not lose heart: you may ask again in spring, with another plan and other figures.",
)


def tell(story: Story) -> None:
    llm = story.load(dtype="float32", block_size=traps.BLOCK_SIZE, max_model_len=512, num_gpu_blocks_override=256)
    with one_core():
        block_s = tell_saving(story, llm)
        tell_names(story)
        tell_requests(story)
        tell_example(story)
        tell_forgetting(story)
        tell_copies(story)
        tell_salts(story, llm)
        tell_traps(story, llm)
        tell_cost(story, block_s)


def ask(llm: LLM, prompt: str, salt: str | None = None) -> tuple[float, int, int, str]:
    """Milliseconds to the first token, prompt tokens, how many of them were found, and the answer."""
    params = SamplingParams(temperature=0, max_tokens=8)
    [output] = llm.generate([{"prompt": prompt, "cache_salt": salt} if salt else prompt], params, use_tqdm=False)
    ttft_s = output.metrics.ttft_s or 0.0
    return ttft_s * 1e3, len(output.prompt_token_ids), output.num_cached_tokens, output.outputs[0].text


def tell_saving(story: Story, llm: LLM) -> float:
    """Returns the seconds that the prefill of one block takes."""
    story.part("The same beginning, four times")
    story.say(
        f"A real model behind a counter: four visitors, and before each question the same house rules. Blocks of "
        f"{traps.BLOCK_SIZE} tokens. The cache is empty when the first one asks."
    )
    ask(llm, "Warm up. " * 40)
    llm.reset_prefix_cache()
    table = Table("question", "prompt tokens", "found", "computed", "first token after (measured)")
    answers, times = [], []
    for visitor in VISITORS:
        ttft_ms, num_tokens, num_cached, text = ask(llm, f"{RULES}{visitor}")
        answers.append(text)
        times.append(ttft_ms)
        numbers = map(str, (num_tokens, num_cached, num_tokens - num_cached))
        table.add_row(visitor, *numbers, f"{ttft_ms:.0f} ms (measured)")
    story.show(table)
    later = statistics.mean(times[1:])
    story.say(f"With the rules found, the first token comes {times[0] / later:.1f} times as early.", measured=True)
    same = []
    for visitor, answer in zip(VISITORS, answers, strict=True):
        llm.reset_prefix_cache()
        same.append(ask(llm, f"{RULES}{visitor}")[3] == answer)
    story.say(f"Asked again, each with an empty cache: {sum(same)} of {len(same)} answers are the same, word for word.")
    return times[0] / 1e3 / (num_tokens / traps.BLOCK_SIZE)


def tell_names(story: Story) -> None:
    story.part("A name for a block")
    story.say(
        "The simulator: every word is a token, a block holds four. Three texts and the names of their full blocks. The "
        "second differs from the first in its last word, the third in its first:"
    )
    world = Simulator()
    table = Table("text", "block 0", "block 1", "block 2")
    for text in (
        "the lamp is lit when the night comes down over the sea",
        "the lamp is lit when the night comes down over the town",
        "one lamp is lit when the night comes down over the sea",
    ):
        seq = Sequence(world.ids(text))
        table.add_row(text, *(world.manager.name_block(seq, index)[0].hex()[:6] for index in range(3)))
    story.show(table)
    story.say(
        "A name contains its parent's, so one word changes the names of its own block and of all that follow, and of "
        "none before. Blocks 1 of the second and the third text hold the same four words and have different names."
    )


def tell_requests(story: Story) -> None:
    story.part("Requests that share a beginning")
    world = Simulator()
    for _ in range(4):
        story.console.print(world.send(), style="dim")
    for _ in range(3):
        world.grow()
    story.say(
        "\nEach then gets three words of an answer. = was found, + computed and now findable, · its own, not full:"
    )
    story.show(world.draw_requests(4))
    story.say("The pool (+1: one more request holds it), and the free queue from its head:")
    story.show(world.draw_memory())
    story.show(world.draw_counters())
    for _ in range(4):
        world.end_oldest()
    story.say("They end one after another. The pool now holds K/V that nobody uses and anybody can find:")
    story.show(world.draw_memory())
    story.say("The hash map is flat. Each name contains its parent's, so a tree is in it all the same:")
    story.show(world.draw_tree())
    world = Simulator(48, "a conversation")
    for _ in range(10):
        story.console.print(world.send(), style="dim")
    story.console.print()
    story.say(
        "A conversation: each turn sends all that was said before, the answers too. Prompt tokens computed (█) and "
        "saved (░), summed over the turns:"
    )
    story.show(world.draw_chart())
    story.show(world.draw_counters())


def tell_example(story: Story) -> None:
    story.part("The worked example of vLLM's document, step by step")
    world = Simulator()
    for _ in range(7):
        story.say(world.example())
        if world.requests:
            story.console.print(world.draw_requests(3))
        story.show(world.draw_memory())
    story.show(world.draw_map(12))
    story.show(world.draw_counters())


def tell_forgetting(story: Story) -> None:
    story.part("What is forgotten first")
    story.say("The system prompt again, in a pool of 8 blocks; after each answer the request ends.")
    world = Simulator(8)
    for workload in (0, 3, 0, 3, 3, 0):
        world.workload = WORKLOADS[workload]
        story.console.print(world.send(), style="dim")
        world.end_oldest()
    story.console.print()
    story.show(world.draw_map(8))
    story.say(
        "Two strangers in a row push out the end of a prompt that everybody uses: the queue knows when a block was "
        "released, and not how often it was wanted. How much would another order save? A system prompt of 4 blocks "
        "with a question of 2, twenty times, and strangers of 6 blocks between; a pool of 24. Found, of 76 blocks:"
    )
    table = Table("what is forgotten first; strangers between:", *map(str, range(1, 7)))
    for policy in POLICIES:
        table.add_row(policy, *(str(hits_of(policy, bursts(20, n), 24)) for n in range(1, 7)))
    story.show(table)


def tell_copies(story: Story) -> None:
    story.part("Two blocks, one name")
    story.say("Two requests with the same text run side by side and generate the same words:")
    world = Simulator()
    for _ in range(2):
        story.console.print(world.typed("how far does the light reach"), style="dim")
    for _ in range(4):
        world.grow()
    story.console.print()
    story.show(world.draw_requests(2))
    story.show(world.draw_map(4))
    story.say(
        "The first block was found; the others were filled by both at the same time, so they exist twice, under one "
        "name. Either serves the next request, and either can be forgotten alone."
    )


def tell_salts(story: Story, llm: LLM) -> None:
    story.part("Salts")
    story.say("The same text from two tenants, then from the first again:")
    world = Simulator()
    for salt in ("alice", "bob", "alice"):
        world.salt = salt
        story.console.print(f"{salt}: {world.typed(f'{SYSTEM} may I visit')}", style="dim")
    story.console.print()
    story.show(world.draw_map(6))
    story.say(
        "Why anybody wants that: a hit can be felt. Alice has one of two letters summarized. Mallory knows both texts, "
        "sends them to the same engine, and holds a stopwatch:"
    )
    table = Table("Mallory sends", "salts", "found", "first token after (measured)")
    for salts in ((None, None), ("alice", "mallory")):
        for letter in LETTERS:
            llm.reset_prefix_cache()
            ask(llm, f"{LETTERS[0]} Summary:", salts[0])  # Alice
            ttft_ms, num_tokens, num_cached, _ = ask(llm, f"{letter} Hello.", salts[1])
            title, kind = "Alice's letter" if letter == LETTERS[0] else "the other", "two" if salts[0] else "none"
            table.add_row(title, kind, f"{num_cached} of {num_tokens}", f"{ttft_ms:.0f} ms (measured)")
    story.show(table)


def tell_traps(story: Story, llm: LLM) -> None:
    story.part("Six traps")
    prompts = traps.Prompts(llm)
    japan, wuhan, reader = prompts.japan, prompts.wuhan, prompts.reader
    story.say(
        "The engine with one fault at a time, and the same requests without it. There are three prompts, each of one "
        "block of its own, four blocks that are the same in all, and one token more:"
    )
    beginnings = "I come from Japan.", "I come from Wuhan.", "I like to read."
    story.show(Text("".join(f"  {beginning} ...\n" for beginning in beginnings) + f"  ...{traps.FAMILY} called"))
    story.say(
        "[bold]1. Tokens are named without their parent.[/] First comes Japan. The reader has only said thank you so "
        "far, and its first block is known; now it sends its prompt, too."
    )
    waves = [[japan], [prompts.greeting("I like to read.")], [reader]]
    tell_trap(story, llm, ["reader"], waves, lambda: traps.named(traps.without_parent))

    story.say("[bold]2. The name is made of bytes(token_ids).[/] One prompt is enough:")
    story.say(f"  {traps.play(llm, [[japan]], traps.named(traps.as_bytes)).error}")
    pair = next(pair for pair in zip(japan, wuhan, strict=True) if pair[0] != pair[1])
    ids = ", ".join(f"{llm.get_tokenizer().decode([i])!r} is {i} = 256 * {i // 256} + {i % 256}" for i in pair)
    story.say(f"The first mend that comes to mind is i % 256, and it runs. {ids}.")
    tell_trap(story, llm, ["Wuhan"], [[japan], [wuhan]], lambda: traps.named(traps.as_low_bytes))

    story.say("[bold]3. References stay raised when there is no room.[/] A pool of 16 blocks, and three waves:")
    table = Table("wave", "answered", "free blocks afterwards", "references that nobody holds")
    letter = llm.get_tokenizer().encode(LETTERS[0])[:60]
    waves = [[japan, wuhan, reader], [japan, wuhan, reader], [letter]]
    for number in range(1, 4):
        outcome = traps.play(llm, waves[:number], traps.references_stay(), num_blocks=16)
        counts = [block.ref_count for block in outcome.manager.blocks]
        answered = f"{outcome.num_finished} of {len(waves[number - 1])}"
        table.add_row(str(number), answered, str(len(outcome.manager.free_blocks)), " ".join(map(str, counts)))
    story.show(table)
    outcomes = outcome.error, traps.play(llm, waves, num_blocks=16).error or "it is answered"
    story.say("The third wave is one letter of 60 tokens, 8 blocks. With the fault: {}. Without: {}.".format(*outcomes))

    story.say(
        "[bold]4. Hits are left in the free queue.[/] A pool of 10 blocks; the reader again, and Japan beside it:"
    )
    tell_trap(story, llm, ["reader", "Japan"], [[reader], [reader, japan]], traps.hits_stay_free, num_blocks=10)

    story.say("[bold]5. A block that is taken keeps its old name.[/] A pool of 8 blocks; Japan, then the reader, then:")
    tell_trap(story, llm, ["Japan"], [[japan], [reader], [japan]], traps.names_stay, num_blocks=8)

    story.say(
        "[bold]6. Of a fully cached prompt nothing is computed.[/] The prompts without their last token: 5 blocks."
    )
    story.say(f"  Alone: {traps.play(llm, [[japan[:-1]]] * 2, traps.nothing_left()).error}")
    story.say("Beside another request, Japan's first token comes from the row that happens to be the last before it:")
    waves = [[japan[:-1]], [reader, japan[:-1]]]
    tell_trap(story, llm, ["reader", "Japan"], waves, traps.nothing_left)


def tell_trap(
    story: Story,
    llm: LLM,
    names: list[str],
    waves: list[list[list[int]]],
    fault: Callable[[], AbstractContextManager],
    num_blocks: int = 64,
) -> None:
    """The answers to the last wave, right and wrong, as much of them as fits on a line."""
    right, wrong = (traps.play(llm, waves, *faults, num_blocks=num_blocks) for faults in ([], [fault()]))
    table = Table("who asks", "found", "the answer", "found", "with the fault")
    for name, *columns in zip(names, right.cached, right.texts, wrong.cached, wrong.texts, strict=False):
        table.add_row(name, *(textwrap.shorten(str(column), 33, placeholder="") for column in columns))
    story.show(wrong.error or table)


def tell_cost(story: Story, block_s: float) -> None:
    story.part("What it costs when nothing is shared")
    num_tokens, times = 32_000, []
    for seed in range(5):
        manager = BlockManager(num_tokens // traps.BLOCK_SIZE + 1, traps.BLOCK_SIZE)
        seq = Sequence([(seed + 1) * 1_000_000 + i for i in range(num_tokens)])
        started = time.perf_counter()
        manager.allocate_with_prefix(seq)
        seq.num_computed_tokens = num_tokens
        manager.register_prefix(seq)
        times.append((time.perf_counter() - started) / (num_tokens // traps.BLOCK_SIZE))
    cost_s = statistics.median(times)
    story.say(
        f"A prompt of {num_tokens:,} tokens that nobody has sent before, {num_tokens // traps.BLOCK_SIZE:,} blocks."
    )
    story.say(f"Naming, probing and registering a block: {cost_s * 1e6:.1f} microseconds.", measured=True)
    story.say(f"Its prefill, from the first part: {block_s * 1e3:.1f} milliseconds.", measured=True)
    story.say(f"The cache costs {cost_s / block_s:.2%} of the prefill that it may save.", measured=True)
    seq = Sequence(list(range(num_tokens)))
    manager = BlockManager(num_tokens // traps.BLOCK_SIZE, traps.BLOCK_SIZE, enable_prefix_caching=False)
    manager.allocate_with_prefix(seq)
    seq.num_computed_tokens = num_tokens
    manager.register_prefix(seq)
    story.say(f"With enable_prefix_caching=False the same prompt has {len(seq.block_hashes)} names made for it.")
