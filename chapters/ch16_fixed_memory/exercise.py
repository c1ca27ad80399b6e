"""Exercises of chapter 16. Edit this file, then:  python -m chapters check 16

Three functions around a state of fixed size: what a token does to it, where copies of it are kept for other requests,
and what guesses (draft tokens) must not do to it. Tasks are independent of each other, and need no torch.
"""

from collections.abc import Callable
from typing import Any

Matrix = list[list[float]]


def delta_step(
    state: Matrix, q: list[float], k: list[float], v: list[float], decay: float, beta: float
) -> tuple[Matrix, list[float]]:
    """One token meets the state of one head: it writes by the gated delta rule, then it reads.

        state  [key_dim][value_dim]: a row for each number of a key. All zeros before the first token
        q      [key_dim]    the token's query
        k      [key_dim]    its key, of length 1 or 0
        v      [value_dim]  its value
        decay  between 0 and 1: what stays of all that was written before
        beta   between 0 and 1: how far what the key gives is moved toward v. 0: nothing is written

    A key x reads  state^T x : number j of the result is the sum of x[i] * state[i][j] over all i. The token

    1. multiplies the whole state by decay,
    2. reads what the state gives for k now, after the decay,
    3. adds what is missing:  state[i][j] += k[i] * beta * (v[j] - what was read[j]),
    4. reads with q. So it sees what it has written itself.

    Return (the new state, what q reads). The new state is a new list of new lists: the given one stays as it is. It may
    be a snapshot from which other requests begin.

    Example: in [[0, 0], [0, 0]] the key [1, 0] writes the value [6, 8] with beta 0.5, decay 1: the state is [[3, 4],
    [0, 0]], and the query [1, 0] reads [3, 4]. After the same token once more, the state is [[4.5, 6], [0, 0]].
    """
    raise NotImplementedError


def choose_snapshots(num_tokens: int, num_matched: int, block_size: int) -> dict[int, bool]:
    """A request is admitted. At which positions of its tokens should snapshots of the state be taken?

        num_tokens   the request's tokens
        num_matched  how many of them, counted from the first, were found in the cache block by block: somebody has sent
                     them before. 0: nobody has. A multiple of block_size; all of a prompt may be found. The request
                     cannot begin there unless there is a snapshot
        block_size   tokens of a block

    Return {position: is it wanted?}. A position is a number of tokens, counted from the first: a snapshot there is the
    state after that many. It belongs to the hash of the block that ends there, so it must be a multiple of block_size;
    and it must be at most (num_tokens - 1) // block_size * block_size, since one token of every prompt must be left to
    compute. 0 is allowed, and has no effect.

    True says that you know somebody will want it; False, that you are guessing. There is room for few snapshots: think
    of a dozen. When all places are taken, the oldest guess from which nobody has begun yet is evicted. If there is
    none, a new guess is not taken, and a new wanted one gets the place of the snapshot that was used longest ago.

    The next request begins at the deepest snapshot in what it shares with earlier ones, and computes everything after
    it. You are graded by the number of tokens that need not be computed. Some prompts continue an earlier one. Others
    share their beginning with earlier ones and then differ: the shared length is the same each time, or different each
    time, and nobody can know it in advance.

    (While a request generates, the engine keeps the state at its newest full block by itself.)
    """
    raise NotImplementedError


def read_guesses(
    step: Callable[[Any, Any], tuple[Any, Any]],
    memory: dict[str, Any],
    num_held: int,
    known: list[Any],
    guesses: list[Any],
) -> list[Any]:
    """A layer with a state computes the rows of one step; the last ones are guesses. Return the output of each row.

        step      step(state, row) -> (the state that has taken in this row, too; the row's output). It is what the
                  layer does with a token, as delta_step does. A row is the token's input. The given state stays as
                  it is
        memory    what is kept of this sequence between its steps. memory["state"] is the state; it is there at the
                  first call. Whatever else you put there is there at the next call
        num_held  how many of the last call's guesses have turned out right. Those after them were wrong
        known     rows of known tokens, at least one. They follow the guesses that held, which do not come again
        guesses   rows of the tokens that are guessed to follow; perhaps none

    Each row's output is that of a sequence with exactly these tokens before it: the known tokens of all
    calls, the guesses that held, and the guesses of this call that come before it. Return len(known) + len(guesses)
    outputs.

    Whether a guess holds is decided after the call, by what is sampled from these outputs. After the call,
    memory["state"] must be the state after the last known row: it has taken in every known token and every guess that
    held up to then, and no guess of this call. The engine may copy it as a snapshot at any time.

    A state is large (1 MiB in each layer of Qwen3.5-0.8B), a row is small (12 KiB). So memory holds only one state,
    and no rows except the guesses of this call. step is called once for each row of this call, and once for each
    guess that held. known and guesses belong to the engine: after the call it uses these lists for something else.
    """
    raise NotImplementedError
