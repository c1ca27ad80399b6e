"""From the tensors of a GGUF file to weights: in groups as they stand in the file, or as ordinary tensors (chapter 12).

Q8_0, Q4_0 and Q4_1 are the engine's own formats (formats.py), F32, F16 and BF16 are ordinary. All other types are
unpacked by the `gguf` package and held as int8.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.quantization.formats import FORMATS, GROUP_SIZE, Q8_0, QuantizedRows, concatenate, quantize_q8_0
from nanovllm.files.gguf_file import FLOATS, GGUFFile, GGUFTensor, gguf_package

logger = logging.getLogger("nanovllm")

ROWS_AT_A_TIME = 4096  # are unpacked: never the whole output head as float32


class GGUFWeights:
    """To the loader, what an open safetensors file is."""

    def __init__(self, path: Path) -> None:
        self.file = GGUFFile(path)
        self.names = list(self.file.tensors)
        if unpacked := sorted({t.type.name for t in self.file.tensors.values()} - {*FLOATS, *FORMATS}):
            logger.warning("%s: weights of type %s are unpacked and held as int8", path.name, ", ".join(unpacked))

    def get_slice(self, name: str) -> "GGUFSlice":
        return GGUFSlice(self.file, self.file.tensors[name])


class GGUFSlice:
    """A tensor that is read when a share of it is asked for."""

    places_per_number = 1.0

    def __init__(self, file: GGUFFile, tensor: GGUFTensor) -> None:
        self.file = file
        self.tensor = tensor
        self.type = tensor.type.name

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def get_dtype(self) -> str:
        """What it is read as: the name of a floating-point type, or of a format of groups."""
        return self.type if self.type in FLOATS or self.type in FORMATS else Q8_0.name

    def __getitem__(self, share: tuple[Any, ...]) -> Tensor | QuantizedRows:
        """Some rows, and of a matrix some columns, which are whole groups. Ordinary ones are not copied.

        Of several matrices, share begins with the number of one.
        """
        tensor = self.tensor
        rows = torch.frombuffer(self.file.data, dtype=torch.uint8, count=tensor.num_bytes, offset=tensor.start)
        if len(tensor.shape) == 3:
            rows, share = rows.view(tensor.shape[0], -1)[share[0]], share[1:]
        rows = rows.view(tensor.shape[-2] if len(tensor.shape) > 1 else tensor.shape[0], -1)  # [n, bytes of a row]
        if tensor.num_heads:  # llama.cpp rotates neighbours, so the file has the two halves of each head interleaved
            order = torch.arange(len(rows), device="cpu").view(tensor.num_heads, -1, 2).transpose(1, 2).flatten()
            rows = rows[order[share[0]]]
        else:
            rows = rows[share[0]]
        self.file.will_read(rows.nbytes)
        if self.type in FLOATS:
            numbers = rows.view(getattr(torch, FLOATS[self.type]))
            return numbers[:, share[1]] if len(share) > 1 else numbers[:, 0]
        if self.type in FORMATS:
            return self._groups(rows, share[1])
        return concatenate(self._unpack(part, share[1]) for part in rows.split(ROWS_AT_A_TIME))

    def _groups(self, rows: Tensor, columns: slice) -> QuantizedRows:
        """In the file a group is its scale, its minimum if there is one, and its codes."""
        form = FORMATS[self.type]
        groups = rows.unflatten(1, (-1, form.group_bytes))[:, columns.start // GROUP_SIZE : columns.stop // GROUP_SIZE]
        numbers = groups[..., : -form.code_bytes].contiguous().view(torch.float16)  # [n, num_groups, 1 or 2]
        codes = groups[..., -form.code_bytes :]
        codes = codes ^ 128 if form == Q8_0 else codes.contiguous()  # there from -128 to 127, here from 0 to 255
        minimums = numbers[..., 1] if form.has_minimum else None
        return QuantizedRows(form, columns.stop - columns.start, codes, numbers[..., 0], minimums)

    def _unpack(self, rows: Tensor, columns: slice) -> QuantizedRows:
        weights = torch.from_numpy(gguf_package().dequantize(rows.numpy(), self.tensor.type))
        return quantize_q8_0(weights[:, columns])
