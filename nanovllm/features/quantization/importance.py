"""How large the inputs of each linear layer are, measured before weights are rounded to 4 bits (chapter 12).

In y = W x the error of a weight comes out multiplied by its input. So the squared error counts as much as the mean
square of the input. Some inputs are a thousand times as large as others, and they are the same ones whatever the text.
So no text is needed: random tokens go through the model once, layer by layer, with one layer in memory.

With the C kernels, and sums in one order, every processor measures the same and so chooses the same codes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import ForwardContext, Linear, RotaryEmbedding, building, plain_linear
from nanovllm.worker.model import Decoder

NUM_SEQS, SEQ_LEN = 2, 128
FIRST_LAYER = "model.layers.0."
LEAST_IMPORTANCE = 1e-4  # of an input, beside the layer's mean: random tokens may have missed what another text brings


def measure_importance(
    model: Decoder,
    read: Callable[[str], Any],
    whole: ModelConfig,
    make_decoder: Callable[[ModelConfig], Decoder],
    kernels: Kernels,
) -> dict[Linear, Tensor]:
    """{linear layer: mean squares of its inputs, float32 [k], as multiples of their mean}; of this rank's share.

    read(name): this rank's share of a tensor of the checkpoint. whole, make_decoder: what model was made with; its own
    weights are not touched.
    """
    config = model.config
    if kernels.library is not None:  # the same codes for every processor and every kind of KV cache
        kernels = load_cpu_kernels(config, model.norm.weight.dtype, everywhere=True) or TORCH_KERNELS
    dtype = model.norm.weight.dtype
    with building(dtype, torch.device("cpu")):
        decoder = make_decoder(replace(whole, num_hidden_layers=1))
    del decoder.embed_tokens  # memory that was reserved and not touched, as the output head's
    decoder.embed_tokens = read("model.embed_tokens.weight")
    norm, seen = decoder.norm, dict[Linear, Tensor]()
    batch = random_batch(whole.vocab_size)
    rotary = RotaryEmbedding(config, SEQ_LEN, dtype, torch.device("cpu"))
    context = ForwardContext(batch, rotary.cos_sin(batch.positions), kernels)
    kv_shape = NUM_SEQS, SEQ_LEN, config.num_key_value_heads, config.head_dim
    k_cache, v_cache = torch.zeros(2, *kv_shape, dtype=dtype, device="cpu")
    hidden, residual = decoder.embed(batch.input_ids).to(dtype), None
    decoder.embed_tokens = None  # the file's pages that were read leave memory with it
    importance: dict[Linear, Tensor] = {}
    for i in range(config.num_hidden_layers):
        with building(dtype, torch.device("cpu")):
            decoder.layers[0] = layer = decoder.make_layer(config, i)  # layers differ in what they compute
        for name, place in decoder.checkpoint_tensors():
            if name.startswith(FIRST_LAYER):
                place.copy_(read(name.replace(FIRST_LAYER, f"model.layers.{i}.")))
        for linear in (part for part in layer.modules() if isinstance(part, Linear)):
            linear.product = measuring_product(linear, seen, kernels)
        hidden, residual = layer(hidden, residual, (k_cache, v_cache), context)
        for ours, linear in zip(linears_of(model.layers[i]), linears_of(layer), strict=True):
            if linear not in seen:  # an expert that no token has met
                seen[linear] = torch.zeros(linear.weight.shape[1], dtype=torch.float32, device="cpu")
            importance[ours] = seen[linear]
            linear.product = plain_linear  # what measures it holds it: otherwise its memory would wait for Python's gc
        seen.clear()
    norm.weight.copy_(read("model.norm.weight"))
    importance[model.lm_head] = mean_squares(norm(hidden, residual, context)[0])
    return {linear: relative(measured) for linear, measured in importance.items()}


def linears_of(module: nn.Module) -> list[Linear]:
    """Those whose weights may be rounded."""
    return [part for part in module.modules() if isinstance(part, Linear) and not part.stays_exact]


def measuring_product(linear: Linear, seen: dict[Linear, Tensor], kernels: Kernels) -> Callable[..., Tensor]:
    def product(x: Tensor, weight: Any, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> Tensor:
        seen[linear] = mean_squares(x)
        reordered = None if kernels.library is None else kernels.reorder_weight(weight)
        if reordered is None:
            return plain_linear(x, weight, bias, out_dtype)
        return kernels.linear(x, reordered, bias, out_dtype)

    return product


def mean_squares(x: Tensor) -> Tensor:
    """The mean square of each column of x [T, k]: float32 [k]."""
    return (sum_in_order(x.double().square()) / len(x)).float()


def sum_in_order(x: Tensor) -> Tensor:
    """Over the first dimension, one after another; sum() has an order for each kind of processor."""
    return x.cumsum(0)[-1]


def random_batch(vocab_size: int) -> Batch:
    """Low ids are drawn more often, for vocabularies are nearly in order of frequency; their first are single bytes."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    uniform = torch.rand(NUM_SEQS, SEQ_LEN, generator=generator, dtype=torch.float32, device="cpu")
    first = 256 if vocab_size > 1000 else 1
    positions = torch.arange(SEQ_LEN, device="cpu").repeat(NUM_SEQS)
    ends = torch.arange(NUM_SEQS + 1, dtype=torch.int32, device="cpu") * SEQ_LEN
    return Batch(
        input_ids=(first * (vocab_size / first) ** uniform).long().clamp(max=vocab_size - 1).flatten(),
        positions=positions,
        slot_mapping=torch.arange(NUM_SEQS * SEQ_LEN, device="cpu"),
        cu_seqlens_q=ends,
        seqlens_k=ends.diff(),
        block_tables=torch.arange(NUM_SEQS, dtype=torch.int32, device="cpu")[:, None],  # one block a sequence
        logits_rows=torch.arange(0, device="cpu"),
        max_query_len=SEQ_LEN,
        max_key_len=SEQ_LEN,
    )


def relative(measured: Tensor) -> Tensor:
    """As multiples of their mean. All alike where they are all 0, or not numbers: the weights are at fault then."""
    multiples = measured / (sum_in_order(measured.double()) / len(measured)).float()
    return torch.where(multiples.isfinite(), multiples, 1) + LEAST_IMPORTANCE
