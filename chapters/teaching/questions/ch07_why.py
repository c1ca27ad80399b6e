"""Exam questions on chapter 7, prefix caching: hashes, faults, reasons."""

from chapters.teaching.questions import faulty
from chapters.teaching.questions.bank import Draw, Question, asks, code_of, play, request, scheduler, text
from nanovllm.core.block_hash import extra_keys
from nanovllm.core.block_manager import BlockManager

SIZE = 4  # of the blocks of this file's questions


@asks(7, "compute")
def which_blocks_see_the_image(draw: Draw) -> Question:
    num_blocks, size = 8, 8
    start, length = draw.until(
        lambda: (draw.number(9, 25), draw.number(10, 20)), lambda s: s[0] % size and sum(s) % size and sum(s) < 48
    )
    touched = [i for i in range(num_blocks) if extra_keys(i, size, mm_spans=[(start, length, "one")])]  # pyrefly: ignore[bad-argument-type]
    first, last = touched[0], touched[-1]
    return Question(
        text(f"""
        Two prompts of {num_blocks * size} tokens have the same token ids. In both, positions {start} to {
            start + length - 1
        } are placeholders of an image, but the images differ. Blocks hold {size} tokens and are numbered from 0. (a)
        Which blocks have the image's hash among their extra keys? (b) The first prompt has been computed. How many
        tokens of the second are found? (c) Blocks {last + 1} to {num_blocks - 1} contain no part of the image. Why are
        they not found?
        """),
        f"(a) Blocks {first} to {last}. (b) {first * size} (c) A block's hash includes the hash of the "
        "block before. And their K and V were computed from vectors that had seen the other image.",
        (
            (1, f"(a) from {start} // {size} to {start + length - 1} // {size}"),
            (1, f"(b) {first} blocks of {size}"),
            (2, "(c) the chain of hashes, 1; K and V depend on all tokens before, 1"),
        ),
    )


@asks(7, "fault")
def hits_counted_twice(draw: Draw) -> Question:
    num_hits, others = draw.number(2, 4), draw.number(1, 3)
    manager = BlockManager(num_hits + 4, SIZE)
    seq = request(num_hits * SIZE, 9)
    manager.allocate_with_prefix(seq)
    seq.num_computed_tokens = len(seq.tokens)
    manager.register_prefix(seq)
    manager.free(seq)
    hog = request((4 - others) * SIZE, 9, first_id=5000)
    manager.allocate_with_prefix(hog)
    num_free = len(manager.free_blocks)
    fresh = draw.number(others + 1, num_free)
    asked = request((num_hits + fresh) * SIZE, 9)
    says, really = faulty.can_allocate(manager, asked), manager.can_allocate(asked)
    return Question(
        text(
            f"""
        This is a colleague's version of `can_allocate`:

        {{code}}

        In the pool, {num_free} blocks are in the free queue; {num_hits} of these have hashes, and hold the beginning of
        a prompt that needs {num_hits + fresh} blocks. (a) What does the code answer, and what is right? (b) The
        allocation goes ahead nevertheless: it removes the hits from the queue and then takes fresh blocks. At which
        fresh block does it fail? (c) What has the code forgotten?
        """,
            code=code_of(faulty.can_allocate),
        ),
        f"(a) It answers {says}, right is {really}. (b) At number {others + 1}: when the hits have left the queue, "
        f"{'one block is' if others == 1 else f'{others} blocks are'} in it. (c) Hits that nobody uses are in the "
        "free queue, too, and cannot be taken a second time: the queue must hold the fresh blocks *besides* them.",
        (
            (
                2,
                f"(a) {fresh} fresh blocks are compared with {num_free}; right would be {num_free} - {num_hits} = "
                f"{others}",
            ),
            (1, f"(b) number {others + 1}"),
            (2, "(c) unreferenced hits count as free blocks and as hits"),
        ),
    )


@asks(7, "explain", is_fixed=True)
def the_last_token_again(draw: Draw) -> Question:
    return Question(
        text("""
        All blocks of a prompt are found in the cache, and the prompt ends with its last block. (a) Why does the
        engine compute the last token nevertheless? (b) Why does it write no K and V for it, and how does the data
        plane learn that? (c) Two other requests use that last block at this moment. What could go wrong if it were
        written?
        """),
        text("""
        (a) To sample the next token it needs logits, and these are made from the last token's vector, which the cache
        does not have: it keeps K and V only. (b) They are there already. The chunk's `write_start` lies after the
        token, so its slot in `slot_mapping` is -1. (c) A shared block would be written while others read it. The
        numbers should be the same, but computed in a different batch they may differ in the last bits, for example on a
        GPU: the answers to others would depend on who else is there. And the rule that a block with a hash is never
        written makes copy-on-write unnecessary, so it must have no exception.
        """),
        (
            (2, "(a) logits need the vector of the last token"),
            (1, "(b) `write_start`, or slot -1"),
            (1, "(c) a cached or shared block is never written, with a possible consequence"),
        ),
    )


@asks(7, "compute")
def a_shared_beginning(draw: Draw) -> Question:
    size = 16

    def make() -> tuple[int, int, int, list[int]]:
        shared, own, num_users, counts = draw.number(70, 120), draw.number(10, 40), draw.number(3, 6), list[int]()
        engine = scheduler(256, size, 2048, caching=True)
        for user in range(num_users):
            seq = request(shared, 1)
            seq.tokens += range(10_000 * (user + 1), 10_000 * (user + 1) + own)
            seq.num_prompt_tokens = len(seq.tokens)
            counts += [step.num_tokens["A"] for step in play(engine, {"A": seq})]
        return shared, own, num_users, counts

    def is_good(made: tuple[int, int, int, list[int]]) -> bool:
        shared, own, num_users, counts = made
        percent = 100 * sum(counts) / (num_users * (shared + own))
        return 0 < shared % size < size - 1 and abs(percent % 1 - 0.5) > 0.1

    shared, own, num_users, counts = draw.until(make, is_good)
    without = num_users * (shared + own)
    saved = 1 - sum(counts) / without
    return Question(
        text(f"""
        {num_users} users ask one after another. Every prompt begins with the same {shared} tokens and has {own} of its
        own. Blocks hold {size} tokens. How many prompt tokens does the engine compute in all, with prefix caching and
        without? What share is saved, in whole percent? By how many tokens would the shared beginning have to grow for
        one more block to be found?
        """),
        f"{sum(counts)} with, {without} without; {saved:.0%} saved; {size - shared % size} tokens more.",
        (
            (2, f"the first {shared + own}, the others {counts[1]} each: {shared // size} full blocks are found"),
            (1, f"without: {num_users} · {shared + own} = {without}; saved: {saved:.0%}"),
            (1, f"to the next multiple of {size}"),
        ),
    )
