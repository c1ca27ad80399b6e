"""Ten blocks, three requests: the worked example of vLLM's prefix caching document, on the real BlockManager.

    python examples/prefix_cache_walkthrough.py

Block size 4. After each step it draws the pool, the free queue and the hash map. Needs no model and no torch.
Chapter 7 explains what happens.
"""

from collections.abc import Iterable

from measuring import arguments, console
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nanovllm.core.block_manager import BlockEvent, BlockManager
from nanovllm.core.sequence import Sequence

WORDS = "one cold morning the harbour lay silent under fog while two gulls circled above a red boat".split()
OTHER = "then rain began falling on every roof of our small town while we ran home".split()
VOCABULARY = list(dict.fromkeys(WORDS + OTHER + [f"w{i}" for i in range(20)]))
STYLES = {"in use": "black on green", "in use, shared": "black on bright_green", "cached, nobody's": "black on cyan"}


def ids(words: Iterable[str]) -> list[int]:
    return [VOCABULARY.index(word) for word in words]


class Walkthrough:
    """Plays a scheduler's part by hand and draws what the manager holds."""

    def __init__(self) -> None:
        self.manager = BlockManager(10, 4, free_order="release")  # the document's order, before vLLM changed its own
        self.manager.on_event = self._note
        self.events: list[BlockEvent] = []
        self.names: dict[int, str] = {}
        self.step = 0

    def admit(self, name: str, words: Iterable[str]) -> Sequence:
        seq = Sequence(ids(words))
        self.names[seq.seq_id] = name
        self.manager.allocate_with_prefix(seq)
        self.compute(seq)
        return seq

    def compute(self, seq: Sequence, *words: str) -> None:
        """K/V of the tokens so far, and of these, is in the cache now; full blocks get their hashes."""
        seq.tokens += ids(words)
        self.manager.append_slots(seq, len(seq.tokens) - seq.num_computed_tokens)
        seq.num_computed_tokens = len(seq.tokens)
        self.manager.register_prefix(seq)

    def draw(self, title: str, text: str, *seqs: Sequence) -> None:
        self.step += 1
        self.manager.check_integrity()
        tables = [f"{self.names[s.seq_id]}: blocks {s.block_table}, {s.num_cached_tokens} tokens cached" for s in seqs]
        parts: list[Text | Table] = [
            Text(text),
            Text(),
            self._pool(seqs),
            Text(),
            self._queue(),
            Text(),
            self._hash_map(),
        ]
        if tables:
            parts[2:2] = [Text("\n".join(tables)), Text()]
        if self.events:
            parts += [Text(), Text("events: " + "  ".join(f"{e.kind} {e.block_id}" for e in self.events), style="dim")]
        console().print(Panel(Group(*parts), title=f"{self.step}. {title}", title_align="left"))
        self.events = []

    def _pool(self, seqs: tuple[Sequence, ...]) -> Table:
        """One cell a block: state by colour, references, tokens."""
        held = {block_id: (seq, i) for seq in seqs for i, block_id in enumerate(seq.block_table)}
        table = Table(show_header=False, show_edge=False, padding=(0, 1))
        for block in self.manager.blocks:
            if block.ref_count:
                state = "in use, shared" if block.ref_count > 1 else "in use"
            else:
                state = "cached, nobody's" if block.block_hash else "free"
            tokens = block.token_ids
            if not tokens and block.block_id in held:
                seq, i = held[block.block_id]
                tokens = seq.tokens[i * 4 : i * 4 + 4]
            words = " ".join([VOCABULARY[t] for t in tokens] + ["·"] * (4 - len(tokens)))
            shown = f"hash {block.block_hash.hex()[:6]}" if block.block_hash else ""
            style = STYLES.get(state, "dim")
            table.add_row(
                Text(f" block {block.block_id} ", style),
                Text(f"{state} ({block.ref_count})" if block.ref_count else state),
                Text(words),
                Text(shown),
            )
        return table

    def _queue(self) -> Text:
        text = Text("free queue, head first: ")
        for block_id in self.manager.free_blocks:
            is_cached = self.manager.blocks[block_id].block_hash is not None
            text.append(f" {block_id} ", STYLES["cached, nobody's"] if is_cached else "reverse dim").append(" ")
        return text

    def _hash_map(self) -> Text:
        entries = [f"{key.hex()[:6]} → {sorted(copies)}" for key, copies in self.manager.hash_to_block.items()]
        return Text("hash map: " + ("   ".join(entries) or "empty"))

    def _note(self, event: BlockEvent) -> None:
        self.events.append(event)


def main() -> None:
    arguments(__doc__, model=None).parse_args()
    play = Walkthrough()
    first = WORDS[:15]
    play.draw("The pool", "Ten blocks for four tokens each, all free, taken from the head of the queue.")

    r0 = play.admit("request 0", first)
    play.draw(
        "Request 0 arrives: 15 tokens",
        "Nothing is cached: four fresh blocks. Three are full and get a hash, made of the parent's hash and their "
        "tokens. The fourth holds 3 of 4 tokens: only full blocks are cached.",
        r0,
    )
    play.compute(r0, WORDS[15])
    play.compute(r0, WORDS[16])
    play.draw(
        "Request 0 generates two tokens",
        "The first fills block 3, which gets its hash: answers are cached, too. The second needs block 4.",
        r0,
    )
    r1 = play.admit("request 1", WORDS[:10] + OTHER[:4])
    play.draw(
        "Request 1 arrives: 14 tokens, the first 10 as in request 0",
        "Blocks 0 and 1 are hits. The third block agrees in 2 tokens of 4, which is no hit. Two fresh blocks.",
        r0,
        r1,
    )
    play.manager.free(r0)
    play.draw(
        "Request 0 ends",
        "Its blocks go to the tail of the queue, the last one first, and stay cached. Blocks 0 and 1 stay: "
        "request 1 uses them.",
        r1,
    )
    play.manager.free(r1)
    play.draw("Request 1 ends", "Every block is in the queue again; five of them can still be found.")

    console().print(f"Next to be taken, by eviction_candidates(5): {play.manager.eviction_candidates(5)}\n")
    r2 = play.admit("request 2", first[:12] + [f"w{i}" for i in range(17)])
    play.draw(
        "Request 2 arrives: 29 tokens, the first 12 as in request 0",
        "Blocks 0, 1 and 2 are hits and leave the queue first. Then five are taken from its head: 7, 8, 9, 4 and 3. "
        "Block 3 was cached: it is evicted, though 6, which is not cached, stands further back. In the engine's own "
        "order 4 and 6 would have gone to the head of the queue, and nothing would be evicted.",
        r2,
    )
    stats = play.manager.stats
    console().print(
        f"{stats.queries} full blocks asked for: {stats.hits} hits, {stats.misses} misses, {stats.evictions} eviction."
    )


if __name__ == "__main__":
    main()
