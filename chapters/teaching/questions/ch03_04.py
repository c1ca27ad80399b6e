"""Exam questions on chapters 3 and 4: keys and values, blocks and tables."""

from chapters.ch04_paged_attention.memories import ContiguousMemory
from chapters.teaching.questions import faulty
from chapters.teaching.questions.bank import Draw, Question, asks, code_of, listed, model, request, table, text
from nanovllm.core.block_manager import BlockManager


@asks(3, "trace")
def slots_of_a_chunk(draw: Draw) -> Question:
    size, block_table = draw.one_of([4, 8]), draw.some(range(12), 3)
    start = draw.number(size - 3, size - 1) + draw.one_of([0, size])
    end = start + draw.number(4, 5)
    slots = [block_table[at // size] * size + at % size for at in range(start, end)]
    return Question(
        text(f"""
        Blocks have {size} slots, and a sequence has the block table `{block_table}`. A step computes its positions
        {start} to {end - 1}, both included. Write down the `slot_mapping` of these rows.
        """),
        f"`{slots}`",
        (
            (2, f"which block: position // {size} is the place in the table"),
            (2, f"which slot: block · {size} + position % {size}, for all {end - start} rows"),
        ),
    )


@asks(3, "compute")
def size_of_the_pool(draw: Draw) -> Question:
    layers, kv_heads, head_dim = draw.one_of([12, 16, 24, 30]), draw.one_of([2, 3, 4]), draw.one_of([32, 64])
    num_blocks, size = draw.one_of([100, 200, 500]), draw.one_of([8, 16])
    shape = f"[{num_blocks}, {size}, {kv_heads}, {head_dim}]"
    num_bytes = num_blocks * size * model(layers, 2 * kv_heads, kv_heads, head_dim).kv_bytes_per_token(2)
    return Question(
        text(f"""
        A pool has {num_blocks} blocks of {size} tokens, for a model with {layers} layers, {2 * kv_heads} query heads,
        {kv_heads} KV heads and a head size of {head_dim}, in bf16. What is the shape of the tensor with the keys of one
        layer? How many megabytes (10^6 bytes) does the whole pool take, to one decimal?
        """),
        f"`{shape}`, {num_bytes / 1e6:.1f} MB",
        (
            (2, f"the shape `[num_blocks, block_size, num_kv_heads, head_dim]`: `{shape}`"),
            (2, f"{num_blocks} · {size} · {kv_heads} · {head_dim} numbers · 2 bytes · 2 (K and V) · {layers} layers"),
        ),
    )


@asks(3, "explain", is_fixed=True)
def drop_the_beginning(draw: Draw) -> Question:
    return Question(
        text("""
        A conversation has become too long. A colleague wants to drop its first 16 tokens and to keep the K and V of all
        the others unchanged, because "with rotary embeddings only distances count". (a) In which layer are the kept K
        and V still right for the shorter text, and why there? (b) Why not in the other layers?
        """),
        text("""
        (a) In the first layer. Its keys and values are made from embeddings, which depend on the token alone; the keys
        are rotated by old positions, but all by the same amount too far, and so are the later queries if positions go
        on counting from there. Dot products depend only on distances. (b) In later layers K and V are made from vectors
        into which attention has mixed the values of the dropped tokens. Computed again without these tokens, they would
        be different.
        """),
        (
            (1, "(a) the first layer"),
            (1, "(a) embeddings know nothing of other tokens, and distances have not changed"),
            (2, "(b) vectors after the first attention contain what was read from the dropped tokens"),
        ),
    )


@asks(4, "trace")
def tables_and_queue(draw: Draw) -> Question:
    size = 4
    a, b, grown, c = draw.until(
        lambda: (draw.number(5, 11), draw.number(3, 8), draw.number(2, 5), draw.number(9, 12)),
        lambda n: -(-(n[0] + n[2]) // size) > -(-n[0] // size),
    )
    manager = BlockManager(8, size, enable_prefix_caching=False)
    seqs = {name: request(length, 9) for name, length in zip("ABC", (a, b, c), strict=True)}
    tables = []
    for name in "AB":
        manager.allocate_with_prefix(seqs[name])
        tables.append(f"{name} has `{seqs[name].block_table}`")
    seqs["A"].num_computed_tokens = a
    manager.append_slots(seqs["A"], grown)
    tables.append(f"then A has `{seqs['A'].block_table}`")
    manager.free(seqs["A"])
    queue = [*manager.free_blocks]
    manager.allocate_with_prefix(seqs["C"])
    tables.append(f"C has `{seqs['C'].block_table}`")
    return Question(
        text(f"""
        A pool has 8 blocks of {size} slots, the free queue is 0 1 2 3 4 5 6 7, and prefix caching is off. In this
        order: A is admitted with a prompt of {a} tokens; B with {b}; A computes its prompt and then {grown} more
        tokens, for which its table grows; A ends; C is admitted with a prompt of {c} tokens. Give the tables of A and B
        at their admission, the table of A after it has grown, the free queue after A has ended, and the table of C.
        """),
        f"{'; '.join(tables[:3])}; the queue is {' '.join(map(str, queue))}; {tables[3]}.",
        (
            (1, "tables of A and B: blocks are taken from the head"),
            (1, f"A has room in its last block before it takes another: {a} + {grown} = {a + grown} tokens"),
            (2, "the queue: A's blocks come back last block first, and a block without a hash goes to the head"),
            (1, "C takes the blocks that are then at the head"),
        ),
    )


@asks(4, "compute")
def empty_slots(draw: Draw) -> Question:
    longest, size = draw.one_of([32, 40, 48]), 8
    stored = draw.until(lambda: draw.some(range(5, longest - 4), 3), lambda s: all(n % size for n in s))
    memory, manager = ContiguousMemory(256), BlockManager(32, size, enable_prefix_caching=False)
    for name, num in zip("ABC", stored, strict=True):
        memory.reserve(name, longest)
        manager.allocate_with_prefix(request(num, 9))
    reserved = memory.num_slots - memory.num_free - sum(stored)
    paged = (32 - len(manager.free_blocks)) * size - sum(stored)
    return Question(
        text(f"""
        Three sequences have stored {listed(stored)} tokens. A contiguous memory reserves `max_model_len` = {longest}
        slots for each; a paged one has blocks of {size} slots. In each of the two memories, how many slots are taken
        but empty? At most how many can be empty in the paged one, however long the three sequences are?
        """),
        f"Contiguous: {reserved}. Paged: {paged}. At most {3 * (size - 1)}.",
        (
            (1, f"contiguous: 3 · {longest} - {sum(stored)} = {reserved}"),
            (2, f"paged: what is left in each last block, {' + '.join(str(-n % size) for n in stored)} = {paged}"),
            (1, f"only last blocks are not full, and each holds at least one token: 3 · {size - 1}"),
        ),
    )


@asks(4, "fault")
def a_block_too_many(draw: Draw) -> Question:
    size = draw.one_of([4, 8, 16])
    lengths = draw.until(
        lambda: [size * draw.number(1, 4) - draw.one_of([0, 0, 1, 2]) for _ in range(5)],
        lambda found: len(set(found)) == 5 and 2 <= sum(n % size == 0 for n in found) <= 3,
    )
    manager = BlockManager(1, size)
    too_many = [n for n in lengths if faulty.num_blocks_for(n, size) > manager.num_blocks_for(n)]
    return Question(
        text(
            f"""
        This function should say how many blocks a sequence needs:

        {{code}}

        Blocks hold {size} tokens. (a) For which of the lengths {listed(lengths)} is the answer wrong, and what does the
        function say for the first of these? (b) No answer becomes wrong because of this. What does a user notice
        nevertheless? (c) Correct the line.
        """,
            code=code_of(faulty.num_blocks_for),
        ),
        f"(a) For {listed(too_many)}; for {too_many[0]} it says {faulty.num_blocks_for(too_many[0], size)} instead "
        f"of {manager.num_blocks_for(too_many[0])}. (b) Fewer sequences fit: requests wait, or are preempted, while "
        "blocks hold nothing. (c) `-(-num_tokens // block_size)`, or `(num_tokens + block_size - 1) // block_size`",
        (
            (2, f"(a) wrong where the last block is full: multiples of {size}"),
            (1, "(b) blocks are taken that nobody needs yet, so the pool is empty sooner"),
            (1, "(c) rounds up"),
        ),
    )


@asks(4, "decide")
def which_block_size(draw: Draw) -> Question:
    shared = draw.number(9, 15)
    lengths = draw.until(lambda: draw.some(range(18, 60), 3), lambda found: all(n % 4 and n % 16 for n in found))
    managers = [BlockManager(64, size) for size in (4, 16)]
    counts = [[manager.num_blocks_for(n) for n in lengths] for manager in managers]
    empty = [sum(count) * m.block_size - sum(lengths) for m, count in zip(managers, counts, strict=True)]
    rows = [[m.block_size, listed(count), e] for m, count, e in zip(managers, counts, empty, strict=True)]
    found = []
    for manager in managers:  # two prompts that begin alike
        first, second = request(shared + 8, 9), request(shared, 9)
        second.tokens += list(range(900, 908))
        manager.allocate_with_prefix(first)
        first.num_computed_tokens = len(first.tokens)
        manager.register_prefix(first)
        manager.allocate_with_prefix(second)
        found.append(second.num_cached_tokens)
    return Question(
        text(f"""
        A service has sequences of {listed(lengths)} tokens. (a) For blocks of 4 and of 16 tokens, say how many blocks
        each of the three has in its table, and how many slots are empty in all. (b) All prompts begin with the same
        {shared} tokens. How many of them does a new request find in the cache, with each of the two sizes? (c) Which of
        the two sizes would you choose here, and what is an argument for the other one?
        """),
        f"(a)\n\n{table(['block size', 'blocks', 'empty slots'], rows)}\n\n(b) {found[0]} with blocks of 4, "
        f"{found[1]} with blocks of 16. (c) 4: fewer empty slots, and more of the common beginning is found. The "
        "argument for 16 is that tables are a quarter as long: fewer hashes to compute, fewer numbers to hand to the "
        "kernel, longer stretches to read.",
        (
            (2, "(a) half a point for each cell of blocks and of empty slots, rounded down in all"),
            (1, "(b) only full blocks are found"),
            (2, "(c) a reasoned choice that uses (a) and (b), 1; one reason for the other size, 1"),
        ),
    )
