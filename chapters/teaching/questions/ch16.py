"""Exam questions on chapter 16: a memory that does not grow."""

from typing import Any

from chapters.ch16_fixed_memory.notebook import Rule, read, write
from chapters.teaching.questions.bank import Draw, Question, asks, listed, model, one_step, request, table, text
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.snapshots.cache import SnapshotCache
from nanovllm.core.snapshots.policy import snapshot_positions


@asks(16, "trace")
def two_writes_and_a_read(draw: Draw) -> Question:
    def make() -> list[Any]:
        state = [[0.0, 0.0], [0.0, 0.0]]
        keys, writes = draw.some([[1.0, 0.0], [0.0, 1.0]], 2), list[Any]()
        for key in (keys[0], keys[draw.number(0, 1)]):
            value, beta, decay = (
                [float(n) for n in draw.numbers(2, 2, 8)],
                draw.one_of([0.5, 1.0]),
                draw.one_of([0.5, 1.0]),
            )
            state = write(state, key, value, Rule("the delta rule", True, beta), decay)
            writes.append((key, value, beta, decay, state))
        return writes

    writes = draw.until(make, lambda made: made[1][3] == 0.5 and {write[2] for write in made} == {0.5, 1.0})
    first, second = writes
    key = first[0]
    found = read(second[4], key)
    rows = [
        [n, f"[{listed_numbers(key)}]", f"[{listed_numbers(value)}]", beta, decay]
        for n, (key, value, beta, decay, _) in enumerate(writes, 1)
    ]
    return Question(
        text(
            """
        A state of two rows and two columns is all zeros. It is written twice by the delta rule; each time the decay
        comes first, then the correction:

        {rows}

        (a) Write down the state after each write. (b) What does a query equal to the first key read after that? (c) If
        values were simply added up instead of using the delta rule, what would be different when the same key is
        written a second time?
        """,
            rows=table(["write", "key", "value", "beta", "decay"], rows),
        ),
        f"(a) {shown(first[4])}, then {shown(second[4])} (b) [{listed_numbers(found)}] (c) The new value would be "
        "added to what is there; the delta rule writes only the difference, so that the key then reads the new value "
        "(if beta is 1).",
        (
            (1, "(a) after the first write: beta times the value, in the key's row"),
            (2, "(a) after the second: decayed, then beta times (value - what the key reads)"),
            (1, "(b) the row of the first key"),
            (1, "(c) the old value stays in the sum"),
        ),
    )


@asks(16, "trace")
def where_a_hybrid_begins(draw: Draw) -> Question:
    size = 16

    def make() -> tuple[int, int, list[int], int]:
        length = size * draw.number(34, 60) + draw.number(2, 14)
        shared = size * draw.number(18, length // size - 2) + draw.number(2, 14)
        manager = BlockManager(512, size, snapshots=SnapshotCache(max_running=2, max_snapshots=32))
        engine = Scheduler(manager, max_num_seqs=2, max_num_batched_tokens=4096, max_model_len=4096)
        wanted = [*snapshot_positions(length, 0, size)]
        starts = []
        for own in (1000, 5000):
            seq = request(shared, 1, first_id=100_000)
            seq.tokens += range(own, own + length - shared)
            seq.num_prompt_tokens = length
            engine.add(seq)
            one_step(engine, {"A": seq})
            starts.append(seq.num_cached_tokens)
        return length, shared, sorted({*wanted} - {0}), starts[1]

    length, shared, wanted, start = draw.until(make, lambda made: made[3] > 0 and len(made[2]) >= 3)
    num_blocks = (length - 1) // size
    return Question(
        text(f"""
        A hybrid model has blocks of {size} tokens and an empty cache. Snapshots are taken after these numbers of whole
        blocks: powers of two from 16 on; partial sums of the falling powers of two that add up to the prompt, as long
        as these powers are at least 16 (44 = 32 + 8 + 4, so 32); and the prompt's last whole block. A prompt of
        {length} tokens is computed. (a) After how many tokens are snapshots taken? (b) Another prompt has its first
        {shared} tokens in common with this one. How many of them are in blocks that are found, and after how many
        tokens does the model begin? (c) Why does it not begin after all the tokens that are found?
        """),
        f"(a) {listed(wanted)} (b) {shared // size * size} are found, it begins after {start}. (c) K and V of the "
        "others are there, but not the state after them: later tokens changed it, and no copy was kept.",
        (
            (2, f"(a) {num_blocks} whole blocks; each position is a number of blocks · {size}"),
            (1, f"(b) {shared // size} full blocks are found"),
            (1, f"(b) the deepest snapshot within them, {start}"),
            (1, "(c) a state cannot be cut back"),
        ),
    )


@asks(16, "compute")
def when_a_state_is_smaller(draw: Draw) -> Question:
    layers, kv_heads, head_dim = draw.one_of([12, 24, 32]), draw.one_of([2, 4]), draw.one_of([64, 128])
    heads = draw.one_of([8, 16])
    state = 3 * layers // 4 * heads * head_dim * head_dim * 4
    per_token = model(3 * layers // 4, heads, kv_heads, head_dim).kv_bytes_per_token(2)
    left = model(layers // 4, heads, kv_heads, head_dim).kv_bytes_per_token(2)
    return Question(
        text(f"""
        A hybrid model has {layers} layers. A quarter of them keep K and V ({kv_heads} KV heads of {head_dim} numbers,
        bf16). The others keep a state: {heads} heads with a matrix of {head_dim} x {head_dim} numbers in float32. (a)
        How many bytes do all states of one sequence take? (b) How many bytes per token would K and V of these layers
        take, if they kept K and V like the others? From how many tokens on are the states smaller? (c) How many bytes
        per token does the sequence still take besides its states?
        """),
        f"(a) {state:,} (b) {per_token:,}; from {state // per_token + 1:,} tokens on (c) {left:,}",
        (
            (1, f"(a) {3 * layers // 4} layers · {heads} · {head_dim} · {head_dim} · 4 bytes"),
            (
                2,
                f"(b) 2 · {3 * layers // 4} · {kv_heads} · {head_dim} · 2 bytes; {state:,} / {per_token:,} = "
                f"{state / per_token:g}",
            ),
            (1, f"(c) the {layers // 4} layers with K and V"),
        ),
    )


def listed_numbers(numbers: list[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def shown(state: list[list[float]]) -> str:
    return f"[{', '.join(f'[{listed_numbers(row)}]' for row in state)}]"
