"""Weights of 8 and 4 bits: how they lie in memory, and what is computed with them, in plain PyTorch (chapter 12).

32 neighbours along the input dimension are a group and share a scale, perhaps a minimum, both float16:

    weight = scale * (code - zero) + minimum

    format | code       | zero | minimum | bytes of a group      the first three are those of GGUF files, whose
    Q8_0   | 8 bits     | 128  | none    | 34                    groups hold the same numbers; the last one is for
    Q4_0   | 4 bits     | 8    | none    | 18                    files of 8 bits with zero points (features/published)
    Q4_1   | 4 bits     | 0    | yes     | 20
    Q8_M   | 8 bits     | 128  | yes     | 36

An activation row is quantized in the same groups when it meets such a weight: to whole numbers from -127 to 127, with a
float32 scale. So a row's result depends on that row only. quantized.c computes the same with integer instructions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.worker.batch import cdiv

GROUP_SIZE = 32
BLOCK_ROWS = 32  # rows of a weight (outputs) that lie together in memory
SMALLEST = 2.0**-100  # of a group's largest magnitude: its inverse is finite


@dataclass(frozen=True)
class Format:
    """weight = scale * (code - zero) + minimum. A code of 4 bits shares its byte with the code 16 places after it."""

    name: str
    bits: int
    zero: int
    has_minimum: bool

    @property
    def code_bytes(self) -> int:
        """Bytes of a group's codes."""
        return GROUP_SIZE * self.bits // 8

    @property
    def group_bytes(self) -> int:
        return self.code_bytes + 2 + 2 * self.has_minimum


Q8_0, Q4_0, Q4_1 = Format("Q8_0", 8, 128, False), Format("Q4_0", 4, 8, False), Format("Q4_1", 4, 0, True)
Q8_M = Format("Q8_M", 8, 128, True)
FORMATS = {f.name: f for f in (Q8_0, Q4_0, Q4_1, Q8_M)}
BYTES_PER_NUMBER: dict[str | None, float] = {"int8": 34 / 32, "int4": 22 / 32}  # at most
BYTES_PER_NUMBER |= {name: form.group_bytes / GROUP_SIZE for name, form in FORMATS.items()}


@dataclass(frozen=True)
class QuantizedRows:
    """A weight [n, k] in groups, row by row. The last group of a row may be partly empty: its other weights count as 0.

    codes: uint8 [n, num_groups, code_bytes]; scales, minimums: float16 [n, num_groups]. order: int32 [num_groups * 32],
    the input that each place of a group stands for, -1: none; None: the inputs as they come.
    """

    format: Format
    k: int
    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None
    order: Tensor | None = None

    def dequantize(self) -> Tensor:
        """float32 [n, k]."""
        codes = unpack_nibbles(self.codes) if self.format.bits == 4 else self.codes
        weights = codes.float().sub_(self.format.zero).mul_(self.scales.float()[..., None])
        if self.minimums is not None:
            weights.add_(self.minimums.float()[..., None])
        return out_of_order(weights.flatten(1), self.order, self.k)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """[..., 16] bytes -> [..., 32] codes: the low halves, then the high halves."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def in_groups(x: Tensor) -> Tensor:
    """float32 [rows, num_groups, 32] of x [rows, k], with zeros after the last number."""
    return F.pad(x.float(), (0, -x.shape[1] % GROUP_SIZE)).unflatten(1, (-1, GROUP_SIZE))


def into_order(x: Tensor, order: Tensor | None) -> Tensor:
    """The columns of x [n, k] as the groups of a weight have them, with zeros where an order says -1."""
    return x if order is None else F.pad(x, (0, 1))[:, order]  # -1: the last column, which has been added


def out_of_order(x: Tensor, order: Tensor | None, k: int) -> Tensor:
    """The opposite: [n, k] of x [n, num_groups * 32]."""
    if order is None:
        return x[:, :k]
    columns = x.new_empty(len(x), k + 1)
    columns[:, order] = x
    return columns[:, :k]


def quantize_q8_0(weight: Tensor) -> QuantizedRows:
    """Nearest rounding of a weight [n, k]: a group's largest magnitude becomes 127."""
    groups = in_groups(weight)
    scales = (groups.abs().amax(-1) / 127).half()
    codes = (groups / scales.float().clamp_min(2**-24)[..., None]).round_().clamp_(-127, 127).add_(Q8_0.zero)
    return QuantizedRows(Q8_0, weight.shape[1], codes.to(torch.uint8), scales)


class QuantizedWeight(nn.Module):
    """A weight [n, k] as the kernels read it: blocks of 32 rows, so that 32 outputs are computed side by side.

    blocks: uint8 [num_blocks, num_groups, 32 * group_bytes]. For each group of k: 32 scales, 32 minimums if the format
    has them, and the codes in steps of 4 bytes, [code_bytes / 4][32 rows][4]. Rows after the last one have scale 0.
    order: as of QuantizedRows.
    """

    blocks: Tensor
    order: Tensor | None

    def __init__(self, form: Format, n: int, k: int, order: Tensor | None = None) -> None:
        """All zeros, until put() brings the rows."""
        from nanovllm.worker.cpu.memory import memory_for_weight

        super().__init__()
        self.format, self.shape = form, torch.Size((n, k))
        self.num_groups = cdiv(k if order is None else len(order), GROUP_SIZE)
        shape = cdiv(n, BLOCK_ROWS), self.num_groups, BLOCK_ROWS * form.group_bytes
        self.register_buffer("blocks", memory_for_weight(prod(shape), torch.uint8).view(shape))
        self.register_buffer("order", order)

    @classmethod
    def of(cls, groups: QuantizedRows) -> "QuantizedWeight":
        weight = cls(groups.format, len(groups.codes), groups.k, groups.order)
        weight.put(0, groups)
        return weight

    def put(self, first: int, groups: QuantizedRows) -> None:
        """The rows from `first` on."""
        numbers = [groups.scales] + ([] if groups.minimums is None else [groups.minimums])
        sources = groups.codes.contiguous().view(torch.int32), torch.stack(numbers, dim=-1)
        num_rows = len(groups.codes)
        lead = min(-first % BLOCK_ROWS, num_rows)  # rows that end a block which others have begun
        whole, rest = divmod(num_rows - lead, BLOCK_ROWS)
        block, row = divmod(first, BLOCK_ROWS)
        next_block = block + (lead > 0)
        for view, source in zip(self._views(self.blocks), sources, strict=True):
            places = view.permute(0, 3, 1, 2)  # [num_blocks, 32, num_groups, steps or 1 or 2]
            if lead:
                places[block, row : row + lead] = source[:lead]
            places[next_block : next_block + whole] = source[lead : num_rows - rest].unflatten(0, (whole, BLOCK_ROWS))
            if rest:
                places[next_block + whole, :rest] = source[num_rows - rest :]

    def rows(self, ids: Tensor) -> QuantizedRows:
        """Some rows of the weight, as they were before they were laid out in blocks."""
        block, row = ids // BLOCK_ROWS, ids % BLOCK_ROWS
        return self._groups(*(x[block, :, :, row] for x in self._views(self.blocks)))

    def chunks(self, num_blocks: int) -> Iterable[QuantizedRows]:
        """All rows and those after the last one, so many blocks at a time. rows() takes several times as long."""
        for blocks in self.blocks.split(num_blocks):
            yield self._groups(*(x.permute(0, 3, 1, 2).flatten(0, 1) for x in self._views(blocks)))

    def _views(self, blocks: Tensor) -> Iterable[Tensor]:
        """Codes, 4 in an int32, and float16 scales and minimums: [num_blocks, num_groups, steps or 1 or 2, 32]."""
        size = BLOCK_ROWS * self.format.code_bytes
        codes, numbers = blocks[..., -size:].view(torch.int32), blocks[..., :-size].view(torch.float16)
        return (x.unflatten(-1, (-1, BLOCK_ROWS)) for x in (codes, numbers))

    def _groups(self, codes: Tensor, numbers: Tensor) -> QuantizedRows:
        scales, minimums = numbers.unbind(-1) if self.format.has_minimum else (numbers[..., 0], None)
        codes = codes.contiguous().view(torch.uint8)
        return QuantizedRows(self.format, self.shape[1], codes, scales, minimums, self.order)


class MergedWeight(nn.Module):
    """Weights of one input whose outputs stand side by side, each in a format and an order of its own.

    num_groups: the largest of the parts'.
    """

    def __init__(self, parts: Iterable[QuantizedWeight]) -> None:
        super().__init__()
        parts = list(parts)
        self.parts: Any = nn.ModuleList(parts)
        self.shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.num_groups: int = max(part.num_groups for part in parts)
        self.kernel_args: Any = None  # what a kernel keeps with the weight


def concatenate(parts: Iterable[Any]) -> Any:
    """The rows of all parts: tensors, or QuantizedRows of one format and order."""
    first, *others = parts = list(parts)
    if not others:
        return first
    if isinstance(first, Tensor):
        return torch.cat(parts)
    codes, scales = torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts])
    minimums = None if first.minimums is None else torch.cat([part.minimums for part in parts])
    return replace(first, codes=codes, scales=scales, minimums=minimums)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [T, k] -> whole numbers, float32 [T, num_groups, 32], and scales, float32 [T, num_groups].

    A group below SMALLEST counts as 0. One with a number that is not finite has a scale that is not: neither is what is
    computed from it.
    """
    groups = in_groups(x)
    largest = groups.abs().amax(-1)
    largest = torch.where(largest < SMALLEST, 0, largest)
    # Not 127 / largest, which PyTorch computes as 127 * (1 / largest), rounded twice.
    inverse = torch.where(largest == 0, 0, torch.tensor(127.0, dtype=torch.float32, device="cpu") / largest)
    return (groups * inverse[..., None]).round(), largest / 127


def quantized_linear(
    x: Tensor, weight: MergedWeight, bias: Tensor | None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y = x W^T + b, [T, n] in out_dtype, or in x's: both sides are put together again and multiplied as float32."""
    outputs = []
    for part in weight.parts:
        codes, scales = quantize_rows(into_order(x, part.order))
        restored = out_of_order((codes * scales[..., None]).flatten(1), part.order, x.shape[1])
        # Never the whole output head as float32. What fits in a cache is several times as fast.
        y = torch.cat([restored @ groups.dequantize().T for groups in part.chunks(32)], dim=-1)
        outputs.append(y[:, : part.shape[0]])
    y = torch.cat(outputs, dim=-1)
    return (y if bias is None else y + bias.float()).to(out_dtype or x.dtype)


def quantized_lookup(input_ids: Tensor, weight: MergedWeight, dtype: torch.dtype) -> Tensor:
    """The rows of an embedding table that lies in a file as a quantized weight."""
    (part,) = weight.parts
    return part.rows(input_ids).dequantize().to(dtype)
