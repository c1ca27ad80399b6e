"""Exercises of chapter 6. Edit this file, then:  python -m chapters check 6

step_cost predicts the work of each of the real engine's steps, and is compared with a count of every matrix product in
the step. pack tells the attention kernels where each sequence's rows are. token_budget says how many tokens a step may
have.
"""

from chapters.ch06_prefill_decode.roofline import Machine, StepCost
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, Scheduler


def step_cost(config: ModelConfig, itemsize: int, chunks: list[ScheduledChunk]) -> StepCost:
    """What a step computes and what it reads, counted from the model's sizes and the step's chunks.

    A chunk is the positions chunk.start to chunk.end - 1 of one sequence, with one row of the batch for each position.
    If chunk.reaches_end, a token is sampled from its last row. A number has `itemsize` bytes. Return StepCost(...) of

        linear_flops     2 FLOPs (a multiplication and an addition) for each weight and each row multiplied by it. Every
                         row is multiplied by the weight matrices of every layer. Only rows from which a token is
                         sampled are multiplied by the output matrix, which has hidden_size x vocab_size weights.
        attention_flops  A row at position p meets p + 1 keys: its own and all before it, including those that earlier
                         steps computed. Each layer spends 4 FLOPs on each such pair of a row and a key, for each of the
                         num_attention_heads query heads and each of the head_dim numbers of a head.
        weight_bytes     Every weight above, once per step, however many rows there are. A step in which nobody samples
                         does not read the output matrix.
        kv_bytes         K and V of the positions 0 to chunk.end - 1, whichever step computed them: in every layer,
                         head_dim numbers of K and as many of V, of itemsize bytes each, for each of the
                         num_key_value_heads KV heads. They are read once for each chunk, not once for each of its rows.

    The weight matrices of a layer, inputs x outputs, with config.hidden_size, config.intermediate_size and so on:

        q_proj           hidden_size x (num_attention_heads * head_dim)
        k_proj, v_proj   hidden_size x (num_key_value_heads * head_dim), each
        o_proj           (num_attention_heads * head_dim) x hidden_size
        gate_proj, up_proj   hidden_size x intermediate_size, each
        down_proj        intermediate_size x hidden_size

    num_attention_heads * head_dim need not be hidden_size. There are config.num_hidden_layers layers. Norms, biases,
    the look-up of embeddings and the writing of K and V are left out. All four results are whole numbers (int).

    Example: hidden_size 10, intermediate_size 20, 5 layers, 6 query heads, 2 KV heads, head_dim 2, vocab_size 120,
    itemsize 2. A layer has 120 + 40 + 40 + 120 + 3 * 200 = 920 weights, the output matrix 1,200. A step with one chunk,
    a decode at position 4 -> StepCost(linear_flops=11600, attention_flops=1200, weight_bytes=11600, kv_bytes=400).
    """
    raise NotImplementedError


def pack(chunks: list[ScheduledChunk]) -> tuple[list[int], list[int], list[int]]:
    """Where each sequence's rows lie in the packed batch of a step: (cu_seqlens_q, seqlens_k, logits_rows).

    The step's tokens lie one after another, chunk after chunk in the order given, without padding: chunk b has
    chunk.end - chunk.start rows, for the positions chunk.start to chunk.end - 1 of its sequence. With B chunks:

        cu_seqlens_q    B + 1 numbers: chunk b's rows are cu_seqlens_q[b] up to but not including cu_seqlens_q[b + 1].
        seqlens_k       B numbers: how many tokens the last row of chunk b attends to: every token of the sequence so
                        far, its own included, whichever step computed them.
        logits_rows     the last row of each chunk that samples (chunk.reaches_end), in order. A chunk that ends in the
                        middle of its prompt has none.

    Return three lists of ints; the caller makes tensors of them.

    Example: a decode at position 7 (start 7, end 8), then the first 3 of 10 prompt tokens (start 0, end 3)
    -> ([0, 1, 4], [8, 3], [0]).
    """
    raise NotImplementedError


def token_budget(scheduler: Scheduler, machine: Machine, limit_s: float) -> int:
    """The token budget of the next step, such that nobody waits longer than limit_s seconds for it.

    While this is checked, the engine calls it before each step, and schedules that step as if
    scheduler.max_num_batched_tokens were what it returns.

    How long a step of T tokens takes is predicted by the roofline of the weights, without attention. Bytes are read
    while FLOPs are done, so the slower of the two decides:

        machine.weight_bytes        bytes that a step reads, whatever T is
        machine.bytes_per_s         bytes that the machine reads in a second
        machine.flops_per_token     FLOPs for one token
        machine.flops_per_s         FLOPs that the machine does in a second

    Return the largest whole T whose predicted time is at most limit_s, with two corrections, in this order:

    1. At least one more than the number of sequences that are decoding: every decode gets its token in every step, and
       a prompt always moves on, if only by one token. A sequence is decoding if it is in scheduler.running and has
       exactly one token to compute: len(seq.tokens) - seq.num_computed_tokens. This holds even if no T fits.
    2. At most scheduler.max_num_batched_tokens.

    Change nothing. Floating-point rounding does not matter here: no check comes close enough to a whole T.

    Example: 4e9 bytes, 1e11 bytes/s, 4e9 FLOPs a token, 2e13 FLOPs/s. Reading takes 0.04 s, a token's FLOPs 0.0002 s.
    With limit_s 0.0501 -> 250 (or max_num_batched_tokens, if that is smaller). With limit_s 0.03 and 6 sequences
    decoding, no T fits -> 7.
    """
    raise NotImplementedError
