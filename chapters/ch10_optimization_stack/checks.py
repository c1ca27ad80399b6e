"""Grading of the exercises of chapter 10."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from chapters.ch10_optimization_stack.checks_order import ORDER_CHECKS
from chapters.ch10_optimization_stack.tiles import TILE, KeyReader, Memory, paged_attention_by
from chapters.expect import cases, differs, expect_form, unchanged
from chapters.grading import Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch
from nanovllm.worker.cuda.graphs import LADDER
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.model import Decoder

OUR_FORWARD = Decoder.forward
INF = torch.inf
TOLERANCE = 1e-3


@cache
def float32_bench(model: str) -> Bench:
    """Plain PyTorch in float32, where rounding does not change a token; prompts are computed in chunks."""
    bench = Bench(model, dtype="float32", enforce_eager=True, max_num_batched_tokens=12)
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
    return isinstance(a, Tensor) and a.shape == b.shape and not differs(b, a, TOLERANCE, TOLERANCE).any()


def difference(expected: Tensor, got: Any) -> dict[str, str]:
    """expected and got of a report: some numbers of each, from the first on that differs."""
    if not isinstance(got, Tensor):
        return {"expected": f"a tensor of shape {list(expected.shape)}", "got": repr(got)}
    if got.shape != expected.shape:
        return {"expected": f"shape {list(expected.shape)}", "got": f"shape {list(got.shape)}"}
    far = differs(expected, got.to(expected.dtype), TOLERANCE, TOLERANCE)
    first = int(far.flatten().nonzero()[0])
    place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(first), expected.shape))

    def numbers(x: Tensor) -> str:
        found = [f"{value:.4f}" for value in x.flatten()[first : first + 6].tolist()]
        return f"{', '.join(found)}{', ...' if x.numel() > first + 6 else ''} (from [{place}] of {list(x.shape)})"

    return {"expected": numbers(expected), "got": numbers(got)}


# -- fold -------------------------------------------------------------------------------------------------------------

Fold = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
State = tuple[Tensor, Tensor, Tensor]
STATE = ("running_max", "running_sum", "acc")


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
        with unchanged("one of the tensors that you were given has been changed: return new tensors", *given):
            got = function(*given)
        if not isinstance(got, tuple | list) or len(got) != 3:
            raise Wrong("return three tensors: running_max, running_sum, acc", got=repr(got))
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
        return "a tensor of a different shape is expected"
    if name == "running_max":
        if close(got, scores.amax(-1)):
            return "that is the largest of the new scores; an earlier one may be larger"
        return "it should be the largest score so far, of the earlier keys and of the new ones"
    if not got.isfinite().all():
        sees_none = scores.amax(-1) == -INF
        if bool(got[sees_none].isnan().any()):
            return "where a row has seen no key yet, or sees none of the new ones, -inf - (-inf) is nan"
        return "exp() of a large number is inf: subtract the new maximum from every score before exp()"
    base = new_max.masked_fill(new_max == -INF, 0.0)

    def summed(weights: Tensor) -> Tensor:
        return weights.sum(-1) if name == "running_sum" else weights @ values

    def times(x: Tensor, factor: Tensor) -> Tensor:
        return x * (factor[..., None] if name == "acc" else factor)

    rescale = (running_max - base).exp()
    old, new = running_sum if name == "running_sum" else acc, summed((scores - base[..., None]).exp())
    own = summed((scores - scores.amax(-1, keepdim=True)).exp().nan_to_num(0, 0, 0))
    raw = summed(scores.exp())
    has_moved = bool((rescale[running_max != -INF] < 1).any())
    causes = {
        "what was summed up before belongs to the old maximum. When that moves, it has to be multiplied by "
        "exp(old maximum - new maximum)": has_moved and close(got, old + new),
        "the earlier keys are forgotten; the new ones should be added to them": close(got, new),
        "it has been multiplied by exp(new maximum - old maximum); it must shrink: exp(old maximum - new maximum)": (
            (rescale > 0).any() and close(got, times(old, (base - running_max).exp().nan_to_num(0, 0, 0)) + new)
        ),
        "it has already been divided by running_sum; the caller does that once, at the end": (
            name == "acc" and close(got, expected[2] / expected[1][..., None])
        ),
        "only what was there before should shrink; the new keys are already relative to the new maximum": (
            has_moved and close(got, times(old + new, rescale))
        ),
        "the new scores count from the new running_max, which may be an earlier key's, not from their own maximum": (
            close(got, times(old, rescale) + own) or close(got, old + own)
        ),
        "subtract the new maximum from every score before exp(): exp(score - running_max)": (
            close(got, old + raw) or close(got, times(old, rescale) + raw)
        ),
    }
    otherwise = "it should be the sum over all keys so far of exp(score - running_max); for acc, each times its value"
    return next((why for why, is_it in causes.items() if is_it), otherwise)


def example(heads: int, rows: int, count: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(heads, rows, count, generator=generator)
    return scores, torch.randn(heads, count, head_dim, generator=generator)


def fold_some(function: Fold, rows: list[list[float]], sizes: list[int], what: str) -> None:
    """Values 10, 20, 30, ..."""
    compare_fold(function, torch.tensor([rows]), 10 * torch.arange(1.0, len(rows[0]) + 1)[None, :, None], sizes, what)


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

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        outs = []
        for b, rows in enumerate(q.split(batch.query_lens)):
            num_keys, blocks = batch.key_lens[b], batch.block_tables[b].long()
            k, v = (cache[blocks].flatten(0, 1)[:num_keys].float().cpu() for cache in (k_cache, v_cache))
            outs.append(attend_by_folding(function, rows.float().cpu(), k, v))
        return torch.cat(outs).to(q)

    with engine_with(bench, paged_attention=paged_attention) as other:
        other.same_tokens()


def attend_by_folding(fold: Fold, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a sequence's last rows. All scores are there before the first fold: no memory is saved here."""
    scores, values = (x.float() for x in whole_rows(q, k, v))
    state = fresh(scores.shape[0], scores.shape[1], q.shape[2])
    for some_scores, some_values in zip(scores.split(TILE, -1), values.split(TILE, 1), strict=True):
        state = fold(*state, some_scores, some_values)
    _, running_sum, acc = state
    return (acc / running_sum[..., None]).transpose(0, 1)


MASKED = [[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, -INF, -INF], [-INF, -INF, 3.0, 4.0], [1.0, -INF, -INF, 4.0]]
LARGE = [1e4, 1e4 - 2, 1e4 - 1, 1e4 + 1]
FOLD_CHECKS = (
    *cases(
        fold_some,
        {
            "One tile: the softmax with its maximum subtracted": [([[0.0, 1.0, 2.0]], [3], "scores 0, 1, 2")],
            "The maximum moves: what was summed up before shrinks": [
                ([[1.0, 3.0, 1.0]], [1, 2], "scores 1, then 3 and 1")
            ],
            "The maximum stays where it was": [([[3.0, 1.0, 2.0]], [1, 1, 1], "scores 3, then 1, then 2")],
            "Scores of 1e4 and of -1e4": [
                ([[sign * x for x in LARGE]], [2, 2], f"scores near {sign * 10_000:,}") for sign in (1, -1)
            ],
            "Rows that see none of the new keys": [
                (MASKED, [2, 2], "row 1 sees nothing of tile 2, row 2 nothing of tile 1")
            ],
        },
    ),
    check_random_tiles,
    check_fold_generates,
)


# -- attend -----------------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, list[int], int, KeyReader], Tensor]


class StrictReader(KeyReader):
    """Every token once, TILE at most at a time, nothing else."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor, block_table: list[int], num_keys: int) -> None:
        super().__init__(k_cache, v_cache)
        size = self.block_size
        slots = [block * size + offset for block in block_table for offset in range(size)]
        self._token_of = {slot: token for token, slot in reversed(list(enumerate(slots)))}
        self._blocks, self._num_keys, self._seen = block_table, num_keys, set[int]()

    def read(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        slots = [int(slot) for slot in slots]
        for slot in slots:
            token, hint = self._token_of.get(slot), ""
            if len(slots) > TILE:
                hint = f"one call of read asked for {len(slots)} slots; a tile has {TILE} at most"
            elif token is None and slot < self._num_keys:
                hint = f"slot {slot} was read. that looks like a token's number; find its slot through block_table"
            elif token is None:
                slot_of = "block_table[i // block_size] * block_size + ..."
                hint = f"slot {slot} was read. none of the sequence's blocks has this slot: {slot_of}"
            elif token >= self._num_keys:
                hint = (
                    f"the slot of token {token} was read, and there are {self._num_keys} tokens: the last tile is short"
                )
            elif token in self._seen:
                hint = f"token {token} was read twice; once is enough with an accumulator"
            if token is None or hint:
                raise Wrong(hint, expected=f"slots of blocks {self._blocks}", got=_short(slots))
            self._seen.add(token)
        return super().read(slots)

    def finish(self) -> None:
        missing = [token for token in range(self._num_keys) if token not in self._seen]
        if missing:
            hint = f"some of the {self._num_keys} tokens were never read"
            raise Wrong(hint, expected="all of them", got=f"all but {_short(missing)}")


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
    scores, values = whole_rows(q, k, v, ahead=ahead, spread=spread, scale=scale)
    return (scores.softmax(-1) @ values).transpose(0, 1).float()


def whole_rows(
    q: Tensor, k: Tensor, v: Tensor, *, ahead: int | None = 0, spread: bool = False, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Each query head's scores [heads, rows, keys] and values [heads, keys, head_dim], in float64. See dense()."""
    rows, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    k, v = ((x.repeat(1, group, 1) if spread else x.repeat_interleave(group, 1)).double() for x in (k, v))
    scores = torch.einsum("rhd,nhd->hrn", q.double() * scale * head_dim**-0.5, k)
    if ahead is not None:
        seen = torch.arange(len(k) - rows + 1, len(k) + 1)[:, None] + ahead
        scores = scores.masked_fill(torch.arange(len(k)) >= seen, -INF)
    return scores, v.transpose(0, 1)


def compare_attend(function: Attend, rows: int, num_keys: int, num_heads: int, num_kv_heads: int, *more: Any) -> None:
    """more: block size, and how large the numbers are."""
    q, k, v, k_cache, v_cache, table = case(rows, num_keys, num_heads, num_kv_heads, *more)
    what = f"{rows} rows, {num_keys} keys, {num_heads} query heads, {num_kv_heads} KV heads, tiles of {TILE}"
    reader, q, table = StrictReader(k_cache, v_cache, table, num_keys), q.clone(), list(table)
    with unchanged(f"{what}: q or block_table, which you were given, has been changed", q, table):
        got = function(q, table, num_keys, reader)
    reader.finish()
    expected = dense(q, k, v)
    expect_form(expected, got, f"{what}: a tensor of q's shape is expected")
    if not close(got, expected):
        raise Wrong(f"{what}: {_why_attend(q, k, v, got)}", **difference(expected, got))


def _why_attend(q: Tensor, k: Tensor, v: Tensor, got: Tensor) -> str:
    rows, num_keys = len(q), len(k)
    variants = {
        "no scaling: scores are q·k * head_dim ** -0.5": partial(dense, scale=q.shape[2] ** 0.5),
        "rows see keys later than their own: causal masking is missing": partial(dense, ahead=None),
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
    if q.shape[1] > k.shape[1]:
        return (
            "query heads h * group to (h + 1) * group - 1 share KV head h; the mask, and the way back to [rows, "
            "heads], must keep the order in which you put their rows"
        )
    if num_keys > TILE:
        whole = num_keys // TILE * TILE
        if rows == 1 and close(got, dense(q, k[-(num_keys - whole or TILE) :], v[-(num_keys - whole or TILE) :])):
            return "only the last tile counts: tiles have to be folded together"
        return "right within one tile, not over several: check what happens to the running numbers between two tiles"
    return "softmax(q·k * head_dim ** -0.5) v, over the keys that the row sees"


def check_memory(function: Attend, bench: Bench) -> None:
    """What it holds does not grow with the number of keys"""
    peaks = {}
    for num_keys in (4 * TILE, 4 * TILE, 64 * TILE):  # the first run pays for what is made once
        q, _, _, k_cache, v_cache, table = case(2, num_keys, 4, 2, block_size=16)
        with Memory() as memory:
            function(q, table, num_keys, KeyReader(k_cache, v_cache))
        peaks[num_keys] = memory.peak_bytes
    few_bytes, many_bytes = peaks.values()
    # The positions may take more memory, 8 bytes a key; scores, K and V may not.
    if many_bytes > few_bytes + 8 * 64 * TILE + 1024:
        few_keys, many_keys = peaks
        hint = "what you hold grows with the number of keys: fold each tile into the running numbers and let it go"
        got = f"{few_bytes:,} bytes with {few_keys} keys, {many_bytes:,} with {many_keys:,}"
        raise Wrong(hint, expected="about the same with few keys and with many", got=got)


def check_attend_generates(function: Attend, bench: Bench) -> None:
    """The model gives the same tokens (float32), prompts cut into chunks of 12"""
    with engine_with(bench, paged_attention=paged_attention_by(function)) as other:
        other.same_tokens()


ATTEND_CHECKS = (
    *cases(
        compare_attend,
        {
            "A decode with 7 keys in two blocks, one head": [(1, 7, 1, 1)],
            "A decode over several tiles, full and not": [(1, n, 1, 1) for n in (TILE, 3 * TILE, 2 * TILE + 5)],
            "Several rows: each sees its own key and those before": [
                (rows, n, 1, 1) for rows, n in ((5, 5), (6, 20), (TILE + 8, TILE + 8), (5, TILE + 2))
            ],
            "Query heads that share KV heads": [(1, 9, 6, 2), (4, 50, 3, 3), (7, 75, 9, 3)],
            "Blocks smaller and larger than a tile, and as large": [
                (3, 70, 4, 2, block_size) for block_size in (1, TILE, 5 * TILE, 12)
            ],
            ("Scores in the hundreds", "The idea: a softmax that never sees the whole row"): [(4, 90, 4, 2, 4, 12.0)],
        },
    ),
    check_memory,
    check_attend_generates,
)


# -- pad_decode -------------------------------------------------------------------------------------------------------

Pad = Callable[[Batch, int], Batch]
BATCH_FIELDS = [field.name for field in fields(Batch) if field.init]


def use_pad(function: Pad) -> AbstractContextManager[None]:
    """Every decode step is padded to the next size of the graphs' ladder; the rows after the real ones are dropped."""

    def forward(model: Decoder, batch: Batch, *args: Any) -> Tensor:
        num_seqs = len(batch.seqlens_k)
        if batch.max_query_len > 1:
            return OUR_FORWARD(model, batch, *args)
        size = next(size for size in LADDER if size >= num_seqs)
        device = batch.input_ids.device
        values = [getattr(batch, name) for name in BATCH_FIELDS]
        on_cpu: Any = [x.cpu() if isinstance(x, Tensor) else x for x in values]
        batch = Batch(*on_cpu)
        padded = function(batch, size)
        compare_pad(batch, size, padded, f"{num_seqs} decodes padded to {size}")
        return OUR_FORWARD(model, padded.to(device), *args)[batch.logits_rows.to(device)]

    return replaced(Decoder, "forward", forward)


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
    "slot_mapping": (-1, "a row that pads must not write: slot -1. Any other slot may hold some sequence's K and V"),
    "seqlens_k": (1, "a row that pads attends to exactly one key: a softmax over no key is nan, more keys are waste"),
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
    why = "every sequence has one row, and so have the padding ones: 0, 1, 2, ... up to size"
    _compare_field("cu_seqlens_q", cu_seqlens_q, got.cu_seqlens_q, num_seqs + 1, why, what)
    why = "a graph computes all its rows, 0 to size - 1; the caller drops the rest"
    _compare_field("logits_rows", torch.arange(size), got.logits_rows, num_seqs, why, what)
    for name in ("max_query_len", "max_key_len"):
        if getattr(got, name) != getattr(batch, name):
            raise Wrong(f"{name} ({what}) should keep its value", expected=getattr(batch, name), got=getattr(got, name))


def _compare_field(name: str, expected: Tensor, got: Any, num_real: int, why: str, what: str) -> None:
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        shape = list(got.shape) if isinstance(got, Tensor) else repr(got)
        raise Wrong(f"{name} ({what}) has the wrong shape: {why}", expected=list(expected.shape), got=shape)
    if got.dtype != expected.dtype:
        raise Wrong(f"{name} ({what}) has a different dtype than before", expected=expected.dtype, got=got.dtype)
    if not torch.equal(got[:num_real], expected[:num_real]):
        hint = f"{name} ({what}): the first {num_real} entries are those of the real sequences, in their order"
        raise Wrong(hint, expected=expected.tolist(), got=got.tolist())
    if not torch.equal(got, expected):
        raise Wrong(f"{name} ({what}): {why}", expected=expected.tolist(), got=got.tolist())


def pad_some(function: Pad, num_tokens: tuple[int, ...], size: int, computed: bool = True) -> None:
    batch = decodes(*num_tokens, computed=computed)
    tensors = [x for x in map(partial(getattr, batch), BATCH_FIELDS) if isinstance(x, Tensor)]
    with unchanged("a tensor of the batch that you were given has been changed", *tensors):
        got = function(batch, size)
    compare_pad(decodes(*num_tokens, computed=computed), size, got, f"{len(num_tokens)} decodes padded to {size}")


def check_pad_generates(function: Pad, bench: Bench) -> None:
    """The model gives the same tokens (float32), each decode step padded to 1, 2, 4 or 8"""
    with engine_with(bench) as other:
        other.same_tokens()


PAD_CHECKS = (
    *cases(
        pad_some,
        {
            "Three decodes, a graph of four; the batch that was given stays as it was": [((7, 2, 13), 4)],
            "Nothing to pad, and much to pad": [((5, 9), 2), ((3,), 1), ((30,), 24)],
            "A sequence that writes nothing itself stays as it is": [((8, 4, 6), 8, False)],
        },
    ),
    check_pad_generates,
)

TASKS = [
    Task("fold", "The idea: a softmax that never sees the whole row", nullcontext, FOLD_CHECKS),
    Task("attend", "Tiles, step by step", nullcontext, ATTEND_CHECKS),
    Task("attend_in_parts", "The order of a sum", nullcontext, ORDER_CHECKS),
    Task("pad_decode", "Recorded steps: CUDA graphs", use_pad, PAD_CHECKS),
]
