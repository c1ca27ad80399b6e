"""An adapter's files: read, and refused where this engine would compute something else (chapter 15; arXiv:2106.09685).

In the format of the `peft` package a directory has adapter_config.json and adapter_model.safetensors. For a linear
layer y = W x it holds two thin matrices, A [r, in] and B [out, r], and the layer becomes y = W x + scale * B (A x).
"""

import math
import os
import re
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from nanovllm.checkpoint import ModelConfig
from nanovllm.config_json import read_json
from nanovllm.hub import resolve_checkpoint
from nanovllm.lora.request import LoRARequest
from nanovllm.validation import check_number, shorten, typed

Shape = tuple[int, int]
PREFIX, SUFFIXES = "base_model.model.", {".lora_A.weight": "A", ".lora_B.weight": "B"}
# Fields of adapter_config.json that change nothing here: who made the adapter, how it was trained, which layers it is
# for (its tensors say that), their ranks (their shapes say that).
DESCRIPTIONS = (
    "auto_mapping base_model_name_or_path revision task_type inference_mode peft_version peft_type target_modules "
    "exclude_modules layers_to_transform layers_pattern lora_dropout r rank_pattern lora_alpha alpha_pattern "
    "use_rslora init_lora_weights eva_config loftq_config runtime_config ensure_weight_tying "
    "megatron_core qalora_group_size"
).split()
# What another value than one of these asks for, this engine does not do.
NEUTRAL: dict[str, tuple[Any, ...]] = {"bias": ("none",), "arrow_config": ()}
# These begin from other weights than the checkpoint's, so that the adapter belongs to those.
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
FLOATS = ("BF16", "F16", "F32")


def linear_shapes(config: ModelConfig) -> dict[str, Shape]:
    """{path in the checkpoint: (out, in)} of the layers that an adapter may change: all linear ones but experts."""
    hidden, q_size = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    attention = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    attention |= {"o_proj": (hidden, q_size)}
    mlp = dict.fromkeys(("gate_proj", "up_proj"), (config.intermediate_size, hidden))
    mlp |= {"down_proj": (hidden, config.intermediate_size)}
    shapes = {"lm_head": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.self_attn.{name}": shape for name, shape in attention.items()}
        if i not in config.expert_layers:
            shapes |= {f"model.layers.{i}.mlp.{name}": shape for name, shape in mlp.items()}
    return shapes


@dataclass(frozen=True)
class Adapter:
    """The tensors stay in the mapped file until they are asked for.

    scales: {path of a linear layer: its scale}. file: an open safetensors file.
    """

    scales: dict[str, float]
    file: Any

    @classmethod
    def open(cls, request: LoRARequest, config: ModelConfig, max_lora_rank: int) -> "Adapter":
        """Read and check it. Raises one ValueError that lists what does not fit."""
        from safetensors import SafetensorError, safe_open  # not at the top: `import nanovllm` stays light

        where = f"adapter {request.lora_name!r}"
        folder = adapter_folder(request)
        options = read_json(folder / "adapter_config.json")
        _check_options(options, folder)
        try:
            file = safe_open(folder / "adapter_model.safetensors", framework="pt")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{where}: adapter_model.safetensors in {folder} cannot be read: {error}") from error
        shapes, found, problems = linear_shapes(config), dict[str, dict[str, list[int]]](), []
        for name in file.keys():  # noqa: SIM118 (not a dict)
            suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
            path = name.removeprefix(PREFIX).removesuffix(suffix)
            tensor = file.get_slice(name)
            if name.endswith(("base_layer.weight", "embed_tokens.weight")):
                problems.append(f"{name} is the base model's; save_pretrained(..., save_embedding_layers=False)")
            elif not suffix or path not in shapes or not name.startswith(PREFIX):
                problems.append(f"{name} is no A or B of a linear layer that this model has and an adapter may change")
            elif tensor.get_dtype() not in FLOATS:
                problems.append(f"{name} is {tensor.get_dtype()}, only {', '.join(FLOATS)} are read")
            elif len(tensor.get_shape()) != 2:
                problems.append(f"{name} is {tensor.get_shape()}, not a matrix")
            elif not file.get_tensor(name).isfinite().all():
                problems.append(f"{name} has numbers that are NaN or infinite")
            else:
                found.setdefault(path, {})[SUFFIXES[suffix]] = tensor.get_shape()
        for path, pair in found.items():
            rank = pair.get("A", pair.get("B", [0])[::-1])[0]
            out_size, in_size = shapes[path]
            if pair != {"A": [rank, in_size], "B": [out_size, rank]}:
                expected = f"A [r, {in_size}] and B [{out_size}, r]"
                problems.append(f"{path} has {', '.join(f'{n} {shape}' for n, shape in pair.items())}, not {expected}")
            elif not 0 < rank <= max_lora_rank:
                problems.append(f"{path} has rank {rank}, and max_lora_rank is {max_lora_rank}")
        if problems or not found:
            shown = problems[:10] + [f"and {len(problems) - 10} more"] * (len(problems) > 10)
            lines = "\n  ".join(shown or ["it has no tensors"])
            base = options.get("base_model_name_or_path")
            raise ValueError(f"{where} in {folder} (made for {shorten(base)}) does not fit this model:\n  {lines}")
        return cls({path: _scale(options, path, pair["A"][0], folder) for path, pair in found.items()}, file)

    def tensor(self, path: str, which: str, share: tuple[slice, slice]) -> Any:
        """A part of A or of B of a linear layer."""
        return self.file.get_slice(f"{PREFIX}{path}.lora_{which}.weight")[share]


def adapter_folder(request: LoRARequest) -> Path:
    """Where its files are: its path, or where the hub's were downloaded to."""
    where, folder = f"adapter {request.lora_name!r}", Path(os.path.expanduser(request.lora_path))
    if not os.path.isdir(folder):
        try:
            folder = resolve_checkpoint(request.lora_path)
        except FileNotFoundError as error:
            reason = f"{where}: {request.lora_path!r} is neither a directory nor a hub id that can be downloaded"
            raise ValueError(f"{reason} ({error})") from error
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(f"{where}: {folder} has no {name}; PEFT's save_pretrained() writes it")
    return folder


def _check_options(options: dict[str, Any], folder: Path) -> None:
    path = folder / "adapter_config.json"
    if options.get("peft_type") != "LORA":
        raise ValueError(f"{path}: peft_type is {shorten(options.get('peft_type'))}, only 'LORA' is supported")
    for name, value in options.items():
        if name not in DESCRIPTIONS and value and value not in NEUTRAL.get(name, ()):
            raise ValueError(f"{path}: {name}={shorten(value)} is not supported; leave it out when training")
    begin = options.get("init_lora_weights", True)
    if isinstance(begin, str) and begin.lower().startswith(OTHER_BASES):
        hint = "convert it with save_pretrained(path_initial_model_for_weight_conversion=...)"
        raise ValueError(f"{path}: init_lora_weights={begin!r} changed the base model's weights, too; {hint}")


def _scale(options: dict[str, Any], path: str, rank: int, folder: Path) -> float:
    """lora_alpha, or what alpha_pattern says of this layer, by the rank or its square root (arXiv:2312.03732)."""
    where = folder / "adapter_config.json"
    alpha = options.get("lora_alpha", 8)
    for pattern, value in typed(options, "alpha_pattern", {}, where).items():
        try:
            found = re.match(rf"(.*\.)?({pattern})$", path)  # as PEFT does
        except re.error as error:
            raise ValueError(f"{where}: alpha_pattern has {shorten(pattern)}: {error}") from error
        if found:
            alpha = value
            break
    alpha = check_number(f"{where}: lora_alpha", alpha, Real)
    return alpha / math.sqrt(rank) if typed(options, "use_rslora", False, where) else alpha / rank


class KnownAdapters:
    """Which adapters requests have named so far. An id stands for one adapter as long as the engine lives."""

    def __init__(self, model: ModelConfig, enable_lora: bool, max_lora_rank: int) -> None:
        self.model, self.enable_lora, self.max_lora_rank = model, enable_lora, max_lora_rank
        self._known: dict[int, LoRARequest] = {}

    def named(self, name: Any) -> LoRARequest | None:
        return next((request for request in self._known.values() if request.lora_name == name), None)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(request.lora_name for request in self._known.values())

    def check(self, request: Any) -> int | None:
        """The id of a request's adapter; None: it has none. Raises ValueError for one that cannot be used."""
        if request is None:
            return None
        if not isinstance(request, LoRARequest):
            raise ValueError(f"lora_request must be a LoRARequest, found {shorten(request)}")
        if not self.enable_lora:
            raise ValueError(f"adapter {request.lora_name!r}: this LLM was built without enable_lora=True")
        known = self._known.get(request.lora_int_id)
        if known is None:
            Adapter.open(request, self.model, self.max_lora_rank)
            known = self._known.setdefault(request.lora_int_id, request)
        if known != request:  # K/V that was computed with the other one would be found
            raise ValueError(f"lora_int_id {request.lora_int_id} is {known}; another adapter needs another id")
        return request.lora_int_id
