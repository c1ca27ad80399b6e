"""The simulator of chapter 7: requests that share beginnings, on the engine's own BlockManager.

It splits texts into words and counts each as a token, so that a block of four tokens can be read. It plays the
scheduler's part by hand, and the model's: which word comes next is looked up in a list. All the rest (names, hits,
reference counts, the free queue, evictions) is what the engine does; with a fault, what it would do then.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import count

import xxhash
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from chapters.ch07_prefix_caching import traps
from chapters.draw import draw_free_queue, pool_cells
from nanovllm.core.block_manager import BlockEvent, BlockManager
from nanovllm.core.sequence import Sequence

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
