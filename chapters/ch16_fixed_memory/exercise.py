"""Exercises of chapter 16. Edit this file, then:  python -m chapters check 16

Three functions around a state of fixed size: what the tokens of a chunk do to it, where copies of it are kept for other
requests, and what draft tokens must not do to it. Tasks are independent of each other, and need no torch.
"""

from collections.abc import Callable
from typing import Any

Vector = list[float]


def delta_chunk(
    read: Callable[[list[Vector]], list[Vector]],
    q: list[Vector],
    k: list[Vector],
    v: list[Vector],
    decay: list[float],
    beta: list[float],
) -> tuple[list[Vector], float, list[Vector]]:
    """The tokens of a chunk meet the state of one head. They write and read by the gated delta rule, one after another.

        read   read([x, y, ...]) returns what each of these vectors reads in S, the state before the chunk: [S^T x,
               S^T y, ...]
        q, k   [num_tokens][key_dim]    the tokens' queries, and their keys, of length 1 or 0
        v      [num_tokens][value_dim]  their values
        decay  [num_tokens]             each between 0 and 1; it may be 0
        beta   [num_tokens]             each between 0 and 1

    Token t multiplies the whole state by decay[t], looks up what k[t] reads then, writes what is missing with beta[t],
    and reads with q[t]. But S is large, and to go through it once for every token takes long. So you do not get S. You
    may call read once, with at most two vectors for each token, and you must work out from its answer what every token
    would have found in a state that earlier tokens of the chunk have changed.

    Return three things:

        outputs  [num_tokens][value_dim]  what each token reads with q
        left     a number: how much of S is left after the chunk
        lines    [num_tokens][value_dim]  what is left of each token's line, so that the state after the chunk is
                 left * S + outer(k[0], lines[0]) + outer(k[1], lines[1]) + ...

    A chunk has at least one token, and perhaps hundreds. Do not change the lists that you are given.

    Example: two tokens with q = k = [1, 0], v = [6, 8], beta 0.5 and decay 0.5, and a state of zeros, in which every
    vector reads [0, 0]. The first one writes half of what is missing and reads [3, 4]. Before the second one this fades
    to [1.5, 2]. Then [4.5, 6] is missing, and half of it is written, so the second one reads [3.75, 5]. left is 0.25,
    and lines are [[1.5, 2], [2.25, 3]].
    """
    raise NotImplementedError


def plan_snapshots(prompts: list[list[int]], block_size: int, room: int) -> list[list[int]]:
    """All prompts of a batch job are known before the first one runs. Which prompt takes a snapshot of the state where?

        prompts     the tokens of each, in the order in which they run, one after another
        block_size  tokens of a block
        room        how many snapshots may be taken, by all prompts together. Whatever is taken stays until the end

    Return a list of positions for each prompt. A position is a number of tokens, counted from the first. It must be a
    multiple of block_size, at least block_size, and at most (num_tokens - 1) // block_size * block_size: a snapshot
    belongs to the hash of a block, and one token of every prompt is left to compute.

    A prompt begins at the deepest snapshot that an earlier prompt has taken after the same tokens, and computes all
    tokens that follow. (K and V of all earlier prompts are still in the cache.) So a prompt gains nothing from its own
    snapshots.

    Plan so that as few tokens as possible are computed. Small jobs must be planned as well as possible. Large ones, of
    a hundred prompts of a few thousand tokens each, must be planned at least as well as by the engine, which does not
    know what comes; and there is no time to try everything.

    Example: blocks of 2 and four prompts, [1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 2, 7], [1, 2, 8]. With room for two
    snapshots, [[2, 4], [], [], []] saves 4 + 2 + 2 tokens. With room for one, [[2], [], [], []] saves 2 + 2 + 2, and
    [[4], [], [], []] only 4.
    """
    raise NotImplementedError


def read_guesses(
    step: Callable[[Any, Any], tuple[Any, Any]],
    memory: dict[str, Any],
    num_held: int,
    known: list[Any],
    guesses: list[Any],
) -> list[Any]:
    """A layer with a state computes a step's rows, the last of which are draft tokens. Return their outputs.

        step      step(state, row) -> (the state that has taken in this row, too; the row's output). It is what the
                  layer does with a token. A row is the token's input. The given state stays as it is
        memory    what is kept of this sequence between its steps. memory["state"] is the state; it is there at the
                  first call. Whatever else you put there is there at the next call
        num_held  how many of the last call's draft tokens were accepted. Those after them were rejected
        known     rows of known tokens, at least one. They follow the accepted draft tokens, which do not come again
        guesses   rows of the draft tokens that follow; perhaps none

    Each row's output is that of a sequence with exactly these tokens before it: the known tokens of all calls, the
    accepted draft tokens, and the draft tokens of this call that come before it. Return len(known) + len(guesses)
    outputs.

    Whether a draft token is accepted is decided after the call, by what is sampled from these outputs. After the call,
    memory["state"] must be the state after the last known row: it has taken in every known token and every draft token
    accepted up to then, and no draft token of this call. The engine may copy it as a snapshot at any time.

    A state is large (1 MiB in each layer of Qwen3.5-0.8B), a row is small (12 KiB). So memory holds only one state,
    and no rows except the draft tokens of this call. step is called once for each row of this call, and once for each
    accepted draft token. known and guesses belong to the engine: after the call it uses these lists for something else.
    """
    raise NotImplementedError
