"""Attention of one row by several workers, a part of its keys at a time (exercise attend_in_parts)."""

import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.worker.batch import Batch

PART = 16  # keys of a part; parts begin at its multiples


class Part(NamedTuple):
    """A row's attention to the keys from `first` on: acc / running_sum, relative to running_max, as in fold()."""

    first: int
    running_max: Tensor  # [heads, group]
    running_sum: Tensor  # [heads, group]
    acc: Tensor  # [heads, group, head_dim]


Range = tuple[int, int]
Run = Callable[[list[list[Range]]], list[Part]]
AttendInParts = Callable[[int, int, Run], Tensor]


class Workers:
    """A row's queries, q [heads, group, head_dim], and what they attend to: k and v, [num_keys, heads, head_dim]."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, rng: random.Random | None = None) -> None:
        """rng: decides which worker is done with a part first. None: parts are done in the order of the row."""
        self.q, self.k, self.v = (x.double() for x in (q, k, v))
        self.rng = rng

    def run(self, shares: list[list[Range]]) -> list[Part]:
        """Each worker computes its ranges one after another. All parts, in the order in which they are done."""
        queues = [[self._compute(*keys) for keys in share] for share in shares]
        done: list[Part] = []
        while queues := [queue for queue in queues if queue]:
            queue = self.rng.choice(queues) if self.rng else min(queues, key=lambda parts: parts[0].first)
            done.append(queue.pop(0))
        return done

    def _compute(self, first: int, end: int) -> Part:
        """In float64, then rounded: these numbers are the same whoever computes them."""
        scores = self.q @ self.k[first:end].permute(1, 2, 0) * self.q.shape[-1] ** -0.5  # [heads, group, keys]
        running_max = scores.amax(-1).float()
        weights = (scores - running_max[..., None]).exp()
        return Part(first, running_max, weights.sum(-1).float(), (weights @ self.v[first:end].transpose(0, 1)).float())


def paged_attention_in_parts(
    attend: AttendInParts, num_workers: int, rng: random.Random
) -> Callable[[Tensor, Tensor, Tensor, Batch, int], Tensor]:
    """paged_attention() of the engine, row by row, for models whose rows see all keys before them."""

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        _, size, heads, head_dim = k_cache.shape
        outs = []
        for b, rows in enumerate(q.split(batch.query_lens)):
            at = torch.arange(batch.key_lens[b])
            slots = batch.block_tables[b].long()[at // size] * size + at % size
            k, v = k_cache.flatten(0, 1)[slots], v_cache.flatten(0, 1)[slots]
            for i, row in enumerate(rows):
                num_keys = len(at) - len(rows) + i + 1
                workers = Workers(row.view(heads, -1, head_dim), k[:num_keys], v[:num_keys], rng)
                outs.append(attend(num_keys, num_workers, workers.run).reshape(-1, head_dim))
        return torch.stack(outs).to(q)

    return paged_attention
