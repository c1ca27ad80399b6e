"""From a checkpoint on disk, safetensors or GGUF, to parameters in place.

Files are memory-mapped, and each tensor is copied once, from the map into its place (converted on the way if the
dtypes differ). No second copy of the weights ever exists in anonymous memory.
"""

import os
from pathlib import Path
from typing import Any

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.parallel.group import Group, shard_config
from nanovllm.features.quantization.convert import BYTES_PER_NUMBER, quantize_weights, take_embeddings
from nanovllm.features.quantization.formats import FORMATS
from nanovllm.files.tensor_files import check_tensors, tensor_files
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.model import Decoder

PHYSICAL_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def load_model(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    group: Group = Group(),
    quantization: str | None = None,
    kernels: Kernels = TORCH_KERNELS,
    dummy: bool = False,
) -> Decoder:
    """Build the decoder and read this rank's share of the weights into it; dummy: random ones instead."""
    whole = dict(_uninitialised(config, dtype, torch.device("meta")).checkpoint_tensors())
    source = directory, whole if dummy else None
    files = tensor_files(*source)
    dtypes = check_tensors(files, whole, config, directory)
    # A rank on a GPU has one of its own; those on a CPU share its memory.
    on_gpu = device.type == "cuda"
    memory = torch.cuda.mem_get_info(device)[0] * group.size if on_gpu else PHYSICAL_MEMORY
    number_bytes = BYTES_PER_NUMBER.get(quantization, dtype.itemsize)
    needed = sum(tensor.numel() * BYTES_PER_NUMBER.get(dtypes[name], number_bytes) for name, tensor in whole.items())
    if needed > memory:
        raise ValueError(f"the weights in {directory} need {needed / 1e9:.1f} GB of {memory / 1e9:.1f} GB of memory")
    in_groups = not FORMATS.keys().isdisjoint(dtypes.values())
    if in_groups and quantization is not None:
        raise ValueError(f"{directory} holds quantized weights already; leave quantization={quantization!r} out")

    def read(name: str) -> Any:
        """This rank's share of a tensor, still in the mapped file."""
        sizes = zip(whole[name].shape, shapes[name], strict=True)
        share = tuple(group.share(whole_size, size) for whole_size, size in sizes)
        return files[name].get_slice(name)[share]

    model = _uninitialised(shard_config(config, group.size), dtype, device, group)
    places = dict(model.checkpoint_tensors())
    shapes = {name: place.shape for name, place in places.items()}
    with torch.no_grad():
        if in_groups or quantization is not None:
            quantize_weights(model, places, read, quantization, kernels)
            if quantization is not None:
                files = tensor_files(*source)  # another map: what the first has brought into memory leaves with it
            take_embeddings(model, places, read, quantization)
        for name, place in places.items():
            place.copy_(read(name))
            # One fast pass; the sum itself may overflow, in float16.
            if not place.sum().isfinite() and not place.isfinite().all():
                raise ValueError(f"{name} in {directory} has numbers that are NaN, or infinite in {dtype}")
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
