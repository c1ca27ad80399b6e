"""Exam questions on chapter 7, prefix caching: block by block."""

from chapters.teaching.questions.bank import Draw, Question, asks, listed, play, request, scheduler, table, text
from nanovllm.core.block_manager import BlockManager

SIZE = 4  # of the blocks of this file's questions


@asks(7, "trace")
def hits_block_by_block(draw: Draw) -> Question:
    def make() -> tuple[list[str], list[tuple[int, int]], int]:
        first = "".join(draw.some("abcdefghijklmnop", draw.number(10, 14)))
        cuts = draw.number(5, 9), draw.number(8, len(first) - 1)
        texts = [first, first[: cuts[0]] + "".join(draw.some("qrstuvwx", 5)), first[: cuts[1]] + "yz"]
        engine = scheduler(32, SIZE, 64, caching=True)
        found = []
        for each in texts:
            seq = request(1, 1)
            seq.tokens, seq.num_prompt_tokens = [*map(ord, each)], len(each)
            [step] = play(engine, {"A": seq})
            found.append((seq.num_cached_tokens // SIZE, step.num_tokens["A"]))
        return texts, found, len(engine.block_manager.hash_to_block)

    texts, found, num_names = draw.until(make, lambda made: 0 < made[1][1][0] < made[1][2][0])
    rows = [[name, *counts] for name, counts in zip("ABC", found, strict=True)]
    return Question(
        text(
            f"""
        Each letter is a token, and blocks hold {SIZE} tokens. The cache is empty, and the pool is large. Three prompts
        are computed one after another, each with `max_tokens=1`:

        {{rows}}

        (a) How many blocks of each are found, and how many tokens are computed? (b) How many hashes are in
        `hash_to_block` at the end?
        """,
            rows=table(["request", "prompt"], ([n, f"`{t}`"] for n, t in zip("ABC", texts, strict=True))),
        ),
        f"(a)\n\n{table(['request', 'blocks found', 'tokens computed'], rows)}\n\n(b) {num_names}",
        (
            (2, "(a) found: full blocks from the beginning on, as long as all tokens before are the same"),
            (2, "(a) computed: the rest of the prompt, including the tokens of a block that is not full"),
            (1, "(b) a hash for each full block that has a different beginning"),
        ),
    )


@asks(7, "trace")
def what_eviction_leaves(draw: Draw) -> Question:
    num_blocks = draw.number(8, 10)

    def make() -> tuple[list[int], list[list[int]], list[int], list[int], list[int]]:
        lengths = [SIZE * draw.number(2, 3), SIZE * draw.number(2, 3), draw.number(SIZE * 4 + 1, SIZE * 7)]
        manager = BlockManager(num_blocks, SIZE)
        seqs = [request(n, 9, first_id=1000 * i) for i, n in enumerate(lengths, 1)]
        tables = []
        for seq in seqs[:2]:
            manager.allocate_with_prefix(seq)
            seq.num_computed_tokens = len(seq.tokens)
            manager.register_prefix(seq)
            tables.append([*seq.block_table])
        for seq in seqs[:2]:
            manager.free(seq)
        queue = [*manager.free_blocks]
        manager.allocate_with_prefix(seqs[2])
        taken = [*seqs[2].block_table]
        manager.free(seqs[2])
        left = [request(n, 9, 1000 * i) for i, n in enumerate(lengths[:2], 1)]
        return lengths, tables, queue, taken, [len(manager.get_computed_blocks(seq).blocks) for seq in left]

    lengths, tables, queue, taken, left = draw.until(make, lambda made: 0 < made[4][0] < len(made[1][0]))
    return Question(
        text(f"""
        A pool has {num_blocks} blocks of {SIZE} tokens, prefix caching is on, and the free queue is 0 1 2 ...
        {num_blocks - 1}. A, with {lengths[0]} tokens, and B, with {lengths[1]} different tokens, are admitted in this
        order and computed; then A ends, then B. (a) Write down the free queue now. (b) C is admitted, with {lengths[2]}
        tokens that begin like neither of the two. Which blocks does it get? (c) How many blocks of A's prompt, and of
        B's, would be found after that?
        """),
        f"(a) {' '.join(map(str, queue))} (b) {listed(taken)} (c) {left[0]} of A's, {left[1]} of B's",
        (
            (2, f"(a) A has {tables[0]}, B {tables[1]}; cached blocks go to the tail, last block of a sequence first"),
            (1, f"(b) {len(taken)} blocks from the head"),
            (2, "(c) the deepest blocks of A go first, so a prompt's beginning is left, which can be found"),
        ),
    )
