"""The masks of grammars: bits of the tokens that may come next (chapter 8).

A mask needs the newest token, so it is worked out while the model computes with that token: by a thread that begins
when the step is packed and has to be done only when its logits are there.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch
from torch import Tensor

from nanovllm.worker.batch import cdiv
from nanovllm.worker.c_calls import address


class PendingBits:
    """Bits that another thread is working out; in another process, that the driver sends when they are done."""

    def __init__(self, future: "Future[Tensor] | None" = None) -> None:
        self._future = future
        self.receive: Callable[[], Tensor] | None = None  # RankRunner.run_packed says how, in another process

    def wait(self) -> Tensor:
        if self._future is not None:
            return self._future.result()
        assert self.receive is not None
        return self.receive()

    def __reduce__(self) -> tuple:
        return PendingBits, ()


def compute_bits(grammars: list[tuple[Any, list[int]]]) -> PendingBits:
    """Begin to compute them. grammars: each with the tokens generated so far."""
    return PendingBits(_worker().submit(_bits, grammars))


@cache
def _worker() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "grammar-masks")


def _bits(grammars: list[tuple[Any, list[int]]]) -> Tensor:
    """[rows, vocab_size / 32], of each grammar's next token."""
    for_row = cdiv(grammars[0][0].vocab_size, 32)
    bits = torch.zeros(len(grammars), for_row, dtype=torch.int32, device="cpu")
    for row, (grammar, token_ids) in zip(bits, grammars, strict=True):
        grammar.write_mask(token_ids, address(row, torch.int32, (for_row,)), row.nbytes)
    return bits


@cache
def _added_by_byte(device: torch.device) -> Tensor:
    """[256, 8]: 0 for each bit of a byte that is set, -inf for the others."""
    bits = torch.arange(256, device="cpu")[:, None] >> torch.arange(8, device="cpu") & 1
    added = torch.zeros(256, 8, dtype=torch.float32, device="cpu")
    return added.masked_fill_(bits == 0, -torch.inf).to(device)


def unpack(bits: Tensor) -> Tensor:
    """[rows, vocab_size]: what to add to the logits. A sum takes a twentieth of masked_fill_()'s time on a CPU."""
    flat = bits.view(torch.uint8).int().flatten()
    return _added_by_byte(bits.device).index_select(0, flat).view(len(bits), -1)
