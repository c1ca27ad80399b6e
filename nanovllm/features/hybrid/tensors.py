"""The tensors of a hybrid checkpoint under this engine's names, each a part of what the files hold (chapter 16).

What is merged there and not here: q, k and v of one projection, all experts of a layer. What lies in another order:
Qwen3-Next's projections go key head by key head; in GGUF files neighbours among the value heads belong to different key
heads (llama.cpp's graph repeats the keys that way). GGUF files also hold norms plus 1, and -exp(A_log).
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.hybrid.hybrid_config import HybridConfig
from nanovllm.features.quantization.formats import GROUP_SIZE, QuantizedRows, concatenate

logger = logging.getLogger("nanovllm")

HEADS = "heads that predict several tokens at once"
SKIPPED = {  # what the text of one token after another does not need: what it is, and how its names look
    "the vision tower": re.compile(r"(model\.)?visual\.|v\.|mm\."),
    HEADS: re.compile(r"mtp\.|.*\.nextn\."),
}


@dataclass(frozen=True)
class Part:
    """Looks like an open file that holds one tensor: rows and columns of what `file` holds under `name`.

    rows, columns   their numbers there, in the order wanted; None: all, as they are
    expert          of a tensor of three dimensions, which matrix
    change          of the numbers
    """

    file: Any
    name: str
    rows: Tensor | None = None
    columns: Tensor | None = None
    expert: int | None = None
    change: Callable[[Any], Tensor] | None = None

    @property
    def unused_axis(self) -> int:
        """Which of three axes is not used: the experts', or that of what a convolution's channel sees beside itself."""
        return 1 if self.expert is None else 0

    def get_slice(self, name: str) -> "Part":
        return self

    def get_dtype(self) -> str:
        return self.file.get_slice(self.name).get_dtype()

    @property
    def places_per_number(self) -> float:
        return self.file.get_slice(self.name).places_per_number

    def stored_shape(self) -> list[int]:
        return list(self.file.get_slice(self.name).get_shape())

    def get_shape(self) -> list[int]:
        shape = self.stored_shape()
        if len(shape) == 3:
            del shape[self.unused_axis]
        for axis, chosen in enumerate((self.rows, self.columns)):
            if chosen is not None:
                shape[axis] = len(chosen)
        return shape

    def __getitem__(self, share: tuple[slice, ...]) -> Tensor | QuantizedRows:
        rows, *columns = share
        runs = [rows] if self.rows is None else runs_of(self.rows[rows])
        if self.columns is not None:
            columns = [slice(0, self.stored_shape()[-1])]
        whole = concatenate([self.read(run, *columns) for run in runs])
        if self.columns is not None:
            whole = take_columns(whole, self.columns[share[1]])
        return whole if self.change is None else self.change(whole)

    def read(self, *share: slice) -> Tensor | QuantizedRows:
        """Rows that are neighbors in the file."""
        stored, index = self.file.get_slice(self.name), list[Any](share)
        if len(stored.get_shape()) == 3:
            index.insert(self.unused_axis, self.expert or 0)
        return stored[tuple(index)]


def runs_of(rows: Tensor) -> list[slice]:
    """The rows, in their order, as slices of neighbors."""
    breaks = (rows.diff() != 1).nonzero().flatten() + 1
    return [slice(int(run[0]), int(run[-1]) + 1) for run in rows.tensor_split(breaks)]


def take_columns(weight: Tensor | QuantizedRows, order: Tensor) -> Tensor | QuantizedRows:
    """Some columns of a weight. Of one in groups, whole groups."""
    if isinstance(weight, Tensor):
        return weight.index_select(1, order)
    groups = order.view(-1, min(GROUP_SIZE, len(order)))
    order = groups[:, 0] // GROUP_SIZE
    if not torch.equal(groups, order[:, None] * GROUP_SIZE + torch.arange(groups.shape[1], device="cpu")):
        raise ValueError(f"heads of {weight.format.name} weights must have a multiple of {GROUP_SIZE} numbers")
    codes, scales = weight.codes.index_select(1, order), weight.scales.index_select(1, order)
    minimums = None if weight.minimums is None else weight.minimums.index_select(1, order)
    return replace(weight, codes=codes, scales=scales, minimums=minimums, k=min(len(order) * GROUP_SIZE, weight.k))


def hybrid_tensors(files: Mapping[str, Any], config: ModelConfig, is_gguf: bool) -> dict[str, Any]:
    """{name of a parameter of Decoder: what it is read from}. A name that nobody knows stays as it is."""
    found, skipped = dict[str, Any](), set[str]()
    for stored, file in files.items():
        name = stored.replace("model.language_model.", "model.").replace(".linear_attn.", ".self_attn.")
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) >= config.num_hidden_layers:  # in GGUF files they come after the model's own
            skipped.add(HEADS)
        elif what := next((what for what, pattern in SKIPPED.items() if pattern.match(name)), None):
            skipped.add(what)
        else:
            found |= parts_of(name, Part(file, stored), config, is_gguf)
    for what in sorted(skipped):
        logger.info("The checkpoint has tensors of %s, which this engine does not use", what)
    return found


def parts_of(name: str, whole: Part, config: ModelConfig, is_gguf: bool) -> dict[str, Part]:
    """A stored tensor as the parameters that are made of it."""
    sizes: HybridConfig = config.hybrid
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    if is_gguf:
        whole = undo_gguf(whole, module, kind, config)
        for axis, order in enumerate((whole.rows, whole.columns)):
            if order is not None:
                check_size(whole, axis, len(order))
    if module in PROJECTIONS and kind in ("weight", "bias"):  # and not scales of activations, which are not used
        rows = projection_rows(module, sizes)
        check_size(whole, 0, sum(map(len, rows.values())))
        if module == "conv1d" and len(whole.stored_shape()) == 3:
            check_size(whole, whole.unused_axis, 1)
        if is_gguf and whole.rows is not None:
            rows = {part: whole.rows[order] for part, order in rows.items()}
        return {f"{parent}.{part}.{kind}": replace(whole, rows=order) for part, order in rows.items()}
    if stacked := re.fullmatch(r"(.*\.experts)\.([a-z_]+_proj)(\.weight)?", name):  # all experts of a layer
        return expert_parts(stacked[1], stacked[2], whole, config)
    return {name: whole}


def check_size(whole: Part, axis: int, size: int) -> None:
    """Raise ValueError unless the file's tensor has this size: parts of a larger one would fit all the same."""
    shape = whole.stored_shape()
    if shape[axis : axis + 1] != [size]:
        raise ValueError(
            f"{whole.name} has the shape {shape}; the sizes in the configuration ask for {size} in axis {axis}"
        )


PROJECTIONS = ("in_proj_qkv", "in_proj_qkvz", "in_proj_ba", "conv1d")


def projection_rows(module: str, sizes: HybridConfig) -> dict[str, Tensor]:
    """{a part of a projection: its rows in the checkpoint}."""
    key_heads, group = sizes.num_key_heads, sizes.num_value_heads // sizes.num_key_heads
    prefix = "conv" if module == "conv1d" else "in_proj"
    if module in ("in_proj_qkv", "conv1d"):
        widths = {"q": sizes.key_size, "k": sizes.key_size, "v": sizes.value_size}
        parts = torch.arange(sizes.conv_size, device="cpu").split(list(widths.values()))
        return {f"{prefix}_{x}": rows for x, rows in zip(widths, parts, strict=True)}
    by_head = {"b": group, "a": group}
    if module == "in_proj_qkvz":
        by_head = {"q": sizes.key_dim, "k": sizes.key_dim} | dict.fromkeys("vz", group * sizes.value_dim)
    rows = torch.arange(key_heads * sum(by_head.values()), device="cpu").view(key_heads, -1)
    parts = rows.split(list(by_head.values()), dim=1)
    return {f"{prefix}_{x}": part.flatten() for x, part in zip(by_head, parts, strict=True)}


def expert_parts(path: str, kind: str, whole: Part, config: ModelConfig) -> dict[str, Part]:
    """Matrices of single experts. kind: gate_up_proj [E, 2 * size, hidden], or one projection."""
    size, parts = config.moe_intermediate_size, dict[str, Part]()
    check_size(whole, 0, config.num_experts)
    if kind == "gate_up_proj":
        check_size(whole, 1, 2 * size)
    for expert in range(config.num_experts):
        for half, part in enumerate(("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)):
            rows = torch.arange(half * size, (half + 1) * size, device="cpu") if kind == "gate_up_proj" else None
            parts[f"{path}.{expert}.{part}.weight"] = replace(whole, rows=rows, expert=expert)
    return parts


def undo_gguf(whole: Part, module: str, kind: str, config: ModelConfig) -> Part:
    """What llama.cpp's converter has changed. Value heads: head j of each key head comes before head j + 1 of any."""
    sizes: HybridConfig = config.hybrid
    key_heads, value_heads = sizes.num_key_heads, sizes.num_value_heads
    # Where each value head is in the file.
    heads = torch.arange(value_heads, device="cpu").view(-1, key_heads).T.flatten()
    if not config.architecture.startswith("Qwen3_5"):
        heads = heads.sort().values
    values = (heads[:, None] * sizes.value_dim + torch.arange(sizes.value_dim, device="cpu")).flatten()
    if kind == "A_log":
        return replace(whole, rows=heads, change=lambda x: (-x.double()).log())
    if kind == "dt_bias" or module in ("in_proj_a", "in_proj_b"):
        return replace(whole, rows=heads)
    if module in ("in_proj_qkv", "conv1d"):
        return replace(
            whole, rows=torch.cat((torch.arange(2 * sizes.key_size, device="cpu"), 2 * sizes.key_size + values))
        )
    if module in ("gate", "shared_expert_gate"):  # never in few bits here: rows would change experts
        return replace(whole, change=lambda x: x if isinstance(x, Tensor) else x.dequantize())
    if module == "in_proj_z":
        return replace(whole, rows=values)
    if module == "out_proj":
        return replace(whole, columns=values)
    is_offset = module.endswith("norm") and ".linear_attn.norm" not in whole.name
    return replace(whole, change=lambda x: x - 1) if is_offset else whole
