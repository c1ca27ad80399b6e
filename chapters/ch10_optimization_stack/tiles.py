"""Attention in six steps, from dense to paged, and what watches them. The lab and the exercises share it."""

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.worker.batch import Batch

TILE = 32  # keys that are looked at together
TILE_ROWS = 16  # query rows that are


class KeyReader:
    """Hands out K and V of one layer by slot, at most TILE tokens at a time, and counts them."""

    def __init__(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]."""
        _, self.block_size, self.num_kv_heads, _ = k_cache.shape
        self._k, self._v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
        self.num_read = 0

    def read(self, slots: list[int]) -> tuple[Tensor, Tensor]:
        """K and V in these slots, each [len(slots), num_kv_heads, head_dim], float32."""
        if len(slots) > TILE:
            raise ValueError(f"{len(slots)} slots at once; a tile has {TILE}")
        self.num_read += len(slots)
        index = torch.tensor(slots, dtype=torch.int64, device=self._k.device)
        return self._k[index].float().cpu(), self._v[index].float().cpu()


Attend = Callable[[Tensor, list[int], int, KeyReader], Tensor]


def paged_attention_by(attend: Attend) -> Callable[[Tensor, Tensor, Tensor, Batch, int], Tensor]:
    """paged_attention() of the engine from a function for one sequence: tiles of query rows, one after another.

    For models whose rows see all keys before them: a window is not passed on.
    """

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        outs = []
        for b, rows in enumerate(q.split(batch.query_lens)):
            table, num_before = batch.block_tables[b].tolist(), batch.key_lens[b] - len(rows)
            for first in range(0, len(rows), TILE_ROWS):
                tile = rows[first : first + TILE_ROWS].float().cpu()
                outs.append(attend(tile, table, num_before + first + len(tile), KeyReader(k_cache, v_cache)))
        return torch.cat(outs).to(q)  # back to its dtype, and on a GPU to its memory

    return paged_attention


class Memory(TorchDispatchMode):
    """Watches what the operations inside it make: every tensor's bytes, and the most that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._made: list[tuple[int, weakref.ref[Tensor]]] = []
        self._alive: list[tuple[int, weakref.ref[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:  # a view makes nothing
                self._made.append((x.nbytes, weakref.ref(x)))
                self._alive.append(self._made[-1])
        self._alive = [(nbytes, ref) for nbytes, ref in self._alive if ref() is not None]
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for nbytes, _ in self._alive))
        return result

    def largest_bytes(self, result: Tensor) -> int:
        """Of the largest tensor beside the result."""
        return max(nbytes for nbytes, ref in self._made if ref() is not result)


# One head: q, k and v are [n, head_dim]. Row i sees the keys 0 to i. Each step is checked against the one before.


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.T * q.shape[1] ** -0.5
    later = torch.arange(len(k)) > torch.arange(len(q))[:, None]
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def row_by_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.empty_like(q)
    for i in range(len(q)):
        scores = k[: i + 1] @ q[i] * q.shape[1] ** -0.5
        weights = (scores - scores.max()).exp()
        out[i] = weights @ v[: i + 1] / weights.sum()
    return out


def two_passes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for i in range(len(q)):
        row = q[i] * q.shape[1] ** -0.5
        running_max, running_sum = -math.inf, 0.0
        for first in range(0, i + 1, TILE):  # the online softmax: maximum and sum, a tile at a time
            scores = k[first : min(first + TILE, i + 1)] @ row
            new_max = max(running_max, scores.max().item())
            running_sum = running_sum * math.exp(running_max - new_max) + (scores - new_max).exp().sum().item()
            running_max = new_max
        for first in range(0, i + 1, TILE):  # and the weighted values, from the same scores computed again
            keys = slice(first, min(first + TILE, i + 1))
            out[i] += (k[keys] @ row - running_max).exp() / running_sum @ v[keys]
    return out


def one_pass(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros_like(q)
    for i in range(len(q)):
        row = q[i] * q.shape[1] ** -0.5
        running_max, running_sum, acc = -math.inf, 0.0, torch.zeros_like(row)
        for first in range(0, i + 1, TILE):
            keys = slice(first, min(first + TILE, i + 1))
            scores = k[keys] @ row
            new_max = max(running_max, scores.max().item())
            rescale, weights = math.exp(running_max - new_max), (scores - new_max).exp()
            running_sum = running_sum * rescale + weights.sum().item()
            acc = acc * rescale + weights @ v[keys]
            running_max = new_max
        out[i] = acc / running_sum
    return out


def tiles_of_queries(q: Tensor, k: "Tensor | Paged", v: "Tensor | Paged") -> Tensor:
    out = torch.empty_like(q)
    for start in range(0, len(q), TILE_ROWS):
        rows = q[start : start + TILE_ROWS] * q.shape[1] ** -0.5
        position = torch.arange(start, start + len(rows))[:, None]
        running_max, running_sum = torch.full((len(rows), 1), -torch.inf), torch.zeros(len(rows), 1)
        acc = torch.zeros_like(rows)
        for first in range(0, start + len(rows), TILE):
            keys = slice(first, min(first + TILE, start + len(rows)))
            later = torch.arange(keys.start, keys.stop) > position
            scores = (rows @ k[keys].T).masked_fill(later, -torch.inf)
            new_max = torch.maximum(running_max, scores.amax(1, keepdim=True))
            rescale, weights = (running_max - new_max).exp(), (scores - new_max).exp()
            running_sum = running_sum * rescale + weights.sum(1, keepdim=True)
            acc = acc * rescale + weights @ v[keys]
            running_max = new_max
        out[start : start + len(rows)] = acc / running_sum
    return out


class Paged:
    """K or V of one head of a sequence, as tiles_of_queries() reads them: slice by slice, through the block table."""

    def __init__(self, reader: KeyReader, which: int, head: int, block_table: list[int]) -> None:
        """which: 0 for K, 1 for V."""
        self._reader, self._which, self._head, self._block_table = reader, which, head, block_table

    def __getitem__(self, keys: slice) -> Tensor:
        """[len(keys), head_dim]"""
        size = self._reader.block_size
        slots = [self._block_table[i // size] * size + i % size for i in range(keys.start, keys.stop)]
        return self._reader.read(slots)[self._which][:, self._head]


def tiles_of_paged_keys(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
    """(f): paged_attention() of the engine, head by head, by (e). For models whose rows see all keys before them."""
    out = torch.empty_like(q)
    reader, group = KeyReader(k_cache, v_cache), q.shape[1] // k_cache.shape[2]
    for b, rows in enumerate(q.split(batch.query_lens)):
        table, first = batch.block_tables[b].tolist(), int(batch.cu_seqlens_q[b])
        # (e) has a row for every key. Those that earlier steps have computed are made up, and dropped again.
        earlier = rows.new_zeros(batch.key_lens[b] - len(rows), q.shape[2])
        for head in range(q.shape[1]):
            k, v = (Paged(reader, which, head // group, table) for which in (0, 1))
            all_rows = torch.cat([earlier, rows[:, head]]).float().cpu()
            out[first : first + len(rows), head] = tiles_of_queries(all_rows, k, v)[len(earlier) :].to(out)
    return out


LADDER: list[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = [
    ("(a) dense", dense),
    ("(b) row by row", row_by_row),
    ("(c) online softmax, 2 passes", two_passes),
    ("(d) one pass, an accumulator", one_pass),
    ("(e) tiles of queries, too", tiles_of_queries),
]


def rows_read(name: str, n: int) -> int:
    """How many rows of K and of V a step reads for n queries."""
    by_row = n * (n + 1) // 2
    by_tile = sum(min(start + TILE_ROWS, n) for start in range(0, n, TILE_ROWS))
    return {"a": 2 * n, "b": 2 * by_row, "c": 3 * by_row, "d": 2 * by_row, "e": 2 * by_tile}[name[1]]
