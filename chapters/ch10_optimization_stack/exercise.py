"""Exercises of chapter 10. Edit this file, then:  python -m chapters check 10

While a function is checked, it works in the real engine: fold, attend and attend_in_parts compute its attention, and
pad_decode prepares its decode steps as CUDA graphs need them (no GPU is needed).
"""

import torch  # noqa: F401 (you will need it)
from torch import Tensor

from chapters.ch10_optimization_stack.tiles import TILE, KeyReader  # noqa: F401 (you will need TILE)
from chapters.ch10_optimization_stack.workers import PART, Run  # noqa: F401 (you will need PART)
from nanovllm.worker.batch import Batch


def fold(
    running_max: Tensor, running_sum: Tensor, acc: Tensor, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """One round of the online softmax: take in the next keys of every row. Returns the new (running_max, running_sum,
    acc).

    All are float32. There are `heads` KV heads, `rows` query rows for each of them, and `count` new keys:

        running_max  [heads, rows]             the largest score that each row has seen so far
        running_sum  [heads, rows]             the sum of exp(score - running_max) over the keys so far
        acc          [heads, rows, head_dim]   the sum of exp(score - running_max) * value over the keys so far
        scores       [heads, rows, count]      of the new keys, scaled and masked: -inf where a row must not see a key
        values       [heads, count, head_dim]  of the new keys

    Before the first key, the first three are -inf, 0 and 0. Afterwards the same three statements hold with the new keys
    among "the keys so far", and with the new maximum. Nothing is divided here: when all keys are in, the caller
    computes acc / running_sum.

    A row may see none of the new keys (all its scores are -inf). If it has seen others before, nothing changes for it.
    If it has not, it stays at (-inf, 0, 0), without nan. Scores may be as large as 1e4 or as small as -1e4. Return new
    tensors and leave the five that you got as they are. No loops are needed.

    Example, one head, one row, head_dim 1: running_max 1, running_sum 1, acc 10 (one key so far, score 1, value 10),
    then scores [3, 1] with values [20, 30] -> running_max 3, running_sum e^-2 + e^0 + e^-2 = 1.2707,
    acc 10 e^-2 + 20 + 30 e^-2 = 25.4134.
    """
    raise NotImplementedError


def attend(q: Tensor, block_table: list[int], num_keys: int, reader: KeyReader) -> Tensor:
    """Causal attention of one sequence over its block table, a tile of keys at a time.

        q            [rows, num_heads, head_dim], float32, not scaled: queries of the sequence's last `rows` tokens,
                     which stand at positions num_keys - rows to num_keys - 1
        block_table  the sequence's blocks, in order; there may be more of them than num_keys needs
        num_keys     how many tokens there are; row i sees the keys 0 to num_keys - rows + i, its own included
        reader       reader.read(slots) -> (k, v), each [len(slots), num_kv_heads, head_dim], float32

    The reader is the only way to K and V. slots is a list of at most TILE slot numbers: token i lies in slot
    block_table[i // block_size] * block_size + i % block_size, with block_size = reader.block_size. Read each of the
    num_keys tokens exactly once and nothing else: slots after the last token hold garbage. reader.num_kv_heads may be
    smaller than num_heads: query heads 0 to group - 1 use KV head 0, the next `group` heads KV head 1 and so on, with
    group = num_heads // num_kv_heads.

    Return [rows, num_heads, head_dim], float32: for each row and head softmax(q·k * head_dim ** -0.5) v over the keys
    that it sees. What you hold at any moment must not grow with num_keys: a tile's scores, never a whole row of them.
    You may call your fold(): its `rows` are then the group * rows queries of a KV head, in an order that you choose.
    The mask has to follow the same order.

    Example: block size 4, TILE 32, block_table [7, 2, 5], num_keys 9 -> one call of read, with the slots
    [28, 29, 30, 31, 8, 9, 10, 11, 20].
    """
    raise NotImplementedError


def attend_in_parts(num_keys: int, num_workers: int, run: Run) -> Tensor:
    """Attention of one row by several workers at once, with the same bits however many workers there are.

        num_keys     the row sees the keys 0 to num_keys - 1
        num_workers  1 or more
        run          run(shares) -> parts. shares[w] is a list of ranges (first, end): worker w attends to the keys
                     first to end - 1 of each, range by range. Call run once

    Cut the keys at the multiples of PART: (0, PART), (PART, 2 * PART) and so on; the last part may be short. Each part
    goes to one worker, and none gets more than its fair share: the number of parts / num_workers, rounded up. A worker
    may have none.

    parts is a list of what the workers have computed, one entry for each range, in the order in which they were done.
    That order differs from call to call. An entry has

        first         where its range began
        running_max   [heads, group]             the largest of its scores
        running_sum   [heads, group]             the sum of exp(score - running_max) over its keys
        acc           [heads, group, head_dim]   the sum of exp(score - running_max) * value over its keys

    Each is relative to its own maximum. Return softmax(scores) · values over all keys, [heads, group, head_dim] in
    float32. For the same keys it must be the same to the last bit for every number of workers, whichever of them is
    done first.

    Example: PART is 16. num_keys 40, 2 workers: the parts are (0, 16), (16, 32) and (32, 40), and shares may be
    [[(0, 16), (32, 40)], [(16, 32)]].
    """
    raise NotImplementedError


def pad_decode(batch: Batch, size: int) -> Batch:
    """A decode batch padded to `size` sequences, so that it fits a graph that was recorded for exactly that many.

    batch (nanovllm/worker/batch.py) has B sequences with one row each, B <= size; all its tensors are on the CPU.
    Return a new Batch with `size` sequences of one row each:

        its first B sequences are those of batch, in order, unchanged;
        the others must be harmless: they write nothing into the cache (slot_mapping), and they attend to exactly one
        key, that of slot 0 of block 0, because a softmax over no key at all is nan. Their token id and position are 0;
        logits_rows is every row, 0 to size - 1: a graph always computes all of them, and the caller drops the rest.

    So input_ids, positions, slot_mapping, seqlens_k and logits_rows have `size` entries, cu_seqlens_q has size + 1,
    and block_tables is [size, width], with its old width. dtypes stay what they were; max_query_len and
    max_key_len keep their values. Don't change batch.

    Example: B = 3, size = 4: cu_seqlens_q [0, 1, 2, 3, 4]; slot_mapping [17, 40, 3] -> [17, 40, 3, -1].
    """
    raise NotImplementedError
