"""Our solutions to the exercises of chapter 8."""

import hashlib
import math
from bisect import bisect_right
from itertools import accumulate

from nanovllm.core.sequence import Sequence


def keep_top_p(probs: list[float], top_p: float) -> list[bool]:
    wanted, mass, least = top_p * sum(probs), 0.0, 0.0
    for p in sorted(probs, reverse=True):
        if mass >= wanted or p == 0:
            break
        mass, least = mass + p, p
    # Compared with the last one kept, so that tokens equal to it pass, wherever the sort has put them.
    return [p >= least for p in probs]


def min_p_probs(logits: list[float], temperature: float, min_p: float) -> list[float]:
    largest = max(logits)
    weights = [math.exp((x - largest) / temperature) for x in logits]  # shares of the largest probability
    kept = [weight if weight >= min_p else 0.0 for weight in weights]
    total = sum(kept)
    return [weight / total for weight in kept]


def draw(probs: list[list[float]], seqs: list[Sequence]) -> list[int]:
    token_ids = []
    for row, seq in zip(probs, seqs, strict=True):
        key = f"{seq.seed},{seq.sample_index},{seq.num_generated_tokens}".encode()
        # 53 bits are what a float holds: all 64 could be rounded up to 1.
        u = (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) / 2**53
        cumulative = list(accumulate(row))
        # The first that is larger, never one that is equal because it adds nothing.
        token_ids.append(bisect_right(cumulative, u * cumulative[-1]))
    return token_ids


def allowed_tokens(choices: list[list[int]], generated: list[int], eos_token_id: int) -> list[int]:
    at = len(generated)
    fitting = [choice for choice in choices if choice[:at] == generated]
    return [choice[at] if len(choice) > at else eos_token_id for choice in fitting]
