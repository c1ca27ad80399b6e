"""Requests in short: prompts and parameters that do not matter, answers that are given, log probabilities of rows."""

from collections.abc import Sequence
from typing import Any

import torch

from nanovllm import SamplingParams
from nanovllm.features.logprobs.scores import LogprobRows, TokenLogprobs

TEXT = "the quick brown fox jumps over the lazy dog"


def sampled(**options) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True} | options)


def saying(answer: list[int]) -> SamplingParams:
    """The answer has these tokens."""

    def say(generated: list[int], row: torch.Tensor) -> torch.Tensor:
        row[answer[len(generated)]] = torch.inf
        return row

    return SamplingParams(max_tokens=len(answer), temperature=0, ignore_eos=True, logits_processors=[say])


def token_logprobs(
    logits: torch.Tensor, token_ids: list[int], wanted: Sequence[int | list[int] | None], library: Any = None
) -> list[TokenLogprobs | None]:
    """Of a token of each row of logits, what is wanted of it."""
    rows = LogprobRows.of(wanted)
    assert rows is not None
    found = rows.logprobs(rows.score(logits, torch.tensor(token_ids), library))
    return [found.get(row) for row in range(len(logits))]
