"""Our solutions of the exercises of chapter 8."""

import hashlib

import torch
from torch import Tensor

from nanovllm.core.sequence import Sequence


def keep_top_p(probs: Tensor, top_p: float) -> Tensor:
    values = probs.sort(descending=True).values
    mass_before = values.cumsum(0) - values  # of the tokens that are likelier than this one
    num_kept = int((mass_before < top_p * probs.sum()).sum())
    # Compared with the last one kept, so that its equals pass, wherever the sort has put them.
    return (probs >= values[max(num_kept, 1) - 1]) & (probs > 0)


def min_p_probs(logits: Tensor, temperature: float, min_p: float) -> Tensor:
    probs = (logits / temperature).softmax(-1)
    probs = probs.masked_fill(probs < min_p * probs.max(), 0.0)
    return probs / probs.sum()


def draw(probs: Tensor, seqs: list[Sequence]) -> list[int]:
    token_ids = []
    for row, seq in zip(probs, seqs, strict=True):
        key = f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}".encode()
        # 53 bits are what a float holds: all 64 could be rounded up to 1.
        u = (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53
        cumulative = row.cumsum(0)
        # right=True: the first that is larger, never one that is equal because it adds nothing.
        token_ids.append(int(torch.searchsorted(cumulative, u * cumulative[-1], right=True)))
    return token_ids


def allowed_tokens(choices: list[list[int]], generated: list[int], eos_token_id: int) -> list[int]:
    at = len(generated)
    fitting = [choice for choice in choices if choice[:at] == generated]
    return [choice[at] if len(choice) > at else eos_token_id for choice in fitting]
