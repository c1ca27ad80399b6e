"""Our solutions of chapter 1's exercises."""

from collections.abc import Callable

import torch
from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, m, group_size = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    kv_head = torch.arange(q.shape[1], device=q.device) // group_size  # of each query head
    k, v = k[:, kv_head], v[:, kv_head]  # [m, num_heads, head_dim]
    scores = torch.einsum("nhd,mhd->hnm", q, k) * q.shape[2] ** -0.5
    position = torch.arange(m, device=q.device)
    later = position > position[m - n :, None]  # [n, m]: the queries are the last n positions, not the first
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)  # a score of -inf gets the weight 0
    return torch.einsum("hnm,mhd->nhd", weights, v)


def greedy_loop(
    next_logits: Callable[[list[int]], Tensor], prompt_token_ids: list[int], max_tokens: int, eos_token_ids: set[int]
) -> list[int]:
    token_ids = list(prompt_token_ids)  # a copy: the caller's list stays as it is
    generated: list[int] = []
    while len(generated) < max_tokens:
        token_id = int(next_logits(token_ids).argmax())
        token_ids.append(token_id)
        generated.append(token_id)
        if token_id in eos_token_ids:  # looked at after it was appended: it belongs to the result
            break
    return generated
