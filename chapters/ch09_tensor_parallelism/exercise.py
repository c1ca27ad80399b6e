"""Exercises of chapter 9. Edit this file, then:  python -m chapters check 9

Each function works in the real engine while it is checked: in every row-parallel layer, in the embedding and in the
loader of every rank. The ranks are then threads of one process, so that all of them run your code (ranks.py says how).
"""

from typing import Any

from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.parallel_layers import ParallelDecoder, RowParallelLinear


def row_parallel_forward(layer: RowParallelLinear, x: Tensor) -> Tensor:
    """y = x W^T + b of a row-parallel layer, as one rank computes it. (Replaces RowParallelLinear.forward.)

    x [T, in] has this rank's columns of the whole x: the column-parallel layer before this one has computed no others.
    layer.weight [out, in] has this rank's columns of the whole weight, and `out` is whole. layer.bias [out] (or None)
    is the whole bias, and every rank has it. Return the whole y, [T, out], the same on every rank.

    A product is computed by

        layer.product(x, weight, bias) -> Tensor       bias may be None

    which is x W^T + bias. Call it instead of torch's functions: the engine may have laid out layer.weight in an order
    of its own, which only layer.product can read. You need two things from the group:

        layer.group.rank                 0, 1, ... layer.group.size - 1; with size 1 this rank is alone
        layer.group.all_reduce(x) -> x   adds up x over all ranks, in place

    Call all_reduce exactly once on every rank: all ranks must call it equally often, or some wait forever. Don't change
    x, the weight or the bias.

    Example: 2 ranks, the whole weight [[1, 1, 1, 1]], bias [100], and the whole x [[1, 2, 3, 4]]. Rank 0 has x [[1, 2]]
    and weight [[1, 1]], rank 1 has x [[3, 4]] and weight [[1, 1]]. Both have bias [100], and both return [[110]].
    """
    raise NotImplementedError


def embed(decoder: ParallelDecoder, input_ids: Tensor) -> Tensor:
    """The embeddings of a step's tokens, with a table that is spread over the ranks. (Replaces ParallelDecoder.embed.)

    input_ids [T] are token ids of the whole vocabulary. decoder.embed_tokens [n, hidden_size] has this rank's rows of
    the embedding table, n = decoder.config.vocab_size of them: rank 0 has the words 0 to n - 1, rank 1 the words n to
    2n - 1, and so on.

    Return [T, hidden_size] in the table's dtype, the same on every rank: row t is the embedding of input_ids[t],
    whichever rank holds it. You need these from the group:

        decoder.group.rank, decoder.group.size
        decoder.group.all_reduce(x) -> x     adds up x over all ranks, in place

    Call all_reduce once on every rank, even if this rank holds none of the step's words. With size 1 it returns its
    input. Don't change input_ids or decoder.embed_tokens: what you give to all_reduce must be a tensor of your own.

    Example: 2 ranks, n = 3. Rank 0 holds [[1], [2], [3]], rank 1 holds [[4], [5], [6]]. For input_ids [5, 0] both
    return [[6], [1]].
    """
    raise NotImplementedError


def read_share(part: Any, name: str, config: ModelConfig, rank: int, size: int) -> Tensor:
    """Read this rank's share of one tensor of a checkpoint's file. (Replaces the slicing in WeightFiles.read.)

    part is the tensor in the file. Nothing of it has been read yet:

        part.get_shape() -> list[int]       [rows, columns] of a weight, [rows] of a bias or of a norm's weight
        part[a:b]                           reads the rows a to b - 1 and returns them as a tensor
        part[:, c:d]                        reads the columns c to d - 1
        part[:]                             reads all

    The file stores weights as [out, in], the way y = x W^T reads them. Read as many numbers as you return, and no more:
    a checkpoint may be larger than this machine's memory.

    The last two parts of the name say which share is meant ("model.layers.7.self_attn." or the like may come before
    them). config has the sizes of the whole model. `size` ranks share it; this one is number `rank`.

        embed_tokens.weight, lm_head.weight             words: rank 0 the first ones, rank 1 the next, ...
        gate_proj, up_proj (.weight and .bias)          column-parallel: the outputs (rows in the file), likewise
        q_proj (.weight and .bias)                      column-parallel, by whole query heads, likewise
        k_proj, v_proj (.weight and .bias)              column-parallel, by whole KV heads, see below
        o_proj.weight, down_proj.weight                 row-parallel: the inputs (columns in the file), likewise
        o_proj.bias, down_proj.bias, all others (norms) whole, on every rank
        qkv_proj, gate_up_proj (.weight and .bias)      merged: q, k and v (gate and up) in one tensor, one below the
                                                        other. This engine merges them when it loads; some checkpoints
                                                        have them so in the file. Return what the rank would have of q,
                                                        of k and of v, one below the other (torch.cat).

    All heads have config.head_dim rows. config.num_attention_heads, config.intermediate_size and the vocabulary can be
    divided by `size`. config.num_key_value_heads can be, too, or `size` is a multiple of it. In the second case there
    are not enough KV heads, and each rank has a copy of one: the one that its query heads belong to. Query heads share
    KV heads in order: with 6 query heads and 2 KV heads, the heads 0, 1, 2 belong to KV head 0 and the others to 1.

    Example: 6 query heads, 2 KV heads, head_dim 4, hidden size 12, so q_proj.weight is [24, 12] and k_proj.weight
    [8, 12]. Rank 1 of 2 reads rows 12 to 23 of q_proj.weight and rows 4 to 7 of k_proj.weight.
    """
    raise NotImplementedError
