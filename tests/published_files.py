"""Checkpoints as other packers write them: by the formats' definitions, number by number, and what they unpack to.

Each packer takes a weight [n, k] and returns ({ending of a tensor's name: tensor}, the weight that these stand for, in
float32). The tensors' bits are put together one code at a time, as the packers' own loops do it.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

Packed = tuple[dict[str, Tensor], Tensor]
LINEAR = re.compile(r".*(_proj|in_proj_qkv|in_proj_z|in_proj_qkvz)\.weight")  # no embeddings, heads, routers
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def in_words(codes: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """int32 [m, n * bits / 32] of whole numbers [m, n]: place i of a word holds code order[i] of its own."""
    per_word = 32 // bits
    rows, words = codes.tolist(), []
    for row in rows:
        row = row + [0] * (-len(row) % per_word)
        line = []
        for first in range(0, len(row), per_word):
            word = 0
            for place in range(per_word):
                word |= row[first + (order[place] if order else place)] << bits * place
            line.append(word - (1 << 32) if word >> 31 else word)
        words.append(line)
    return torch.tensor(words, dtype=torch.int32)


def rounded(
    weight: Tensor,
    bits: int,
    size: int,
    symmetric: bool,
    of_input: Tensor | None = None,
    dtype: torch.dtype = torch.half,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [n, k], scales and zero points [n, groups], and what they stand for. of_input: the group of each input."""
    n, k = weight.shape
    of_input = torch.arange(k) // size if of_input is None else of_input
    num_groups, top = int(of_input.max()) + 1, 2**bits - 1
    scales, zeros = torch.empty(n, num_groups), torch.empty(n, num_groups)
    for group in range(num_groups):
        part = weight[:, of_input == group]
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (top // 2)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = (-low / scales[:, group]).round()
    scales = scales.to(dtype).float()
    codes = (weight / scales[:, of_input] + zeros[:, of_input]).round().clamp(0, top)
    return codes.int(), scales, zeros.int(), scales[:, of_input] * (codes - zeros[:, of_input])


def gptq(
    bits: int = 4, size: int = 32, symmetric: bool = True, act_order: bool = False, version: int = 1
) -> Callable[[str, Tensor], Packed]:
    """AutoGPTQ's QuantLinear.pack; version 2: zero points as they are."""

    def pack(name: str, weight: Tensor) -> Packed:
        k = weight.shape[1]
        of_input = torch.arange(k) // (size if size > 0 else k)
        if act_order:
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            of_input = of_input[torch.randperm(k, generator=generator)]
        codes, scales, zeros, unpacked = rounded(weight, bits, size, symmetric, of_input)
        stored_zeros = (zeros - int(version == 1)) & (2**bits - 1)
        return {
            "qweight": in_words(codes.T, bits).new_tensor(in_words(codes, bits).T.tolist()),
            "qzeros": in_words(stored_zeros.T, bits),
            "scales": scales.T.contiguous().half(),
            "g_idx": of_input.int(),
        }, unpacked

    return pack


def awq(size: int = 32) -> Callable[[str, Tensor], Packed]:
    """AutoAWQ's WQLinear_GEMM.from_linear."""

    def pack(name: str, weight: Tensor) -> Packed:
        codes, scales, zeros, unpacked = rounded(weight, 4, size, symmetric=False)
        return {
            "qweight": in_words(codes.T, 4, AWQ_ORDER),
            "qzeros": in_words(zeros.T, 4, AWQ_ORDER),
            "scales": scales.T.contiguous().half(),
        }, unpacked

    return pack


def packed(bits: int = 4, size: int = 32, symmetric: bool = True) -> Callable[[str, Tensor], Packed]:
    """compressed-tensors' pack-quantized, in groups, or with a scale for each row (size = -1)."""

    def pack(name: str, weight: Tensor) -> Packed:
        n, k = weight.shape
        codes, scales, zeros, unpacked = rounded(weight, bits, size if size > 0 else k, symmetric, dtype=torch.bfloat16)
        tensors = {
            "weight_packed": in_words(codes, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = in_words(zeros.T, bits).T.contiguous()
        return tensors, unpacked

    return pack


def integers(size: int = -1, symmetric: bool = True) -> Callable[[str, Tensor], Packed]:
    """compressed-tensors' int-quantized; size 0: a scale for the whole tensor."""

    def pack(name: str, weight: Tensor) -> Packed:
        n, k = weight.shape
        flat = weight if size else weight.reshape(1, -1)
        codes, scales, zeros, unpacked = rounded(flat, 8, size if size > 0 else flat.shape[1], symmetric)
        tensors = {"weight": (codes.view(n, k) - 128).to(torch.int8), "weight_scale": scales if size else scales[0]}
        if not symmetric:
            tensors["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return tensors, unpacked.view(n, k)

    return pack


def floats(
    block: tuple[int, int] | None = None, ending: str = "weight_scale_inv", dtype: torch.dtype = torch.float8_e4m3fn
) -> Callable[[str, Tensor], Packed]:
    """FP8; block (0, 0) or None: a scale for all, a 0: all rows or all inputs."""

    def pack(name: str, weight: Tensor) -> Packed:
        n, k = weight.shape
        rows, inputs = ((block or (0, 0))[0] or n), ((block or (0, 0))[1] or k)
        grid = -(-n // rows), -(-k // inputs)
        scales = torch.empty(grid)
        for i in range(grid[0]):
            for j in range(grid[1]):
                part = weight[i * rows : (i + 1) * rows, j * inputs : (j + 1) * inputs]
                scales[i, j] = part.abs().max() / torch.finfo(dtype).max
        whole = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(inputs, 1)[:, :k]
        codes = (weight / whole).to(dtype)
        return {"weight": codes, ending: scales if block else scales.view(())}, codes.float() * whole

    return pack


# bitsandbytes' create_normal_map: of a bell-shaped weight, each of them stands for equally many numbers.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]  # fmt: skip


def nf4(is_nested: bool = True, size: int = 64) -> Callable[[str, Tensor], Packed]:
    """QLoRA's; nested: the scales of blocks are in 8 bits themselves, with a scale for 256 of them."""

    def pack(name: str, weight: Tensor) -> Packed:
        table, flat = torch.tensor(NF4), F.pad(weight.flatten(), (0, -weight.numel() % size)).view(-1, size)
        scales = flat.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": size, "dtype": "bfloat16", "shape": [*weight.shape]}
        tensors = {"weight.absmax": scales, "weight.quant_map": table}
        if is_nested:
            offset, steps = scales.mean(), torch.linspace(-1, 1, 256)
            rest = F.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
            nested = rest.abs().amax(1)
            places = (rest / nested[:, None])[..., None].sub(steps).abs().argmin(-1)
            scales = (steps[places] * nested[:, None]).flatten()[: len(scales)] + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
            tensors |= {"weight.absmax": places.flatten()[: len(scales)].to(torch.uint8)}
            tensors |= {"weight.nested_absmax": nested, "weight.nested_quant_map": steps}
        codes = (flat / flat.abs().amax(1, keepdim=True))[..., None].sub(table).abs().argmin(-1)
        unpacked = (table[codes] * scales[:, None]).flatten()[: weight.numel()].view(weight.shape)
        pairs = codes.flatten()[: weight.numel()].view(-1, 2)
        tensors |= {"weight": (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)}
        tensors |= {
            "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode())).to(torch.uint8)
        }
        return tensors, unpacked

    return pack


def publish(
    source: Path,
    folder: Path,
    pack: Callable[[str, Tensor], Packed],
    config: dict[str, Any],
    *,
    is_packed: Callable[[str], bool] = lambda name: bool(LINEAR.fullmatch(name)),
    more: dict[str, Tensor] | None = None,
) -> tuple[Path, Path]:
    """(the checkpoint with packed weights, the same with the weights that these stand for, in float32).

    config: what quantization_config says. more: tensors that the first one has besides.
    """
    published, unpacked = (shutil.copytree(source, folder / name) for name in ("published", "unpacked"))
    ours, theirs = dict(more or {}), dict[str, Tensor]()
    for name, weight in load_file(source / "model.safetensors").items():
        theirs[name] = weight
        if is_packed(name):
            tensors, theirs[name] = pack(name, weight.float())
            module = name.removesuffix(".weight")
            ours |= {f"{module}.{ending}": tensor.contiguous() for ending, tensor in tensors.items()}
        else:
            ours[name] = weight
    save_file(ours, published / "model.safetensors", metadata={"format": "pt"})
    save_file({n: x.contiguous() for n, x in theirs.items()}, unpacked / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((published / "config.json").read_text())
    (published / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
    return published, unpacked


def compressed(kind: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    fields = {"quant_method": "compressed-tensors", "format": kind, "quantization_status": "compressed"}
    return fields | {"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None} | more


def weights_of(bits: int = 4, kind: str = "int", strategy: str = "group", symmetric: bool = True, **more: Any) -> dict:
    """What compressed-tensors says of weights."""
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False} | more


def gptq_config(bits: int = 4, size: int = 32, **more: Any) -> dict[str, Any]:
    fields = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": True, "desc_act": False}
    return fields | {"checkpoint_format": "gptq", "lm_head": False} | more


AWQ_CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
FP8_CONFIG = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}

# name -> (packer, quantization_config)
FORMATS: dict[str, tuple[Callable[[str, Tensor], Packed], dict[str, Any]]] = {
    "gptq": (gptq(), gptq_config()),
    "gptq, asymmetric": (gptq(symmetric=False), gptq_config(sym=False)),
    "gptq, act order": (gptq(act_order=True), gptq_config(desc_act=True)),
    "gptq, rows": (gptq(size=-1), gptq_config(size=-1)),
    "gptq, 8 bits": (gptq(bits=8), gptq_config(bits=8)),
    "gptq, 8 bits, asymmetric": (gptq(bits=8, symmetric=False), gptq_config(bits=8, sym=False)),
    "gptq v2": (gptq(symmetric=False, version=2), gptq_config(sym=False, checkpoint_format="gptq_v2")),
    "awq": (awq(), AWQ_CONFIG),
    "pack-quantized": (packed(), compressed("pack-quantized", weights_of(group_size=32))),
    "pack-quantized, asymmetric": (
        packed(symmetric=False),
        compressed("pack-quantized", weights_of(symmetric=False, group_size=32)),
    ),
    "pack-quantized, rows": (packed(size=-1), compressed("pack-quantized", weights_of(strategy="channel"))),
    "pack-quantized, 8 bits": (packed(bits=8), compressed("pack-quantized", weights_of(8, group_size=32))),
    "int-quantized": (integers(), compressed("int-quantized", weights_of(8, strategy="channel"))),
    "int-quantized, asymmetric": (
        integers(symmetric=False),
        compressed("int-quantized", weights_of(8, strategy="channel", symmetric=False)),
    ),
    "int-quantized, groups": (integers(size=32), compressed("int-quantized", weights_of(8, group_size=32))),
    "int-quantized, tensor": (integers(size=0), compressed("int-quantized", weights_of(8, strategy="tensor"))),
    "float-quantized": (
        floats((1, 0), "weight_scale"),
        compressed("float-quantized", weights_of(8, "float", "channel")),
    ),
    "float-quantized, blocks": (
        floats((32, 16), "weight_scale"),
        compressed("float-quantized", weights_of(8, "float", "block", block_structure="32x16")),
    ),
    "float-quantized, tensor": (
        floats(None, "weight_scale"),
        compressed("float-quantized", weights_of(8, "float", "tensor")),
    ),
    "bitsandbytes": (nf4(), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "bitsandbytes, scales in full": (nf4(is_nested=False), {"load_in_4bit": True}),
    "fp8": (floats((32, 32)), FP8_CONFIG),
    "fp8, rows": (floats((1, 0), "weight_scale"), FP8_CONFIG | {"weight_block_size": None}),
    "fp8, tensor": (floats(), {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None}),
}
