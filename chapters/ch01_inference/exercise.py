"""Exercises of chapter 1. Replace each `raise NotImplementedError`, then run:  python -m chapters check 1"""

from collections.abc import Callable

from torch import Tensor


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one layer for one sequence of m tokens, all heads at once.

    q   [n, num_heads, head_dim]      queries of the LAST n of the m positions, 1 <= n <= m
    k   [m, num_kv_heads, head_dim]   keys of all m positions
    v   [m, num_kv_heads, head_dim]   values of all m positions

    Return a tensor of q's shape: row i is the weighted sum of values for position m - n + i.

    - A position sees itself and earlier positions, but never later ones. So row i sees positions 0 to m - n + i.
    - The weights are the softmax, over the positions seen, of the query's dot products with their keys, each divided
      by sqrt(head_dim).
    - num_heads is a multiple of num_kv_heads. Neighbors share: with 8 heads and 2 KV heads, heads 0 to 3 read KV
      head 0 and heads 4 to 7 read KV head 1.
    - Do not change the three arguments: they are the engine's own. All are float32; large dot products must not
      overflow (torch's softmax takes care of that).

    Example: with m = 1 there is one position to see, its weight is 1, and the result for each head is the value of its
    KV head. Loops are fine; so is a solution without any.
    """
    raise NotImplementedError


def greedy_loop(
    next_logits: Callable[[list[int]], Tensor], prompt_token_ids: list[int], max_tokens: int, eos_token_ids: set[int]
) -> list[int]:
    """Continue a prompt, one token at a time, always with the most likely token.

    next_logits        the model: takes a list of token ids, at least one, and returns a tensor [vocab_size] with the
                       logits of the token that follows the last of them. It remembers nothing between two calls.
    prompt_token_ids   where to start; the list must not be changed
    max_tokens         how many tokens to generate at most; at least 1
    eos_token_ids      tokens that end the text as soon as one is generated; may be empty

    Return the ids of the generated tokens, without the prompt, as a list of Python ints. If an EOS token ended the
    text, it is the last of them. Ask the model exactly once for each token returned.

    Example: with a model that always likes token 5 best, max_tokens=3 and eos_token_ids={2}, the result is [5, 5, 5];
    with eos_token_ids={5} it is [5].
    """
    raise NotImplementedError
