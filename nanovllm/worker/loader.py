"""From a checkpoint on disk to parameters in place.

Files are memory-mapped, and each tensor is copied once, from the map into its place (converted on the way if the
dtypes differ). No second copy of the weights ever exists in anonymous memory.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.group import Group, shard_config
from nanovllm.worker.model import Decoder

# Written by old exporters; computed here from the config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def load_model(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device, group: Group = Group()
) -> Decoder:
    """Build the decoder and read this rank's share of the weights into it.

    ValueError lists missing, extra and wrongly shaped tensors.
    """
    files = _tensor_files(directory)
    model = _uninitialised(shard_config(config, group.size), dtype, device, group)
    whole = dict(_uninitialised(config, dtype, torch.device("meta")).checkpoint_tensors())
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()  # some files hold the tied tensor twice
    extra = [n for n in files if n not in whole and n not in tied and not n.endswith(IGNORED_SUFFIXES)]
    problems = [f"missing: {name}" for name in whole if name not in files]
    problems += [f"not part of a {config.architecture}: {name}" for name in extra]
    for name in whole.keys() & files.keys():
        found, expected = files[name].get_slice(name).get_shape(), list(whole[name].shape)
        if found != expected:
            problems.append(f"wrong shape: {name} is {found}, config.json implies {expected}")
    if problems:
        shown = "\n  ".join(problems[:20] + [f"and {len(problems) - 20} more"] * (len(problems) > 20))
        raise ValueError(f"the tensors in {directory} do not fit its config.json:\n  {shown}")

    with torch.no_grad():
        for name, place in model.checkpoint_tensors():
            sizes = zip(whole[name].shape, place.shape, strict=True)
            share = tuple(group.share(whole_size, size) for whole_size, size in sizes)
            place.copy_(files[name].get_slice(name)[share])
    return model.eval().requires_grad_(False)


def _uninitialised(config: ModelConfig, dtype: torch.dtype, device: torch.device, group: Group = Group()) -> Decoder:
    """Parameters of the right shapes; their memory is reserved, but not touched before the weights come in."""
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return Decoder(config, group)
    finally:
        torch.set_default_dtype(previous)


def _tensor_files(directory: Path) -> dict[str, Any]:
    """{tensor name: the open file that holds it}."""
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            paths = sorted({directory / name for name in weight_map.values()})
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index_path} is not an index of safetensors files: {error!r}") from error
    else:
        single = directory / "model.safetensors"  # some directories hold the same weights once more, differently named
        paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        others = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
        raise FileNotFoundError(f"{directory} has no *.safetensors file, only {others}; other formats are not read")
    if missing := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{index_path} names files that are not there: {', '.join(missing)}")
    return {name: file for file in map(open_file, paths) for name in list(file.keys())}


def open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); download it again") from error
