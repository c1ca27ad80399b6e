"""The files that hold a checkpoint's tensors, safetensors or GGUF, opened but not read."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.config_json import read_json
from nanovllm.validation import shorten
from nanovllm.worker.gguf_weights import GGUFWeights


def tensor_files(directory: Path, dummies: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """{tensor name: the open file that holds it}. dummies: no files; random weights that have these shapes."""
    if dummies is not None:
        return dict.fromkeys(dummies, DummyWeights(dummies))
    if directory.is_file():
        weights = GGUFWeights(directory)
        return dict.fromkeys(weights.names, weights)
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = read_json(index_path).get("weight_map")
        names = sorted(set(map(str, weight_map.values()))) if isinstance(weight_map, dict) else [""]
        if outside := [name for name in names if name != Path(name).name or not name.endswith(".safetensors")]:
            raise ValueError(
                f"{index_path}: weight_map may only name safetensors files beside it, not {shorten(outside[0])}"
            )
        paths = [directory / name for name in names]
    else:
        single = directory / "model.safetensors"  # some directories hold the same weights once more, differently named
        paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        others = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
        raise FileNotFoundError(f"{directory} has no *.safetensors file and no GGUF file, only {others}")
    if missing := [path.name for path in paths if not path.is_file()]:
        raise FileNotFoundError(f"{index_path} names files that are not there: {shorten(missing)}")
    return {name: file for file in map(open_file, paths) for name in list(file.keys())}


class DummyWeights:
    """Looks like an open file. A tensor's numbers depend on its name alone: ranks agree on them."""

    def __init__(self, shapes: Mapping[str, Tensor]) -> None:
        self._shapes = shapes

    def get_slice(self, name: str) -> "DummyTensor":
        return DummyTensor(name, list(self._shapes[name].shape))


class DummyTensor:
    def __init__(self, name: str, shape: list[int]) -> None:
        self._name, self._shape = name, shape

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, share: Any) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(self._name.encode()))
        return torch.randn(self._shape, generator=generator).mul_(0.02)[share]


def open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); download it again") from error
