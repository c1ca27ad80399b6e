"""An adapter's files: read, and refused where this engine would compute something else (chapter 15; arXiv:2106.09685).

In the format of the `peft` package a directory has adapter_config.json and adapter_model.safetensors. For a linear
layer y = W x it holds two thin matrices, A [r, in] and B [out, r], and the layer becomes y = W x + scale * B (A x).
"""

import hashlib
import logging
import math
import os
import re
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.sandbox import Sandbox, TooMuch
from nanovllm.checks.values import check_number, shorten, typed
from nanovllm.config import EngineConfig
from nanovllm.core.sequence import SequencePart
from nanovllm.features.lora.lora_request import LoRARequest
from nanovllm.files.config_json import read_json
from nanovllm.files.hub import resolve_checkpoint

if TYPE_CHECKING:
    from nanovllm.core.scheduler import SchedulerOutput
    from nanovllm.worker.batch import Batch

logger = logging.getLogger("nanovllm")

Shape = tuple[int, int]
PREFIX, SUFFIXES = "base_model.model.", {".lora_A.weight": "A", ".lora_B.weight": "B"}
# Fields of adapter_config.json that are read elsewhere, or that change nothing here: who made the adapter, how it was
# trained.
DESCRIPTIONS = (
    "auto_mapping base_model_name_or_path revision task_type inference_mode peft_version peft_type target_modules "
    "exclude_modules layers_to_transform layers_pattern lora_dropout r rank_pattern lora_alpha alpha_pattern "
    "use_rslora init_lora_weights eva_config loftq_config runtime_config ensure_weight_tying "
    "megatron_core qalora_group_size"
).split()
# What another value than one of these asks for, this engine does not do.
NEUTRAL: dict[str, tuple[Any, ...]] = {"bias": ("none",)}
# These begin from other weights than the checkpoint's, so that the adapter belongs to those.
OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
FLOATS = ("bfloat16", "float16", "float32")
# A model that sees images has its language model's layers under one of these.
WRAPPED = re.compile(r"^model\.(language_model|text_model)\.")
# Fields that say for which modules an adapter is, and what is special about some.
TARGET_FIELDS = (
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
)
# What these are, or lists of.
KINDS: dict[str, tuple[type, str]] = {
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), (str, "text")),
    "layers_to_transform": (int, "whole number"),
}
# Matches the regular expressions among them: those of real adapters take 0.1 s.
MATCHER = Sandbox("nanovllm.features.lora.sandboxed_patterns", seconds=2, max_mb=128)


class MissingAdapter(ValueError):
    """There is no adapter where one should be."""


def linear_shapes(config: ModelConfig) -> dict[str, Shape]:
    """{path: (out, in)} of the layers that an adapter may change: all linear ones but experts and their gates."""
    hidden, q_size = config.hidden_size, config.num_attention_heads * config.head_dim
    kv_size = config.num_key_value_heads * config.head_dim
    attention = {"q_proj": (q_size, hidden), "k_proj": (kv_size, hidden), "v_proj": (kv_size, hidden)}
    attention |= {"o_proj": (hidden, q_size)}
    mlp = dict.fromkeys(("gate_proj", "up_proj"), (config.intermediate_size, hidden))
    mlp |= {"down_proj": (hidden, config.intermediate_size)}
    shapes = {} if config.pooling is not None else {"lm_head": (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer_shapes = attention
        if config.hybrid is not None:
            from nanovllm.features.hybrid.adapters import attention_shapes

            layer_shapes = (attention if i not in config.hybrid.linear_layers else {}) | attention_shapes(config, i)
        shapes |= {f"model.layers.{i}.self_attn.{name}": shape for name, shape in layer_shapes.items()}
        if i not in config.expert_layers:
            shapes |= {f"model.layers.{i}.mlp.{name}": shape for name, shape in mlp.items()}
    return shapes


def stored_linear_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The same by the paths of a checkpoint."""
    if config.hybrid is None:
        return linear_shapes(config)
    from nanovllm.features.hybrid.adapters import stored_shapes

    return stored_shapes(linear_shapes(config), config)


@dataclass(frozen=True, eq=False)
class Adapter(SequencePart):
    """An adapter in the CPU's memory: its files may change or go while requests wait for it.

    lora_id:  stands for these weights, in the hashes of blocks and in slots; the registry chooses it
    digest:   SHA-256 of all that it computes
    matrices: {path of a linear layer: (A [r, in], scale * B [out, r])}
    """

    request: LoRARequest
    lora_id: int
    digest: str
    matrices: dict[str, tuple[Any, Any]]

    @staticmethod
    def add_to_batch(batch: "Batch", output: "SchedulerOutput") -> "Batch":
        from nanovllm.features.lora.slots import BatchAdapters  # what a request needs loads no model

        batch.parts["adapter"] = BatchAdapters.from_scheduler_output(output)
        return batch

    @classmethod
    def open(cls, request: LoRARequest, model: ModelConfig, config: EngineConfig) -> "Adapter":
        """Read and check it. Raises one ValueError that lists what does not fit."""
        import torch  # not at the top: `import nanovllm` stays light
        from safetensors import SafetensorError
        from safetensors.torch import load

        where, folder = f"adapter {request.lora_name!r}", adapter_folder(request)
        fields = read_json(folder / "adapter_config.json")
        options = {name: value for name, value in fields.items() if value is not None}
        _check_options(options, folder)
        is_root = typed(options, "use_rslora", False, folder / "adapter_config.json")  # arXiv:2312.03732
        dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
        try:
            data = (folder / "adapter_model.safetensors").read_bytes()
            tensors = load(data)
        except (SafetensorError, OSError, KeyError) as error:  # KeyError: a dtype that PyTorch does not have
            raise ValueError(f"{where}: adapter_model.safetensors in {folder} cannot be read: {error}") from error
        if base := _base_tables(tensors, [model.vocab_size, model.hidden_size]):
            text = "are taken to be the base model's, which are used instead"
            logger.warning("%s: %s %s", where, ", ".join(base), text)
        modules, problems = _modules_of({name: tensor for name, tensor in tensors.items() if name not in base})
        targets = _targets_of(options, list(modules), folder)
        if left_out := modules.keys() - targets.keys():
            text = "tensors of layers that adapter_config.json does not target are left out, as peft does"
            logger.warning("%s: %s: %s", where, text, shorten(sorted(left_out)))
        shapes = stored_linear_shapes(model)
        # An embedder is trained without what follows its layers, and then its names have no prefix.
        is_bare = model.pooling is not None and not any(module.startswith("model.") for module in targets)
        matrices: dict[str, tuple[Any, Any]] = {}
        scales: dict[str, float] = {}
        for module, target in targets.items():
            path = WRAPPED.sub("model.", f"model.{module}" if is_bare else module)
            given = {which: list(tensor.shape) for which, tensor in modules[module].items()}
            out_size, in_size = shapes.get(path, (0, 0))
            if path not in shapes:
                problems.append(f"{module} is no linear layer that this model has and an adapter may change")
            elif path in scales:
                problems.append(f"{path} has two names in it, one of them {module}")
            elif given != {"A": [target.rank, in_size], "B": [out_size, target.rank]}:
                expected = f"A [{target.rank}, {in_size}] and B [{out_size}, {target.rank}]"
                problems.append(f"{path} has {', '.join(f'{n} {shape}' for n, shape in given.items())}, not {expected}")
            elif not 0 < target.rank <= config.max_lora_rank:
                problems.append(f"{path} has rank {target.rank}, and max_lora_rank is {config.max_lora_rank}")
            else:
                scales[path] = target.alpha / (math.sqrt(target.rank) if is_root else target.rank)
                a = modules[module]["A"].to(dtype, copy=True)
                b = (modules[module]["B"].float() * scales[path]).to(dtype)
                matrices[path] = a, b
                if not a.isfinite().all() or not b.isfinite().all():
                    problems.append(f"{path} has numbers that are NaN, or infinite in {dtype}")
        if problems or not matrices:
            shown = problems[:10] + [f"and {len(problems) - 10} more"] * (len(problems) > 10)
            lines = "\n  ".join(shown or ["it has no tensors of the layers that it targets"])
            base = options.get("base_model_name_or_path")
            raise ValueError(f"{where} in {folder} (made for {shorten(base)}) does not fit this model:\n  {lines}")
        digest = hashlib.sha256(data)
        digest.update(repr(scales).encode())
        if model.hybrid is not None:
            from nanovllm.features.hybrid.adapters import split_matrices

            matrices = split_matrices(matrices, model)
        return cls(request, request.lora_int_id, digest.hexdigest(), matrices)


def adapter_folder(request: LoRARequest) -> Path:
    """Where its files are: its path, or where the hub's were downloaded to."""
    where, folder = f"adapter {request.lora_name!r}", Path(os.path.expanduser(request.lora_path))
    if not os.path.isdir(folder):
        try:
            folder = resolve_checkpoint(request.lora_path)
        except FileNotFoundError as error:
            reason = f"{where}: {shorten(request.lora_path)} is neither a directory nor a hub id that can be downloaded"
            raise MissingAdapter(f"{reason} ({error})") from error
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / name).is_file():
            raise MissingAdapter(f"{where}: {folder} has no {name}; PEFT's save_pretrained() writes it")
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


def _base_tables(tensors: dict[str, Any], shape: list[int]) -> list[str]:
    """What peft writes beside the matrices of an output head: that head as it was before, of this shape."""
    ending = "lm_head.base_layer.weight"
    return [name for name, tensor in sorted(tensors.items()) if name.endswith(ending) and list(tensor.shape) == shape]


def _modules_of(tensors: dict[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """({module, as the trained model has it: {"A": [r, in], "B": [out, r]}}, what is wrong with other tensors)."""
    modules: dict[str, dict[str, Any]] = {}
    problems = []
    for name, tensor in sorted(tensors.items()):
        suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
        kind, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        if name.endswith(("base_layer.weight", "embed_tokens.weight")):
            problems.append(f"{name} is the base model's; save_pretrained(..., save_embedding_layers=False)")
        elif not suffix or not name.startswith(PREFIX):
            problems.append(f"{name} is no A or B of a linear layer")
        elif kind not in FLOATS:
            problems.append(f"{name} is {kind}, only {', '.join(FLOATS)} are read")
        elif len(shape) != 2:
            problems.append(f"{name} is {shape}, not a matrix")
        else:
            module = name.removeprefix(PREFIX).removesuffix(suffix)
            modules.setdefault(module, {})[SUFFIXES[suffix]] = tensor
    return modules, problems


class Target(NamedTuple):
    """What adapter_config.json says of a module that the adapter is for."""

    rank: int
    alpha: float


def _targets_of(options: dict[str, Any], modules: list[str], folder: Path) -> dict[str, Target]:
    """Those of the modules that the adapter is for. Raises ValueError."""
    where = folder / "adapter_config.json"
    rank_pattern, alpha_pattern = (typed(options, name, {}, where) for name in ("rank_pattern", "alpha_pattern"))
    fields = {name: options[name] for name in TARGET_FIELDS if name in options}
    for name, (kind, noun) in KINDS.items():
        given = fields.get(name, [])
        if not all(type(each) is kind for each in (given if isinstance(given, list) else [given])):
            raise ValueError(f"{where}: {name} must be a {noun} or a list of them, found {shorten(given)}")
    try:
        keys = MATCHER.answer(fields, modules)
    except TooMuch as error:
        remedy = "name the layers without repetitions"
        raise ValueError(f"{where}: to match its regular expressions {error}: {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    targets = {}
    for module, found in zip(modules, keys, strict=True):
        if found is not None:
            rank_key, alpha_key = found
            rank = options.get("r", 8) if rank_key is None else rank_pattern[rank_key]
            alpha = options.get("lora_alpha", 8) if alpha_key is None else alpha_pattern[alpha_key]
            rank = check_number(f"{where}: r", rank, Integral)
            targets[module] = Target(rank, check_number(f"{where}: lora_alpha", alpha, Real))
    return targets
