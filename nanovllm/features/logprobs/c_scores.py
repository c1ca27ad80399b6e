"""What log probabilities need of a row of logits, found in C (chapter 8). In PyTorch: scores.score_rows()."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from nanovllm.worker.c_calls import INT, PTR, address, args_of


class ScoreArgs(ctypes.Structure):
    """score_args of worker/cpu/sampling.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "totals ranks top logits rows chosen"), *args_of(INT, "num_top size"))


def score_rows(
    library: Any, logits: Tensor, rows: Tensor, chosen: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See scores.score_rows(). num_top: at most scores.MOST_TOP."""
    count = len(rows)
    totals = torch.empty(count, dtype=torch.float64, device="cpu")
    ranks = torch.empty(count, dtype=torch.int64, device="cpu")
    top = torch.empty(count, num_top, dtype=torch.int64, device="cpu")
    args = ScoreArgs(
        num_rows=count, totals=address(totals, torch.float64, (count,)), ranks=address(ranks, torch.int64, (count,)),
        top=address(top, torch.int64, (count, num_top)), logits=address(logits, torch.float32, logits.shape),
        rows=address(rows, torch.int64, (count,)), chosen=address(chosen, torch.int64, (count,)),
        num_top=num_top, size=logits.shape[1],
    )  # fmt: skip
    library.score_rows(ctypes.byref(args))
    return totals, ranks, top
