"""From a checkpoint on disk, safetensors or GGUF, to parameters in place.

Files are memory-mapped. Each tensor is copied once from the map into its place: converted if the dtypes differ, and
reordered if its layer reads it in another order. Pages that have been read are given back, so starting takes little
more memory than the weights.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.files.tensor_files import PART_ROWS, WeightFiles, as_stored
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.layers import Linear, building, plain_linear
from nanovllm.worker.model import Decoder

logger = logging.getLogger("nanovllm")


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: Any = None,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    kernels: Kernels = TORCH_KERNELS,
    dummy: bool = False,
    read_linear: Callable[[Decoder, Linear, "StoredWeight"], None] | None = None,
) -> Decoder:
    """Build the decoder and read the weights into it; dummy: random ones instead.

    group: this rank among those that share the model (features/parallel/group.py), which reads its share only.
    quantization, kernels: see features/quantization/convert.py. kv_cache_dtype: changes nothing here, but a warning may
    follow: the keys of some weights lose much in int8. read_linear: reads a layer's weight, unless it is one of few
    bits, into a layout of its own; None: weights are read as they are. Raises ValueError or FileNotFoundError for files
    that are not this model's, before a weight is read.
    """
    if config.published is not None and device.type != "cpu":
        config = replace(config, published=replace(config.published, unpacks=True))
    config = config if dummy else as_stored(directory, config)
    make_decoder = Decoder if group is None else group.make_decoder
    # The whole model without memory: the names and shapes that the files have to hold; a rank reads its share of them.
    whole = dict(_uninitialised(Decoder, config, dtype, torch.device("meta")).checkpoint_tensors())
    files = WeightFiles(directory, config, whole, dummy)
    files.check_memory(dtype, quantization, device, 1 if group is None else group.size)
    model = _uninitialised(make_decoder, config, dtype, device)
    places = dict(model.checkpoint_tensors())
    if group is not None:
        files.shares = group.shares(whole, places)
    if kv_cache_dtype == "int8":
        from nanovllm.features.quantization.key_biases import warn_of_int8_keys

        warn_of_int8_keys(files, config)
    with torch.no_grad():
        if files.are_published and quantization is None and device.type != "cpu":
            unpacked = str(dtype).removeprefix("torch.")
            logger.warning("%s: the quantized weights are unpacked to %s on a GPU", directory, unpacked)
        elif quantization is not None or files.are_quantized:
            from nanovllm.features.quantization.convert import quantize_weights

            # What becomes a weight of few bits is taken out of `places`; the rest is read as it is, or unpacked.
            quantize_weights(model, places, files, quantization, kernels, config, make_decoder)
        for linear, names in model.linear_weights():
            if linear.product is plain_linear:
                stored = StoredWeight(files, {name: places.pop(name) for name in names}, dtype)
                if read_linear is None:
                    stored.read()
                else:
                    read_linear(model, linear, stored)
        for name, place in places.items():
            read_tensor(files, name, place)
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class StoredWeight:
    """A linear layer's weight that is still in its files. places: by name, where its projections belong."""

    files: WeightFiles
    places: dict[str, Tensor]
    dtype: torch.dtype

    def read(self) -> None:
        """Raises ValueError for numbers that are not finite."""
        for name, place in self.places.items():
            read_tensor(self.files, name, place)

    def parts(self) -> Iterator[tuple[int, Tensor]] | None:
        """(first row, rows), in the compute dtype. None if a projection begins at no multiple of PART_ROWS."""
        sizes = [len(place) for place in self.places.values()]
        if any(size % PART_ROWS for size in sizes[:-1]):
            return None
        return (
            (first + (rows.start or 0), unpacked(part).to(self.dtype).contiguous())
            for name, first in zip(self.places, accumulate(sizes, initial=0), strict=False)
            for rows, part in self.files.read_in_parts(name)
        )


def read_tensor(files: WeightFiles, name: str, place: Tensor) -> None:
    """Raises ValueError for numbers that are not finite."""
    for rows, part in files.read_in_parts(name):
        read_into(place[rows], part, name, files.directory)


def read_into(place: Tensor, weight: Any, name: str, directory: Path) -> None:
    """Copy a checkpoint's tensor into a parameter; QuantizedRows are unpacked.

    Raises ValueError for numbers that are not finite there.
    """
    place.copy_(unpacked(weight))
    # One fast pass; the sum itself may overflow, in float16.
    if not place.sum().isfinite() and not place.isfinite().all():
        raise ValueError(f"{name} in {directory} has numbers that are NaN, or infinite in {place.dtype}")


def unpacked(weight: Any) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def _uninitialised(
    make_decoder: Callable[[ModelConfig], Decoder], config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> Decoder:
    """Parameters of the right shapes. Their memory is reserved, and not touched before the weights come in."""
    with building(dtype, device):
        return make_decoder(config)
