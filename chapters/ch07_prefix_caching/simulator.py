"""The simulator of chapter 7: requests that share beginnings, on the engine's own BlockManager.

It splits texts into words and counts each as a token, so that a block of four tokens can be read. It does by hand what
the scheduler does for a sequence, and what the model does: which word comes next is looked up in a list. All the rest
(hashes, hits, reference counts, the free queue, evictions) is the engine's work; with a fault, it is what the engine
would do then. Nothing is drawn here: drawing.py draws this object in a terminal, and any other face may.
"""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

import xxhash

from chapters.ch07_prefix_caching import faults
from chapters.ch07_prefix_caching.faults import Fault
from chapters.ch07_prefix_caching.workloads import ANSWER, WORKLOADS, prompts
from chapters.player import actions
from chapters.stage import compute
from nanovllm.core.block_hash import MMSpan
from nanovllm.core.block_manager import BlockEvent, BlockManager
from nanovllm.core.sequence import Sequence

BLOCK_SIZE, NUM_BLOCKS = 4, 24
SALTS = [None, "alice", "bob"]
PICTURE = re.compile(r"\[(\w+)\]")  # a word of a typed text
PLACEHOLDER, NUM_PLACEHOLDERS = "<P>", 6  # what a picture becomes
FAULTS: dict[str, Fault] = {
    "": nullcontext,
    "tokens hashed without their parent": faults.without_parent,
    "bytes(token_ids)": faults.bytes_of_ids,
    "references stay raised": faults.references_stay,
    "hits left in the free queue": faults.hits_stay_free,
    "hashes stay": faults.names_stay,
    "nothing is left to compute": faults.nothing_left,
}
ACTIONS = actions(
    "n|send|send, g|word|grow, e|end|end_oldest, x|demo|example, w|kind|next_workload, s|salt|next_salt, "
    "m|less|shrink, f|trap|next_fault, r|new|reset"
)


@dataclass
class Request:
    """A sequence, and what is remembered of it when it has ended and its block table is empty."""

    name: str
    seq: Sequence
    num_hits: int
    num_computed: int  # prompt tokens that were computed, not found
    table: list[int] = field(default_factory=list)
    num_hashed: int = 0  # blocks of its table with a hash
    running: bool = True
    wrong: set[int] = field(default_factory=set)  # indexes of blocks that held, at some time, K/V of another text

    def kind(self, index: int) -> str:
        """Of a block of its table: found (hit), computed and hashed (miss), without a hash (own), or wrong."""
        if index in self.wrong:
            return "wrong"
        return "hit" if index < self.num_hits else "miss" if index < self.num_hashed else "own"


def in_words(key: tuple) -> str:
    """An extra key of a block's hash."""
    if key[0] == "mm":
        return f"mm {key[1]}, starts at {key[2]}"
    return f"{key[0]} {key[1]}"


class Simulator:
    """A BlockManager, the requests that came to it, and the words they are made of. Actions return what happened."""

    def __init__(self, num_blocks: int = NUM_BLOCKS, workload: str = WORKLOADS[0]) -> None:
        self.words: dict[int, str] = {}  # token id -> word
        self.workload, self.salt, self.fault = workload, SALTS[0], ""
        self._start(num_blocks)

    def _start(self, num_blocks: int, free_order: str = "uncached_first") -> None:
        with FAULTS[self.fault]():
            self.manager = BlockManager(num_blocks, BLOCK_SIZE, free_order=free_order)
        self.manager.on_event = self._note
        self.evicted: list[str] = []  # since the last action
        self.events: list[BlockEvent] = []  # the same of all kinds, in order; a face that shows them empties the list
        self.written: dict[int, list[int]] = {}  # block -> the text up to its end, when its K/V was computed
        self.requests: list[Request] = []
        self.names: dict[int, str] = {}  # seq_id -> name of the request
        self.answers: list[str] = []
        self.num_refused = 0
        self._prompts = {workload: prompts(workload, self.answers) for workload in WORKLOADS}
        self._example: Iterator[str] | None = None

    # -- actions --------------------------------------------------------------------------------------------------

    def send(self) -> str:
        """The next request of the workload. A conversation's next turn comes when the last one has its answer."""
        if self.workload == "a conversation" and self.running:
            self.grow()
            self.grow()
            self.end_oldest()
        return self.typed(next(self._prompts[self.workload]))

    def typed(self, text: str) -> str:
        """A request with this text. A word in brackets, such as [boat], is a picture."""
        if not text.split():
            return "Type some words: each counts as a token."
        self.evicted, self._example = [], None
        with FAULTS[self.fault]():
            token_ids, pictures = self.read(text)
            said = self._admit(Sequence(token_ids, cache_salt=self.salt, mm_spans=pictures))
        return said + self._aftermath()

    def grow(self) -> str:
        """Every running request gets one more word."""
        if not self.running:
            return "Nothing is running: send a request (n)."
        self.evicted, self._example = [], None
        with FAULTS[self.fault]():
            for request in self.running:
                seq = request.seq
                number = sum(self._seen(seq, seq.num_prompt_tokens)) + seq.num_generated_tokens
                if not self._append(request, ANSWER[number % len(ANSWER)]):
                    return f"No block is free for the next word of {request.name}. End a request (e)."
        return self._aftermath()

    def end_oldest(self) -> str:
        """The oldest running request ends; what it had stays findable."""
        if not self.running:
            return "Nothing is running: send a request (n)."
        self._example = None
        request = self.running[0]
        request.running = False
        self.answers.append(self.text(request.seq.generated_token_ids))
        self.manager.free(request.seq)
        self._check()
        return f"{request.name} ends: cached blocks go to the tail of the free queue, the others to its head."

    def next_workload(self) -> str:
        """A different kind of request: a system prompt, a conversation, pages, strangers in turn."""
        self.workload = WORKLOADS[(WORKLOADS.index(self.workload) + 1) % len(WORKLOADS)]
        return f"Requests are now: {self.workload}. The cache stays as it is."

    def next_salt(self) -> str:
        """A different salt: none, alice, bob in turn. Requests with different salts share nothing."""
        self._example = None
        self.salt = SALTS[(SALTS.index(self.salt) + 1) % len(SALTS)]
        return f"Requests now come {f'with the salt {self.salt}' if self.salt else 'without a salt'}."

    def shrink(self) -> str:
        """Start over with a smaller pool: 24, 12 or 8 blocks in turn."""
        num_blocks = len(self.manager.blocks)
        self._start({24: 12, 12: 8}.get(num_blocks, NUM_BLOCKS))
        return f"Started over with {len(self.manager.blocks)} blocks."

    def next_fault(self) -> str:
        """Start over with the next fault built into the engine."""
        names = list(FAULTS)
        self.fault = names[(names.index(self.fault) + 1) % len(names)]
        self._start(len(self.manager.blocks))
        return f"Started over, {f'with a fault: {self.fault}' if self.fault else 'without a fault'}."

    def reset(self) -> str:
        """Start over, as at the start."""
        self.workload, self.salt, self.fault = WORKLOADS[0], SALTS[0], ""
        self._start(NUM_BLOCKS)
        return "Started over."

    def example(self) -> str:
        """The next step of the worked example of vLLM's document; after any other action it starts over."""
        if self._example is None:
            self.salt, self.fault = None, ""
            self._example = self._play_example()
        steps = self._example
        said = next(steps, "")
        self._example = steps if said else None  # its steps are actions, too
        return said or "That was the example. Press x to see it again, r for a new pool."

    def _play_example(self) -> Iterator[str]:
        """Ten blocks of four, three requests. Yields what each step shows, after it was done.

        First as in the document, where every freed block goes to the tail; then the end of it in the engine's order.
        """
        text = "one cold morning the harbour lay silent under fog while two gulls circled above a red boat".split()
        a, b = " ".join(text[:15]), " ".join([*text[:10], "a dog began to"])
        rest = "then rain fell on every roof in town while we ran home and shut the door fast again"
        c = " ".join([*text[:12], rest])
        self._start(10, "release")
        yield "Ten blocks, all free. The head of the queue is taken next, and every freed block goes to the tail."
        self.typed(a)
        yield (
            "A: 15 tokens, nothing is known. Blocks 0 to 2 are full and get hashes; block 3 has 3 of 4 tokens: no hash."
        )
        self._append(self.running[0], text[15])
        self._append(self.running[0], text[16])
        yield "A generates two tokens. The first fills block 3, which gets its hash; the second needs block 4."
        self.typed(b)
        yield "B: 14 tokens, 10 as in A. Blocks 0 and 1 are found; the third agrees in 2 of 4 tokens, which is no hit."
        self.end_oldest()
        yield "A ends: 4, 3 and 2 go to the tail, and 2 and 3 keep their hashes. 0 and 1 stay, B uses them."
        self.end_oldest()
        yield "B ends: 6, 5, 1, 0. All ten are in the queue, and five of them can still be found."
        self.typed(c)
        yield (
            "C: 29 tokens, 12 as in A. 0, 1, 2 are found and leave the queue first; 7 8 9 4 3 are taken. 3 is evicted."
        )
        self._start(10)
        self.typed(a)
        self._append(self.running[0], text[15])
        self._append(self.running[0], text[16])
        self.typed(b)
        self.end_oldest()
        self.end_oldest()
        yield "The same in the engine's order, until B has ended: 4 and 6 are uncached and went to the queue's head."
        self.typed(c)
        yield "C again: 6 4 7 8 9 are taken. None of them is cached, so nothing is evicted."

    # -- what the actions and the faces ask -----------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        return [request for request in self.requests if request.running]

    def counters(self) -> dict[str, object]:
        """Prefill saved: the part of all prompt tokens that was found."""
        stats, num_tokens = self.manager.stats, sum(request.seq.num_prompt_tokens for request in self.requests)
        saved = 1 - sum(request.num_computed for request in self.requests) / num_tokens if num_tokens else 0.0
        found = {"requests": len(self.requests), "hits": stats.hits, "misses": stats.misses}
        work = {"prompt tokens": num_tokens, "prefill saved": f"{saved:.0%}"}
        return {**found, **work, "evictions": stats.evictions, "refused": self.num_refused}

    def ids(self, text: str) -> list[int]:
        """A word's token id is a hash of it: 32 bits, as large as an id may be."""
        ids = [xxhash.xxh32_intdigest(word.encode()) for word in text.split()]
        self.words.update(zip(ids, text.split(), strict=True))
        return ids

    def read(self, text: str) -> tuple[list[int], tuple[MMSpan, ...]]:
        """Token ids of a text, and where its pictures are. A picture's name stands for the hash of its content."""
        words: list[str] = []
        pictures: list[MMSpan] = []
        for word in text.split():
            if picture := PICTURE.fullmatch(word):
                pictures.append(MMSpan(len(words), NUM_PLACEHOLDERS, picture[1]))
                words += [PLACEHOLDER] * NUM_PLACEHOLDERS
            else:
                words.append(word)
        return self.ids(" ".join(words)), tuple(pictures)

    def text(self, token_ids: list[int]) -> str:
        return " ".join(self.words[token_id] for token_id in token_ids)

    # -- helpers --------------------------------------------------------------------------------------------------

    def _admit(self, seq: Sequence) -> str:
        name = chr(ord("A") + len(self.requests) % 26)
        if not self.manager.allocate_with_prefix(seq):
            self.num_refused += 1
            return self._refusal(self.manager.num_blocks_for(len(seq.tokens)))
        self.names[seq.seq_id] = name
        num_hits, num_computed = seq.num_registered_blocks, len(seq.tokens) - seq.num_cached_tokens
        self.requests.append(Request(name, seq, num_hits, num_computed))
        self._compute(self.requests[-1])
        sent = f"{name}: {len(seq.tokens)} token{'s' if len(seq.tokens) > 1 else ''}"
        if num_computed == 0:
            return f"{sent}; all found, nothing computed; WRONG: no logits for the next word"
        is_known = num_hits * BLOCK_SIZE == len(seq.tokens)
        all_known = " (all are known: the last one is computed for its logits)" if is_known else ""
        return f"{sent}; blocks found: {num_hits}; tokens computed: {num_computed}{all_known}"

    def _refusal(self, num_needed: int) -> str:
        """Why a request that needs so many blocks is not admitted, and what can be done."""
        num_blocks, num_free = len(self.manager.blocks), len(self.manager.free_blocks)
        said = (
            f"Refused: it needs {num_needed} blocks. Those that it does not share with a running request must be free, "
            f"and only {num_free} are. "
        )
        if self.running:
            return f"{said}End a request (e)."
        if num_free >= num_blocks:
            return f"{said}The pool has no more."
        return (
            f"{said}The other {num_blocks - num_free} are lost: no request holds them, and they are not in the queue."
        )

    def _append(self, request: Request, word: str) -> bool:
        """One more word of an answer. False when no block is free for it."""
        seq = request.seq
        if len(seq.tokens) == seq.num_computed_tokens:  # else an earlier word still waits for its slot
            seq.append(self.ids(word)[0])
        if not self.manager.append_slots(seq):
            return False
        self._compute(request)
        return True

    def _compute(self, request: Request) -> None:
        """What the scheduler notes when it has scheduled all of a sequence's tokens."""
        seq, first = request.seq, request.seq.num_computed_tokens // BLOCK_SIZE
        for index in range(first, len(seq.block_table)):
            if self.manager.blocks[seq.block_table[index]].block_hash is None:  # else its K/V is there
                self.written[seq.block_table[index]] = self._seen(seq, (index + 1) * BLOCK_SIZE)
        compute(self.manager, seq)
        self._check()
        request.table, request.num_hashed = [*seq.block_table], seq.num_registered_blocks

    def written_in(self, block_id: int) -> str:
        """The words whose K/V a block holds: fewer than its size if it is not full."""
        text = self.written.get(block_id, [])
        return self.text(text[(len(text) - 1) // BLOCK_SIZE * BLOCK_SIZE :])

    def _seen(self, seq: Sequence, end: int) -> list[int]:
        """Its first tokens as a model sees them: placeholders of different pictures are different."""
        tokens = seq.tokens[:end]
        for start, length, name in seq.mm_spans:
            stop = min(start + length, len(tokens))
            tokens[start:stop] = self.ids(f"<{name}> " * (stop - start))
        return tokens

    def _check(self) -> None:
        if not self.fault:
            self.manager.check_integrity()

    def _note(self, event: BlockEvent) -> None:
        self.events.append(event)
        if event.kind == "evict":
            self.evicted.append(f"block {event.block_id} ({self.text(self.written[event.block_id][-BLOCK_SIZE:])})")

    def _aftermath(self) -> str:
        """What was evicted, and who reads K/V of another text now."""
        said = f"; evicted: {', '.join(self.evicted)}" if self.evicted else ""
        wrong = []
        for request in self.running:
            for index, block_id in enumerate(request.seq.block_table):
                text = self._seen(request.seq, (index + 1) * BLOCK_SIZE)
                if self.written[block_id] != text and index not in request.wrong:
                    request.wrong.add(index)
                    words = self.text(self.written[block_id][-2 * BLOCK_SIZE :])
                    wrong.append(f"{request.name} reads block {block_id}, computed for “... {words}”")
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"{said}; WRONG: {wrong[0]}{more}" if wrong else said
