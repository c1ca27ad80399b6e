"""Grading of the exercises of chapter 10."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from chapters.ch10_optimization_stack import solution
from chapters.ch10_optimization_stack.tiles import TILE, KeyReader, Memory, paged_attention_by
from chapters.expect import read_again
from chapters.grading import Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import LLM
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch
from nanovllm.worker.cuda.graphs import LADDER
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.model import Decoder

OUR_FORWARD = Decoder.forward
INF = torch.inf
TOLERANCE = 1e-3


class Float32Bench(Bench):
    """Plain PyTorch in float32, where rounding does not change a token; prompts are computed in chunks."""

    @cached_property
    def llm(self) -> LLM:
        sizes = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "block_size": 16}
        return LLM(self.model, dtype="float32", enforce_eager=True, max_num_batched_tokens=12, **sizes)


@cache
def float32_bench(model: str) -> Float32Bench:
    bench = Float32Bench(model)
    with replaced(Decoder, "forward", OUR_FORWARD):  # what is expected comes without the student's code
        _ = bench.expected_tokens
    return bench


@contextmanager
def engine_with(bench: Bench, **kernels: Any) -> Iterator[Bench]:
    """The float32 engine with other kernels."""
    other = float32_bench(bench.model)
    runner = other.llm.engine.model_runner
    try:
        with replaced(runner, "kernels", replace(TORCH_KERNELS, **kernels)):
            yield other
    finally:
        other.clean()


def close(a: Any, b: Tensor) -> bool:
    return isinstance(a, Tensor) and a.shape == b.shape and torch.allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE)


def difference(expected: Tensor, got: Any) -> dict[str, str]:
    """expected and got of a report: some numbers of each, from the first on that differs."""
    if not isinstance(got, Tensor):
        return {"expected": f"a tensor of shape {list(expected.shape)}", "got": repr(got)}
    if got.shape != expected.shape:
        return {"expected": f"shape {list(expected.shape)}", "got": f"shape {list(got.shape)}"}
    differs = ~torch.isclose(got.to(expected.dtype), expected, atol=TOLERANCE, rtol=TOLERANCE)
    first = int(differs.flatten().nonzero()[0])
    place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(first), expected.shape))

    def numbers(x: Tensor) -> str:
        found = [f"{value:.4f}" for value in x.flatten()[first : first + 6].tolist()]
        return f"{', '.join(found)}{', ...' if x.numel() > first + 6 else ''} (from [{place}] of {list(x.shape)})"

    return {"expected": numbers(expected), "got": numbers(got)}


# -- fold -------------------------------------------------------------------------------------------------------------

Fold = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
State = tuple[Tensor, Tensor, Tensor]
STATE = ("running_max", "running_sum", "acc")


@contextmanager
def use_fold(function: Fold) -> Iterator[None]:
    """Our attend() takes in its tiles with the student's fold()."""
    with replaced(solution, "fold", function):
        yield


def fresh(heads: int, rows: int, head_dim: int) -> State:
    return torch.full((heads, rows), -INF), torch.zeros(heads, rows), torch.zeros(heads, rows, head_dim)


def exact(scores: Tensor, values: Tensor) -> State:
    """What the state means, from all scores at once, in float64."""
    largest = scores.amax(-1)
    weights = (scores.double() - largest.masked_fill(largest == -INF, 0.0)[..., None]).exp()
    return largest, weights.sum(-1).float(), (weights @ values.double()).float()


def compare_fold(function: Fold, scores: Tensor, values: Tensor, sizes: list[int], what: str) -> None:
    """Fold tiles of these sizes one by one. Raises Wrong after the first tile that goes wrong."""
    heads, rows, _ = scores.shape
    state, at = fresh(heads, rows, values.shape[-1]), 0
    for number, size in enumerate(sizes, start=1):
        given = (*state, scores[..., at : at + size], values[:, at : at + size])
        copies = tuple(x.clone() for x in given)
        got = function(*copies)
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise Wrong("return three tensors: running_max, running_sum, acc", got=repr(got))
        for name, before, after in zip(
            ("running_max", "running_sum", "acc", "scores", "values"), given, copies, strict=True
        ):
            if not torch.equal(before, after):
                raise Wrong(f"{name}, which you were given, has been changed: return new tensors")
        at += size
        expected = exact(scores[..., :at], values[:, :at])
        where = f"{what}, after tile {number} of {len(sizes)}"
        for name, e, g in zip(STATE, expected, got, strict=True):
            if not close(g, e):
                raise Wrong(f"{name} ({where}): {_why_fold(name, given, expected, g)}", **difference(e, g))
        state = expected


def _why_fold(name: str, given: tuple[Tensor, ...], expected: State, got: Any) -> str:
    """The likely mistake. given: what the function was given; expected: the state afterwards."""
    running_max, running_sum, acc, scores, values = given
    new_max = expected[0]
    if not isinstance(got, Tensor) or got.shape != dict(zip(STATE, expected, strict=True))[name].shape:
        return "a tensor of another shape is expected"
    if name == "running_max":
        if close(got, scores.amax(-1)):
            return "that is the largest of the new scores; an earlier one may be larger"
        return "the largest score so far, of the keys before and of the new ones"
    if not got.isfinite().all():
        if new_max.isfinite().all() and new_max.abs().max() > 80:
            return "exp() of a large number is inf: subtract the new maximum from every score before exp()"
        if (new_max == -INF).any() and got[new_max == -INF].isnan().any():
            return "a row that has seen no key yet has running_max -inf, and -inf - (-inf) is nan"
        if (scores.amax(-1) == -INF).any() and got[scores.amax(-1) == -INF].isnan().any():
            return "a row that sees none of the new keys got nan: its largest score stays what it was, and is not -inf"
        if ((running_max == -INF) & (new_max != -INF)).any() and got[
            (running_max == -INF) & (new_max != -INF)
        ].isnan().any():
            return (
                "at a row's first key the old running_max is -inf and the new one is not; exp(-inf - new) is 0, not nan"
            )
        return "exp() of a large number is inf: subtract the new maximum from every score before exp()"
    base = new_max.masked_fill(new_max == -INF, 0.0)
    weights = (scores - base[..., None]).exp()
    rescale = (running_max - base).exp()
    olds = {"running_sum": running_sum, "acc": acc}
    news = {"running_sum": weights.sum(-1), "acc": weights @ values}
    old, new = olds[name], news[name]

    def times(x: Tensor, factor: Tensor) -> Tensor:
        return x * (factor[..., None] if name == "acc" else factor)

    has_moved = bool((rescale[running_max != -INF] < 1).any())
    if has_moved and close(got, old + new):
        return (
            "what was summed up before belongs to the old maximum. When that moves, it has to be multiplied by "
            "exp(old maximum - new maximum)"
        )
    if close(got, new):
        return "the keys before are forgotten; the new ones are added to them"
    if (rescale > 0).any() and close(got, times(old, (base - running_max).exp().nan_to_num(0, 0, 0)) + new):
        return (
            "it has been multiplied by exp(new maximum - old maximum); it must shrink: exp(old maximum - new maximum)"
        )
    if name == "acc" and close(got, expected[2] / expected[1][..., None]):
        return "it has been divided by running_sum already; the caller does that once, at the end"
    if has_moved and close(got, times(old + new, rescale)):
        return "only what was there before shrinks; the new keys are relative to the new maximum already"
    own = (scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0, 0, 0)
    own_new = own.sum(-1) if name == "running_sum" else own @ values
    if close(got, times(old, rescale) + own_new) or close(got, old + own_new):
        return (
            "the new scores count from the new running_max, which may be an earlier key's, not from their own maximum"
        )
    raw = scores.exp().sum(-1) if name == "running_sum" else scores.exp() @ values
    if close(got, old + raw) or close(got, times(old, rescale) + raw):
        return "subtract the new maximum from every score before exp(): exp(score - running_max)"
    return "the sum over all keys so far of exp(score - running_max)" + (" times value" if name == "acc" else "")


def example(heads: int, rows: int, count: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(heads, rows, count, generator=generator)
    return scores, torch.randn(heads, count, head_dim, generator=generator)


def check_one_tile(function: Fold, bench: Bench) -> None:
    """One tile: the softmax with its maximum subtracted"""
    scores = torch.tensor([[[0.0, 1.0, 2.0]]])
    compare_fold(function, scores, torch.tensor([[[10.0], [20.0], [30.0]]]), [3], "scores 0, 1, 2, values 10, 20, 30")


def check_top_moves(function: Fold, bench: Bench) -> None:
    """The maximum moves: what was summed up before shrinks"""
    values = torch.tensor([[[10.0], [20.0], [30.0]]])
    compare_fold(function, torch.tensor([[[1.0, 3.0, 1.0]]]), values, [1, 2], "scores 1, then 3 and 1")


def check_top_stays(function: Fold, bench: Bench) -> None:
    """The maximum stays where it was"""
    values = torch.tensor([[[10.0], [20.0], [30.0]]])
    compare_fold(function, torch.tensor([[[3.0, 1.0, 2.0]]]), values, [1, 1, 1], "scores 3, then 1, then 2")


def check_large_scores(function: Fold, bench: Bench) -> None:
    """Scores of 1e4 and of -1e4"""
    for sign in (1, -1):
        scores = sign * torch.tensor([[[1e4, 1e4 - 2, 1e4 - 1, 1e4 + 1]]])
        values = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
        compare_fold(function, scores, values, [2, 2], f"scores near {sign * 10_000:,}")


def check_masked(function: Fold, bench: Bench) -> None:
    """Rows that see none of the new keys"""
    scores = torch.tensor(
        [[[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, -INF, -INF], [-INF, -INF, 3.0, 4.0], [1.0, -INF, -INF, 4.0]]]
    )
    values = torch.tensor([[[1.0], [2.0], [3.0], [4.0]]])
    compare_fold(function, scores, values, [2, 2], "row 1 sees nothing of tile 2, row 2 nothing of tile 1")


def check_random_tiles(function: Fold, bench: Bench) -> None:
    """100 random scores in random tiles, three heads"""
    rng = random.Random(0)
    for seed in range(20):
        scores, values = example(3, 4, 100, 8, seed)
        sizes: list[int] = []
        while sum(sizes) < 100:
            sizes.append(min(rng.randint(1, 40), 100 - sum(sizes)))
        compare_fold(function, scores, values, sizes, f"tiles of {sizes}")


def check_fold_generates(function: Fold, bench: Bench) -> None:
    """The model gives the same tokens (float32)"""
    with engine_with(bench, paged_attention=paged_attention_by(solution.attend)) as other:
        other.same_tokens()


# -- attend -----------------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, list[int], int, KeyReader], Tensor]


@contextmanager
def use_attend(function: Attend) -> Iterator[None]:
    yield  # the checks call it, and the last one puts it into an engine


class StrictReader(KeyReader):
    """Every token once, TILE at most at a time, nothing else."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor, block_table: list[int], num_keys: int) -> None:
        super().__init__(k_cache, v_cache)
        size = self.block_size
        slots = [block * size + offset for block in block_table for offset in range(size)]
        self._token_of = {slot: token for token, slot in reversed(list(enumerate(slots)))}
        self._num_keys, self._seen = num_keys, set[int]()

    def read(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        slots = [int(slot) for slot in slots]
        if len(slots) > TILE:
            raise Wrong(f"one call of read asked for {len(slots)} slots; a tile has {TILE} at most", got=_short(slots))
        for slot in slots:
            token = self._token_of.get(slot)
            if token is None:
                if slot < self._num_keys:
                    hint = "that looks like a token's number; its slot is found through block_table"
                else:
                    hint = (
                        "none of the sequence's blocks has this slot: block_table[i // block_size] * block_size + ..."
                    )
                raise Wrong(
                    f"slot {slot} was read. {hint}", expected=f"slots of blocks {self._blocks()}", got=_short(slots)
                )
            if token >= self._num_keys:
                hint = (
                    f"the slot of token {token} was read, and there are {self._num_keys} tokens: the last tile is short"
                )
                raise Wrong(hint, got=_short(slots))
            if token in self._seen:
                raise Wrong(f"token {token} was read twice; once is enough with an accumulator", got=_short(slots))
            self._seen.add(token)
        return super().read(slots)

    def _blocks(self) -> list[int]:
        return list(dict.fromkeys(slot // self.block_size for slot in self._token_of))

    def finish(self) -> None:
        missing = [token for token in range(self._num_keys) if token not in self._seen]
        if missing:
            raise Wrong(
                f"of {self._num_keys} tokens some were never read",
                expected="all of them",
                got=f"without {_short(missing)}",
            )


def _short(numbers: list[int]) -> str:
    return f"{numbers[:8]}"[:-1] + (", ...]" if len(numbers) > 8 else "]")


@cache
def case(rows: int, num_keys: int, num_heads: int, num_kv_heads: int, block_size: int = 4, size: float = 1.0) -> Any:
    """(q, k_cache, v_cache, block_table): blocks out of order, one more than needed; rubbish in the free slots."""
    generator = torch.Generator().manual_seed(rows * 1000 + num_keys)
    num_blocks = -(-num_keys // block_size)
    table = torch.randperm(2 * num_blocks + 2, generator=generator)[: num_blocks + 1].tolist()
    caches = torch.full((2, 2 * num_blocks + 2, block_size, num_kv_heads, 16), 1e6)
    kv = size * torch.randn(2, num_keys, num_kv_heads, 16, generator=generator)
    for token in range(num_keys):
        caches[:, table[token // block_size], token % block_size] = kv[:, token]
    q = size * torch.randn(rows, num_heads, 16, generator=generator)
    return q, kv[0], kv[1], caches[0], caches[1], table


def dense(
    q: Tensor, k: Tensor, v: Tensor, *, ahead: int | None = 0, spread: bool = False, scale: float = 1.0
) -> Tensor:
    """All at once, in float64, or with a mistake: row i sees `ahead` keys more (None: every key), heads shared
    in another order (spread), another scale."""
    rows, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    k, v = ((x.repeat(1, group, 1) if spread else x.repeat_interleave(group, 1)).double() for x in (k, v))
    scores = torch.einsum("rhd,nhd->hrn", q.double() * scale * head_dim**-0.5, k)
    if ahead is not None:
        seen = torch.arange(len(k) - rows + 1, len(k) + 1)[:, None] + ahead
        scores = scores.masked_fill(torch.arange(len(k)) >= seen, -INF)
    return torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v).float()


def compare_attend(function: Attend, what: str, *sizes: Any, **more: Any) -> None:
    q, k, v, k_cache, v_cache, table = case(*sizes, **more)
    num_keys = len(k)
    reader, copy, given = StrictReader(k_cache, v_cache, table, num_keys), q.clone(), list(table)
    got = function(copy, given, num_keys, reader)
    reader.finish()
    if not torch.equal(copy, q) or given != table:
        raise Wrong(f"{what}: q or block_table, which you were given, has been changed")
    expected = dense(q, k, v)
    if close(got, expected):
        return
    if not isinstance(got, Tensor) or got.shape != q.shape:
        raise Wrong(f"{what}: a tensor of q's shape is expected", **difference(expected, got))
    raise Wrong(f"{what}: {_why_attend(q, k, v, got)}", **difference(expected, got))


def _why_attend(q: Tensor, k: Tensor, v: Tensor, got: Tensor) -> str:
    rows, num_keys = len(q), len(k)
    variants = {
        "no scaling: scores are q·k * head_dim ** -0.5": partial(dense, scale=q.shape[2] ** 0.5),
        "scaled twice: once by head_dim ** -0.5 is enough": partial(dense, scale=q.shape[2] ** -0.5),
        "rows see keys behind their own: causal masking is missing": partial(dense, ahead=None),
        "every row sees one key too many": partial(dense, ahead=1),
        "every row sees one key too few; a token attends to itself, too": partial(dense, ahead=-1),
        "row i stands at position num_keys - rows + i, not at position i": partial(dense, ahead=rows - num_keys),
        "query head h uses KV head h // group, and you used h % num_kv_heads": partial(dense, spread=True),
    }
    for hint, variant in variants.items():
        if close(got.nan_to_num(7.0), variant(q, k, v).nan_to_num(7.0)):
            return hint
    if not got.isfinite().all():
        return "nan or inf: does exp() overflow, or does a row see no key?"
    if q.shape[1] > k.shape[1] and rows > 1:
        return (
            "the rows of the query heads that share a KV head are folded together: the mask, and the way back to "
            "[rows, heads], must keep the order in which you put them"
        )
    if q.shape[1] > k.shape[1]:
        return "query heads h * group to (h + 1) * group - 1 share KV head h, in q and in the result alike"
    if num_keys > TILE:
        whole = num_keys // TILE * TILE
        if rows == 1 and close(got, dense(q, k[:whole], v[:whole])):
            return f"the last {num_keys - whole} keys, a tile that is not full, are missing"
        if rows == 1 and close(got, dense(q, k[-(num_keys - whole or TILE) :], v[-(num_keys - whole or TILE) :])):
            return "only the last tile counts: tiles have to be folded together"
        return "right within one tile, not over several: check what happens to the running numbers between two tiles"
    return "softmax(q·k * head_dim ** -0.5) v, over the keys that the row sees"


def check_decode(function: Attend, bench: Bench) -> None:
    """A decode with 7 keys in two blocks, one head"""
    compare_attend(function, "1 row, 7 keys, blocks of 4", 1, 7, 1, 1)


def check_tiles(function: Attend, bench: Bench) -> None:
    """A decode over several tiles, full and not"""
    for num_keys in (TILE, 3 * TILE, 2 * TILE + 5):
        compare_attend(function, f"1 row, {num_keys} keys, tiles of {TILE}", 1, num_keys, 1, 1)


def check_causal(function: Attend, bench: Bench) -> None:
    """Several rows: each sees its own key and those before"""
    for rows, num_keys in ((5, 5), (6, 20), (TILE + 8, TILE + 8), (5, TILE + 2)):
        compare_attend(function, f"{rows} rows, {num_keys} keys", rows, num_keys, 1, 1)


def check_groups(function: Attend, bench: Bench) -> None:
    """Query heads that share KV heads"""
    compare_attend(function, "6 query heads, 2 KV heads", 1, 9, 6, 2)
    compare_attend(function, "3 query heads, 3 KV heads", 4, 50, 3, 3)
    compare_attend(function, "9 query heads, 3 KV heads", 7, 75, 9, 3)


def check_blocks(function: Attend, bench: Bench) -> None:
    """Blocks smaller and larger than a tile, and as large"""
    for block_size in (1, TILE, 5 * TILE, 12):
        what = f"3 rows, 70 keys, blocks of {block_size}"
        compare_attend(function, what, 3, 70, 4, 2, block_size=block_size)


@read_again("The idea: a softmax that never sees the whole row")
def check_large(function: Attend, bench: Bench) -> None:
    """Scores in the hundreds"""
    compare_attend(function, "4 rows, 90 keys, scores in the hundreds", 4, 90, 4, 2, size=12.0)


def check_memory(function: Attend, bench: Bench) -> None:
    """What it holds does not grow with the number of keys"""
    peaks = {}
    for num_keys in (4 * TILE, 4 * TILE, 64 * TILE):  # the first run pays for what is made once
        q, _, _, k_cache, v_cache, table = case(2, num_keys, 4, 2, block_size=16)
        with Memory() as memory:
            function(q, table, num_keys, KeyReader(k_cache, v_cache))
        peaks[num_keys] = memory.peak_bytes
    few_bytes, many_bytes = peaks.values()
    # Numbers of the positions may grow, 8 bytes a key; scores, K and V may not.
    if many_bytes > few_bytes + 8 * 64 * TILE + 1024:
        few_keys, many_keys = peaks
        hint = "what you hold grows with the number of keys: fold each tile into the running numbers, and let it go"
        got = f"{few_bytes:,} bytes with {few_keys} keys, {many_bytes:,} with {many_keys:,}"
        raise Wrong(hint, expected="about the same with few keys and with many", got=got)


def check_attend_generates(function: Attend, bench: Bench) -> None:
    """The model gives the same tokens (float32), prompts cut into chunks of 12"""
    with engine_with(bench, paged_attention=paged_attention_by(function)) as other:
        other.same_tokens()


# -- pad_decode -------------------------------------------------------------------------------------------------------

Pad = Callable[[Batch, int], Batch]


@contextmanager
def use_pad(function: Pad) -> Iterator[None]:
    """Every decode step is padded to the next size of the graphs' ladder; the rows behind the real ones are dropped."""

    def forward(model: Decoder, batch: Batch, *args: Any) -> Tensor:
        num_seqs = len(batch.seqlens_k)
        if batch.max_query_len > 1:
            return OUR_FORWARD(model, batch, *args)
        size = next(size for size in LADDER if size >= num_seqs)
        device = batch.input_ids.device
        values = [getattr(batch, field.name) for field in fields(Batch)]
        on_cpu: Any = [x.cpu() if isinstance(x, Tensor) else x for x in values]
        batch = Batch(*on_cpu)
        padded = function(batch, size)
        compare_pad(batch, size, padded, f"{num_seqs} decodes padded to {size}")
        return OUR_FORWARD(model, padded.to(device), *args)[batch.logits_rows.to(device)]

    with replaced(Decoder, "forward", forward):
        yield


def decodes(*num_tokens: int, computed: bool = True) -> Batch:
    """A real batch: each sequence computes its last token."""
    chunks, next_block = [], 3
    for n in num_tokens:
        seq = Sequence(list(range(100, 100 + n)))
        num_blocks = -(-n // 4)
        seq.block_table = list(range(next_block, next_block + num_blocks))
        next_block += num_blocks
        chunks.append(ScheduledChunk(seq, n - 1, n, n - 1 if computed else n))
    return Batch.from_scheduler_output(SchedulerOutput(chunks, [], len(chunks)), 4)


HARMLESS = {
    "input_ids": (0, "the token id of a row that pads is 0"),
    "positions": (0, "the position of a row that pads is 0"),
    "slot_mapping": (-1, "a row that pads must not write: slot -1. Any other slot may hold somebody's K and V"),
    "seqlens_k": (1, "a row that pads attends to exactly one key: a softmax over no key is nan, more keys are wasted"),
    "block_tables": (0, "the table of a row that pads has block 0 everywhere"),
}


def compare_pad(batch: Batch, size: int, got: Batch, what: str) -> None:
    num_seqs, width = batch.block_tables.shape
    if not isinstance(got, Batch):
        raise Wrong("return a Batch", got=repr(got)[:80])
    for name, (value, why) in HARMLESS.items():
        ours, theirs = getattr(batch, name), getattr(got, name)
        shape = (size, width) if name == "block_tables" else (size,)
        expected = torch.cat([ours, ours.new_full((size - num_seqs, *shape[1:]), value)])
        _compare_field(name, expected, theirs, num_seqs, why, what)
    cu_seqlens_q = torch.arange(size + 1, dtype=torch.int32)
    why = "every sequence has one row, the padding ones too: 0, 1, 2, ... up to size"
    _compare_field("cu_seqlens_q", cu_seqlens_q, got.cu_seqlens_q, num_seqs + 1, why, what)
    why = "a graph computes the logits of all its rows, 0 to size - 1; the caller drops the rest"
    _compare_field("logits_rows", torch.arange(size), got.logits_rows, num_seqs, why, what)
    for name in ("max_query_len", "max_key_len"):
        if getattr(got, name) != getattr(batch, name):
            raise Wrong(f"{name} ({what}) keeps its value", expected=getattr(batch, name), got=getattr(got, name))


def _compare_field(name: str, expected: Tensor, got: Any, num_real: int, why: str, what: str) -> None:
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        shape = list(got.shape) if isinstance(got, Tensor) else repr(got)
        raise Wrong(f"{name} ({what}) has the wrong shape: {why}", expected=list(expected.shape), got=shape)
    if got.dtype != expected.dtype:
        raise Wrong(f"{name} ({what}) has another dtype than before", expected=expected.dtype, got=got.dtype)
    if not torch.equal(got[:num_real], expected[:num_real]):
        hint = f"{name} ({what}): the first {num_real} entries are those of the real sequences, in their order"
        raise Wrong(hint, expected=expected.tolist(), got=got.tolist())
    if not torch.equal(got, expected):
        raise Wrong(f"{name} ({what}): {why}", expected=expected.tolist(), got=got.tolist())


def check_pads(function: Pad, bench: Bench) -> None:
    """Three decodes, a graph of four"""
    compare_pad(decodes(7, 2, 13), 4, function(decodes(7, 2, 13), 4), "3 decodes padded to 4")


def check_fits(function: Pad, bench: Bench) -> None:
    """Nothing to pad, and much to pad"""
    for num_tokens, size in (((5, 9), 2), ((3,), 1), ((30,), 24)):
        got = function(decodes(*num_tokens), size)
        compare_pad(decodes(*num_tokens), size, got, f"{len(num_tokens)} decodes padded to {size}")


def check_cached(function: Pad, bench: Bench) -> None:
    """A sequence that writes nothing itself stays as it is"""
    batch, twin = decodes(8, 4, 6, computed=False), decodes(8, 4, 6, computed=False)
    compare_pad(twin, 8, function(batch, 8), "3 decodes, found in the cache, padded to 8")


def check_batch_stays(function: Pad, bench: Bench) -> None:
    """The batch that was given stays as it was"""
    batch, twin = decodes(7, 2, 13), decodes(7, 2, 13)
    function(batch, 8)
    for field in fields(Batch):
        before, after = getattr(twin, field.name), getattr(batch, field.name)
        if not (torch.equal(before, after) if isinstance(before, Tensor) else before == after):
            raise Wrong(f"{field.name} of the batch that you were given has been changed", expected=before, got=after)


def check_pad_generates(function: Pad, bench: Bench) -> None:
    """The model gives the same tokens (float32), each decode step padded to 1, 2, 4 or 8"""
    with engine_with(bench) as other:
        other.same_tokens()


TASKS = [
    Task(
        "fold",
        "The idea: a softmax that never sees the whole row",
        use_fold,
        (
            check_one_tile,
            check_top_moves,
            check_top_stays,
            check_large_scores,
            check_masked,
            check_random_tiles,
            check_fold_generates,
        ),
    ),
    Task(
        "attend",
        "Tiles, step by step",
        use_attend,
        (
            check_decode,
            check_tiles,
            check_causal,
            check_groups,
            check_blocks,
            check_large,
            check_memory,
            check_attend_generates,
        ),
    ),
    Task(
        "pad_decode",
        "Recorded steps: CUDA graphs",
        use_pad,
        (check_pads, check_fits, check_cached, check_batch_stays, check_pad_generates),
    ),
]
