"""Fewer bits for a model's weights, while they are read (chapter 12).

int8 is nearest rounding (Q8_0). int4 is a search (q4_1_search.py) for the best Q4_1, with up to INT8_SHARE of weights
in int8: those whose rounding costs most for their number. That was measured on the demo model with its channels
shuffled (examples/perplexity.py --shuffle), one kind of matrix or one layer in 4 bits at a time, by how far the
probabilities of the next token move (KL divergence, divided by the part of all weights that was rounded):

    v_proj 0.27, k_proj 0.17, down_proj 0.11, output head 0.08, up_proj 0.08, o_proj 0.07, gate_proj 0.05, q_proj 0.04

v_proj and k_proj cost most because they are small: several query heads share what they compute. The MLP of the last
layer costs seven times as much as one in the middle, that of the first layer four times. So these are kept, then
down_proj of other layers, from the ends to the middle. The output head is too large. Of a layer with experts, all or
none are kept; routers always are, in full.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from itertools import chain, groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.quantization.formats import (
    FORMATS,
    GROUP_SIZE,
    Q4_1,
    Q8_0,
    Format,
    MergedWeight,
    QuantizedRows,
    QuantizedWeight,
    quantize_q8_0,
    quantized_lookup,
)
from nanovllm.features.quantization.importance import linears_of, measure_importance
from nanovllm.features.quantization.quantized_kernels import kernels_for
from nanovllm.files.tensor_files import EMBEDDINGS, UNPACKED, WeightFiles
from nanovllm.worker.cpu.memory import give_freed_memory_back
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.layers import Linear
from nanovllm.worker.model import Decoder

logger = logging.getLogger("nanovllm")

INT8_SHARE = 0.12  # of int4's weights: 0.3125 + 0.12 * 0.21875 of the bytes of bf16, or 0.339
CHUNK_NUMBERS = 1 << 18  # are rounded at a time: they stay in a core's cache
LARGEST = torch.finfo(torch.float16).max  # of a weight

RoundRows = Callable[[Tensor], QuantizedRows]  # ordinary rows, in few bits


def quantize_weights(
    model: Decoder,
    places: dict[str, Tensor],
    files: WeightFiles,
    quantization: str | None,
    kernels: Kernels,
    whole: ModelConfig,
    make_decoder: Callable[[ModelConfig], Decoder],
) -> None:
    """Give every linear layer a quantized weight and take out of places what has been read.

    What the file holds in groups is taken as it is. Without quantization, a layer of ordinary tensors only stays one,
    and an ordinary tensor that is merged with quantized ones is held as int8. So is the output head of a checkpoint
    whose layers others have quantized: in 16 bits it would take more memory than all layers of a small model, and every
    step reads it.

    places: {name in the checkpoint: where the tensor goes}. whole, make_decoder: what model was made with; of ranks,
    whole has the sizes of all shares together.
    """
    layers, size = linears_of(model), whole.vocab_size // model.config.vocab_size
    if not layers[0].weight.is_cpu:
        raise ValueError("weights of 8 and 4 bits are computed with on a CPU only; CUDA_VISIBLE_DEVICES= hides a GPU")
    if size > 1:
        check_shares(model, size)
    if files.are_quantized and quantization is not None:
        found = f"{files.directory} holds quantized weights already"
        raise ValueError(f"{found}; leave quantization={quantization!r} out")
    quantized = kernels_for(kernels)
    importance: dict[Linear, Tensor] = {}
    if quantization == "int4":
        warn_of_int4(size * sum(layer.weight.numel() for layer in layers))
        importance = measure_importance(model, files.read, whole, make_decoder, kernels)
        give_freed_memory_back()
    candidates = {name: place for name, place in places.items() if whole.pooling is None or name != EMBEDDINGS}
    in_8_bits = names_in_8_bits(candidates, model.config.num_hidden_layers)

    def format_of(name: str) -> Format:
        if is_in_groups(files, name):
            return FORMATS[files.stored[name]]
        return Q4_1 if quantization == "int4" and name not in in_8_bits else Q8_0

    names_of = dict(model.linear_weights())
    if files.are_published and whole.published is not None:
        from nanovllm.features.published.tensors import say_what_is_computed

        computed = [name for names in names_of.values() if not stays_ordinary(files, names) for name in names]
        rounded = [name for name in computed if not is_in_groups(files, name)]
        say_what_is_computed(files, whole.published, rounded, dtype=model.norm.weight.dtype)
    for layer in layers:
        names = names_of[layer]
        if quantization is None and stays_ordinary(files, names):
            continue
        k = layer.weight.shape[1]
        parts: list[QuantizedWeight] = []
        tensors = [PartsOfTensor(files, name, format_of(name)) for name in names]
        for _, run in groupby(tensors, key=PartsOfTensor.kind):  # neighbours of one kind: fewer and larger products
            same = list(run)
            round_rows: RoundRows = quantize_q8_0
            if same[0].format == Q4_1 and quantization == "int4":
                round_rows = searched_with(importance[layer], quantized.search_q4_1)
            parts.append(quantized_weight(same, k, round_rows))
        del layer.weight  # no longer a parameter
        layer.weight = MergedWeight(parts)
        layer.product = quantized.quantized_linear
        for name in names:
            del places[name]
    if kernels.library is None and any(isinstance(layer.weight, MergedWeight) for layer in layers):
        logger.warning(
            "quantized weights without C kernels: each step restores all of them as float32; with one request it takes "
            "about 6 times as long as with bf16 weights, and 30 times as long as with C kernels"
        )
    take_embeddings(model, places, files, quantization)


def check_shares(model: Decoder, size: int) -> None:
    """Raises ValueError if one of `size` ranks has a part of a group."""
    from nanovllm.features.parallel.parallel_layers import ROW_PARALLEL

    # By their names: that of a shared expert is cut, and no RowParallelLinear.
    cut: list[Any] = [part for path, part in model.named_modules() if path.split(".")[-1] in ROW_PARALLEL]
    for layer in cut:
        k = layer.weight.shape[1]
        if k % GROUP_SIZE:
            share = f"{k} of the inputs of a layer, which is no multiple of the {GROUP_SIZE} that share a scale"
            raise ValueError(f"tensor_parallel_size={size} gives each rank {share}; choose another, or no quantization")


def searched_with(importance: Tensor, search: Callable[[Tensor, Tensor], QuantizedRows]) -> RoundRows:
    """search: see q4_1_search.py."""
    return lambda rows: search(rows, importance)


def is_in_groups(files: WeightFiles, name: str) -> bool:
    """Does the file hold this tensor in few bits, in a format of the engine's own?"""
    return files.stored[name] in FORMATS


def stays_ordinary(files: WeightFiles, names: list[str]) -> bool:
    """Is a layer's weight, of these tensors, computed as ordinary numbers, if nobody asks for fewer bits?"""
    if any(files.stored[name] == UNPACKED for name in names):
        return True
    is_head = files.are_published and names == [files.head]
    return not is_head and not any(is_in_groups(files, name) for name in names)


class PartsOfTensor:
    """A tensor that is read a few rows at a time, so that nothing but the result takes much memory.

    format   what its rows become, or are. order: of their inputs, see QuantizedRows
    """

    def __init__(self, files: WeightFiles, name: str, form: Format) -> None:
        self.name, self.format, self.num_rows = name, form, files.num_rows(name)
        parts = (part for _, part in files.read_in_parts(name))
        first = next(parts)
        self.parts = chain([first], parts)
        self.order = None if isinstance(first, Tensor) else first.order

    def kind(self) -> tuple[Format, list[int] | None]:
        """Equal for tensors that may be one weight, one below the other."""
        return self.format, None if self.order is None else self.order.tolist()


def quantized_weight(tensors: list[PartsOfTensor], k: int, round_rows: RoundRows = quantize_q8_0) -> QuantizedWeight:
    """The rows [n, k] of tensors of one kind, one below the other. round_rows: makes it of ordinary numbers."""
    num_rows = sum(tensor.num_rows for tensor in tensors)
    weight = QuantizedWeight(tensors[0].format, num_rows, k, tensors[0].order)
    first = 0
    for tensor in tensors:
        for part in tensor.parts:
            check_numbers(tensor.name, part)
            for groups in map(round_rows, in_chunks(part)) if isinstance(part, Tensor) else [part]:
                weight.put(first, groups)
                first += len(groups.codes)
    return weight


def names_in_8_bits(places: dict[str, Tensor], num_layers: int) -> set[str]:
    """Those of the tensors in places that int4 keeps in 8 bits."""
    matrices = {name: place.numel() for name, place in places.items() if place.dim() == 2}
    if "lm_head.weight" in matrices:
        matrices.pop(EMBEDDINGS, None)  # stays in its file
    names_of = defaultdict[tuple[int, str], list[str]](list)  # of a layer's projection; experts have several of each
    for name in matrices:
        if name.startswith("model.layers."):
            names_of[int(name.split(".")[2]), name.split(".")[-2]].append(name)
    from_the_ends = sorted(range(num_layers), key=lambda i: min(i + 0.5, num_layers - 1 - i))  # the last one first
    order = [(i, kind) for kind in ("v_proj", "k_proj") for i in from_the_ends]
    order += [(i, kind) for i in from_the_ends[:2] for kind in ("down_proj", "up_proj", "gate_proj")]
    order += [(i, "down_proj") for i in from_the_ends[2:]]
    budget, names = INT8_SHARE * sum(matrices.values()), set[str]()
    for key in order:
        budget -= sum(matrices[name] for name in names_of[key])
        if budget < 0:
            break
        names.update(names_of[key])
    return names


def in_chunks(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(max(1, CHUNK_NUMBERS // weight.shape[1]))


def check_numbers(name: str, part: Tensor | QuantizedRows) -> None:
    tensors = (part,) if isinstance(part, Tensor) else (part.scales, part.minimums)
    for tensor in tensors:
        if tensor is not None and not max(abs(x.item()) for x in tensor.aminmax()) <= LARGEST:  # NaN is not, either
            raise ValueError(f"{name} has numbers that are NaN, infinite or too large for a float16 scale")


def warn_of_int4(num_weights: int) -> None:
    if num_weights < 1e9:
        size = num_weights / 1e9
        logger.warning(
            "int4 costs a model of %.1f billion weights accuracy, some 5 %% of perplexity; int8 a tenth of that", size
        )


def take_embeddings(model: Decoder, places: dict[str, Tensor], files: WeightFiles, quantization: str | None) -> None:
    """The embedding table: an ordinary one is looked up in the checkpoint's file, for a step reads a few rows of it.

    One in groups is held so, once where the output head is the same tensor. An ordinary one of a GGUF file whose layers
    are quantized is left in places.
    """
    in_groups = is_in_groups(files, EMBEDDINGS)
    dtype = model.embed_tokens.dtype
    if not in_groups and not files.table_bytes(quantization):
        return
    del model.embed_tokens  # no longer a parameter
    places.pop(EMBEDDINGS, None)
    if not in_groups:
        model.embed_tokens = files.read(EMBEDDINGS)
        model.lookup = lambda input_ids, table: F.embedding(input_ids, table).to(dtype)
        return
    model.lookup = lambda input_ids, weight: quantized_lookup(input_ids, weight, dtype)
    if model.config.tie_word_embeddings:
        model.embed_tokens = model.lm_head.weight
    else:
        table = PartsOfTensor(files, EMBEDDINGS, FORMATS[files.stored[EMBEDDINGS]])
        model.embed_tokens = MergedWeight([quantized_weight([table], model.config.hidden_size)])
