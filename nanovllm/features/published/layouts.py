"""How published files lay out a weight of few bits, and how it becomes groups of 32 (chapter 12).

    weight[row, input] = scale * (code - zero)

with a scale, and perhaps a zero point, for each block of rows and inputs. The engine's own formats say the same in
other words (quantization/formats.py), so codes are taken as they are, and only scales, and minimums = -scale * zero,
become float16. Floats (FP8, NF4) have no such steps; they are rounded to Q8_0. What would lose too much on the way is
held as ordinary numbers (UNPACKED).

    layout       | tensors                                       | the codes
    gptq         | qweight qzeros scales g_idx                   | int32 [k / 8, n], 8 neighbours along k in a word
    awq          | qweight qzeros scales                         | int32 [k, n / 8], 8 neighbours along n, in AWQ_ORDER
    packed       | weight_packed weight_scale weight_shape ...   | int32 [n, k / 8], 8 neighbours along k
    integers     | weight weight_scale, perhaps weight_zero_point | int8 [n, k]
    floats       | weight weight_scale or weight_scale_inv       | float8 [n, k]
    bitsandbytes | weight weight.absmax weight.quant_map ...     | uint8 [n * k / 2, 1], the first one in the high half

The lowest bits of a word hold the first code. With 8 bits there are 4 in a word. packed, integers and floats may be
stacks [num_experts, n, k] of all experts of a layer; all of their tensors then have that dimension.
"""

import json
from collections.abc import Callable
from functools import cached_property
from math import prod
from numbers import Integral, Real
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.checks.values import check_number
from nanovllm.features.published.schemes import ALL, Scheme, pair_of
from nanovllm.features.quantization.formats import (
    GROUP_SIZE,
    Q4_0,
    Q4_1,
    Q8_0,
    Q8_M,
    QuantizedRows,
    into_order,
    quantize_q8_0,
)
from nanovllm.files.tensor_files import UNPACKED
from nanovllm.worker.batch import cdiv, round_up

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each 4 bits of a word hold, from the lowest on
FLOAT8 = ("F8_E4M3", "F8_E5M2")
FLOATS = ("F16", "BF16", "F32")
SCALES = (*FLOATS, "F8_E8M0", "U8")  # U8: an exponent
MOST_LOST = 0.01  # of an FP8 weight in Q8_0, root mean square; or of a tensor's scales in float16
SAMPLED_ROWS = 16  # are looked at, at each of SAMPLED_PLACES, before that is known
SAMPLED_PLACES = 4

Find = Callable[[str], Any]  # the open tensor of this name, or None


class PublishedWeight:
    """A weight [n, k], or several of them, as a packer has stored it. To the loader, a tensor of an open file.

    shape       [..., n, k]
    used        names of the tensors that it is made of
    is_float    what it stands for are no steps of one size: they become Q8_0
    has_stacks  a tensor may hold the weights of several experts
    """

    is_float = False
    has_stacks = False
    _codes: Any  # open tensors
    _scales: Any
    _zeros: Any

    def __init__(self, name: str, scheme: Scheme, find: Find, unpacks: bool = False) -> None:
        """name: of the tensor with the codes. unpacks: ordinary numbers are wanted.

        Raises ValueError, with a tensor's name, for what does not fit.
        """
        self.name, self.scheme, self._find, self._unpacks = name, scheme, find, unpacks
        self.used = set[str]()
        self.shape = self.check()

    def check(self) -> list[int]:
        """Look at all tensors. The weight's shape."""
        raise NotImplementedError

    def codes(self, lead: list[int], rows: slice, inputs: slice) -> Tensor:
        """uint8 [rows, inputs]."""
        raise NotImplementedError

    def scales(self, lead: list[int], rows: slice) -> Tensor:
        """float32 [rows, num_groups]."""
        raise NotImplementedError

    def zeros(self, lead: list[int], rows: slice) -> Tensor:
        """uint8 [rows, num_groups]; not asked for if is_symmetric."""
        raise NotImplementedError

    @property
    def is_symmetric(self) -> bool:
        """Are all zero points in the middle?"""
        return self._zeros is None

    # -- what the loader asks for -----------------------------------------------------------------------------------

    def get_shape(self) -> list[int]:
        return self.shape

    def get_dtype(self) -> str:
        return UNPACKED if self._unpacks or not self.fits else self.format.name

    @property
    def places_per_number(self) -> float:
        """Places in groups of 32 for each number: a group of the file's has places of its own (order_of)."""
        k = self.shape[-1]
        size = GROUP_SIZE if self.is_float else self.scheme.block[1] or k
        full, rest = divmod(k, size)
        return (full * round_up(size, GROUP_SIZE) + round_up(rest, GROUP_SIZE)) / k

    @cached_property
    def fits(self) -> bool:
        """Does the format lose little? Of whole numbers: are the scales what they were, once they are float16?"""
        if self._scales.get_dtype() == "F16":
            return True
        scales = whole(self._scales).float()
        lost = (scales.half().float() - scales).norm() / scales.norm()
        return lost.nan_to_num(posinf=1.0).item() <= MOST_LOST  # NaN: of zeros, or of what is refused when it is read

    @cached_property
    def format(self) -> Any:
        if self.is_float:
            return Q8_0
        if self.scheme.bits <= 4:
            return Q4_0 if self.is_symmetric else Q4_1
        return Q8_0 if self.is_symmetric else Q8_M

    def __getitem__(self, share: tuple[Any, ...]) -> Tensor | QuantizedRows:
        """Some rows and inputs. Of several weights, share begins with the number of one."""
        *lead, rows, inputs = share
        n, k = self.shape[-2:]
        return self.read(lead, slice(*rows.indices(n)[:2]), slice(*inputs.indices(k)[:2]))

    def read(self, lead: list[int], rows: slice, inputs: slice) -> Tensor | QuantizedRows:
        form = self.format
        if self.is_float or self.get_dtype() == UNPACKED:
            numbers = self.numbers(lead, rows, inputs)
            return numbers if self.get_dtype() == UNPACKED else quantize_q8_0(numbers)
        order, of_group = self.order(inputs)
        codes = in_groups_of_32(self.codes(lead, rows, inputs), order)
        scales, minimums = self.scales(lead, rows)[:, of_group], None
        if form.has_minimum:
            minimums = (scales * (form.zero - self.points(lead, rows, of_group))).half()
        else:
            codes += form.zero - self.middle
        if form.bits == 4:
            codes = codes[..., :16] | codes[..., 16:] << 4
        return QuantizedRows(form, inputs.stop - inputs.start, codes, scales.half(), minimums, order)

    def numbers(self, lead: list[int], rows: slice, inputs: slice) -> Tensor:
        """float32 [rows, inputs]: what is stored, unpacked."""
        groups = self.groups[inputs]
        codes = self.codes(lead, rows, inputs).float()
        return (codes - self.points(lead, rows, groups)) * self.scales(lead, rows).index_select(1, groups)

    # -- parts ------------------------------------------------------------------------------------------------------

    @property
    def middle(self) -> int:
        """Of the codes: what stands for 0 where there are no zero points."""
        return 1 << self.scheme.bits - 1

    def points(self, lead: list[int], rows: slice, groups: Tensor) -> Tensor | int:
        """Zero points of these groups: float32 [rows, len(groups)], or one for all."""
        return self.middle if self.is_symmetric else self.zeros(lead, rows).index_select(1, groups).float()

    def read_order(self, name: str, num_groups: int, k: int) -> None:
        """The group of each input, where the file says it. Raises ValueError unless all groups are of one size."""
        if not (self.scheme.has_order or self.has(name)):
            return
        found = whole(self.part(name, ("I32", "I64"), [k])).long()
        is_set = bool((found > 0).any())  # some packers write zeros, or -1, where the inputs are as they come
        if not is_set and not self.scheme.has_order:
            return
        are_groups = found.min() >= 0 and found.max() < num_groups
        if not are_groups or not (found.bincount(minlength=num_groups) == k // num_groups).all():
            raise ValueError(f"wrong groups: {name} does not divide {k} inputs into {num_groups} groups of one size")
        self.groups = found

    @cached_property
    def groups(self) -> Tensor:
        """The group of each input: [k]."""
        k = self.shape[-1]
        return torch.arange(k, device="cpu") // (self.scheme.block[1] or k)

    def order(self, inputs: slice) -> tuple[Tensor | None, Tensor]:
        """(their order, if neighbours do not share a scale; the group of each 32 places)."""
        groups = self.groups[inputs]
        order = order_of(groups)
        firsts = groups[::GROUP_SIZE] if order is None else groups[order[::GROUP_SIZE]]
        return order, firsts

    def part(self, name: str, dtypes: tuple[str, ...], *shapes: list[int]) -> Any:
        """One of the weight's tensors. Raises ValueError unless it is there in one of these shapes; none: in any."""
        found = self._find(name)
        if found is None:
            raise ValueError(f"missing: {name}")
        self.used.add(name)
        if found.get_dtype() not in dtypes:
            raise ValueError(f"wrong dtype: {name} is {found.get_dtype()}, expected {' or '.join(dtypes)}")
        if shapes and found.get_shape() not in shapes:
            raise ValueError(f"wrong shape: {name} is {found.get_shape()}, {self.scheme} implies {shapes[0]}")
        return found

    def matrix(self, dtypes: tuple[str, ...]) -> list[int]:
        """Look at the tensor with the codes: a matrix or, if the layout has_stacks, as many as there are experts.

        Its shape.
        """
        self._codes = self.part(self.name, dtypes)
        shape: list[int] = self._codes.get_shape()
        if len(shape) not in ((2, 3) if self.has_stacks else (2,)):
            raise ValueError(f"wrong shape: {self.name} is {shape}, and a {type(self).__name__} weight is a matrix")
        if 0 in shape:
            raise ValueError(f"wrong shape: {self.name} is {shape}, so nothing is in it")
        return shape

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    def has_zeros(self, name: str) -> bool:
        """Are there zero points of this name, or does the configuration promise some?"""
        return self.scheme.has_zeros or self.has(name)

    def num_groups(self, k: int) -> int:
        """Along k inputs. Raises ValueError where a row has no whole number of them."""
        size = self.scheme.block[1] or k
        if k % size and self.scheme.block[0] == 1:
            raise ValueError(f"wrong group size: {size} inputs share a scale, and {self.name} has {k}")
        return cdiv(k, size)


def whole(stored: Any) -> Tensor:
    """All of an open tensor."""
    found: Tensor = stored[tuple(slice(0, size) for size in stored.get_shape())]
    return found


def order_of(groups: Tensor) -> Tensor | None:
    """Places for inputs so that 32 neighbours are of one group: int32 [num_groups * 32], -1 where there is no input.

    groups: the group of each input. None if they stand so already.
    """
    rest = F.pad(groups[None].float(), (0, -len(groups) % GROUP_SIZE), mode="replicate")[0].view(-1, GROUP_SIZE)
    if (rest == rest[:, :1]).all():
        return None
    by_group = groups.argsort(stable=True)
    counts = groups.bincount()
    room = -(-counts // GROUP_SIZE) * GROUP_SIZE
    begins, first = room.cumsum(0) - room, counts.cumsum(0) - counts
    its = groups[by_group]
    order = torch.full((int(room.sum()),), -1, dtype=torch.int32, device="cpu")
    order[begins[its] + torch.arange(len(groups), device="cpu") - first[its]] = by_group.int()
    return order


def in_groups_of_32(values: Tensor, order: Tensor | None) -> Tensor:
    """[n, num_groups, 32] of [n, k], with zeros in places that no input has."""
    values = into_order(values, order)
    return F.pad(values, (0, -values.shape[1] % GROUP_SIZE)).unflatten(1, (-1, GROUP_SIZE))


def unpack(words: Tensor, bits: int) -> Tensor:
    """int32 [n, m] -> uint8 [n, m * 32 / bits]: the lowest bits first."""
    # Not contiguous(), which leaves the strides of an axis of size 1 as they are: then it cannot be viewed as bytes.
    codes = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return codes if bits == 8 else torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def float8_numbers(codes: Tensor) -> Tensor:
    """float32, out of a table: PyTorch's own conversion takes three times as long."""
    table = torch.arange(256, dtype=torch.uint8, device="cpu").view(codes.dtype).float()
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def in_words(part: slice, per_word: int) -> tuple[slice, slice]:
    """The words that hold these codes, and where the codes are among theirs."""
    first = part.start // per_word
    begin = part.start - first * per_word
    return slice(first, cdiv(part.stop, per_word)), slice(begin, begin + part.stop - part.start)


class GPTQ(PublishedWeight):
    """arXiv:2210.17323. Inputs may be in an order of their own (desc_act): g_idx has the group of each."""

    suffix = ".qweight"

    def check(self) -> list[int]:
        module = self.name.removesuffix(self.suffix)
        self.per_word = 32 // self.scheme.bits
        num_words, n = self.matrix(("I32",))
        k = num_words * self.per_word
        num_groups = self.num_groups(k)
        self._scales = self.part(f"{module}.scales", FLOATS, [num_groups, n])
        self._zeros = self.part(f"{module}.qzeros", ("I32",), [num_groups, cdiv(n, self.per_word)])
        self.read_order(f"{module}.g_idx", num_groups, k)
        return [n, k]

    def codes(self, lead: list[int], rows: slice, inputs: slice) -> Tensor:
        words, among = in_words(inputs, self.per_word)
        return unpack(self._codes[words, rows].T, self.scheme.bits)[:, among]

    def scales(self, lead: list[int], rows: slice) -> Tensor:
        return self._scales[slice(0, self._scales.get_shape()[0]), rows].T.float()

    @cached_property
    def _points(self) -> Tensor | None:
        """Zero points, uint8 [num_groups, n]; a byte or a half of it wraps around. None if all are in the middle."""
        points = unpack(whole(self._zeros), self.scheme.bits)[:, : self.shape[0]] + self.scheme.added_zero
        points &= (1 << self.scheme.bits) - 1
        return None if (points == self.middle).all() else points

    @property
    def is_symmetric(self) -> bool:
        return self._points is None

    def zeros(self, lead: list[int], rows: slice) -> Tensor:
        assert self._points is not None, "it is not symmetric"
        return self._points[:, rows].T


class AWQ(PublishedWeight):
    """arXiv:2306.00978, in the order of AutoAWQ's "gemm" kernel."""

    suffix = ".qweight"

    def check(self) -> list[int]:
        module = self.name.removesuffix(self.suffix)
        k, num_words = self.matrix(("I32",))
        n = 8 * num_words
        num_groups = self.num_groups(k)
        self._scales = self.part(f"{module}.scales", FLOATS, [num_groups, n])
        self._zeros = None
        if self.has_zeros(f"{module}.qzeros"):
            self._zeros = self.part(f"{module}.qzeros", ("I32",), [num_groups, num_words])
        return [n, k]

    def codes(self, lead: list[int], rows: slice, inputs: slice) -> Tensor:
        return self._columns(self._codes, inputs, rows)

    def scales(self, lead: list[int], rows: slice) -> Tensor:
        return self._scales[slice(0, self._scales.get_shape()[0]), rows].T.float()

    def zeros(self, lead: list[int], rows: slice) -> Tensor:
        return self._columns(self._zeros, slice(0, self._zeros.get_shape()[0]), rows)

    @staticmethod
    def _columns(packed: Any, rows: slice, columns: slice) -> Tensor:
        """uint8 [columns, rows] of what is packed along its second dimension."""
        words, among = in_words(columns, 8)
        codes = unpack(packed[rows, words], 4).unflatten(1, (-1, 8))
        return codes[..., torch.tensor(AWQ_ORDER, dtype=torch.int64, device="cpu").argsort()].flatten(1)[:, among].T


class RowMajor(PublishedWeight):
    """Codes and scales as the weight is laid out: compressed-tensors, and FP8 of others."""

    has_stacks = True

    def check_scales(self, name: str, lead: list[int], n: int, k: int) -> None:
        rows = self.scheme.block[0] or n
        grid = [cdiv(n, rows), self.num_groups(k)]
        shapes = [[*lead, *grid]]
        if grid[1] == 1:
            shapes.append([*lead, grid[0]])
        if grid == [1, 1]:
            shapes += [[*lead, 1], lead]
        if self.scheme.block == (ALL, ALL):  # of FP8, whose configuration does not say it: one for each row
            shapes += [[*lead, n, 1], [*lead, n]]
        self._scales = self.part(name, SCALES, *shapes)
        found = prod(self._scales.get_shape()[len(lead) :])
        self._grid = grid if found == prod(grid) else [n, 1]
        self._rows_a_scale = rows if self._grid == grid else 1

    def check_zeros(self, name: str, *packed: list[int]) -> None:
        """packed: the shape in which words hold them. Old files have one int8 for each scale in any case."""
        self._zeros = None
        if self.has_zeros(name):
            shapes = [*packed, self._scales.get_shape()]
            self._zeros = self.part(name, ("I32",) * len(packed) + ("I8",), *shapes)

    def zeros(self, lead: list[int], rows: slice) -> Tensor:
        if self._zeros.get_dtype() == "I8":
            return self.unsigned(self._of_rows(self._zeros, lead, rows))
        words, among = in_words(rows, 32 // self.scheme.bits)
        place = (*lead, words, slice(0, self._grid[1]))
        stored = self._zeros[place]
        return unpack(stored.T, self.scheme.bits)[:, among].T

    def unsigned(self, codes: Tensor) -> Tensor:
        """uint8 of int8. Raises ValueError for more bits than the configuration says."""
        codes = codes.short() + self.middle
        if codes.numel() and not (codes.min() >= 0 and codes.max() < 2 * self.middle):
            raise ValueError(f"wrong bits: {self.name} has numbers of more than {self.scheme.bits} bits")
        return codes.to(torch.uint8)

    def scales(self, lead: list[int], rows: slice) -> Tensor:
        stored = self._of_rows(self._scales, lead, rows)
        scales = (stored.float() - 127).exp2() if stored.dtype == torch.uint8 else stored.float()
        return 1 / scales if self.scheme.divides else scales

    def _of_rows(self, grid: Any, lead: list[int], rows: slice) -> Tensor:
        """[rows, num_groups] of a tensor that has a number for each scale."""
        share = (*lead, *(slice(0, size) for size in grid.get_shape()[len(lead) :]))
        stored: Tensor = grid[share].reshape(self._grid)
        return stored[torch.arange(rows.start, rows.stop, device="cpu") // self._rows_a_scale]


class Packed(RowMajor):
    """compressed-tensors' pack-quantized."""

    suffix = "_packed"

    def check(self) -> list[int]:
        weight = self.name.removesuffix(self.suffix)
        self.per_word = 32 // self.scheme.bits
        *lead, n, num_words = self.matrix(("I32",))
        k = num_words * self.per_word
        if not lead or self.has(f"{weight}_shape"):  # of a stack, few packers write it
            k = self.check_shape(f"{weight}_shape", lead, n, num_words)
        self.check_scales(f"{weight}_scale", lead, n, k)
        self.check_zeros(f"{weight}_zero_point", [*lead, cdiv(n, self.per_word), self._grid[1]])
        self.read_order(f"{weight}_g_idx", self._grid[1], k)
        return [*lead, n, k]

    def check_shape(self, name: str, lead: list[int], n: int, num_words: int) -> int:
        """k as the file says it: [n, k], of a stack also for each matrix or [num_experts, n, k]."""
        stored = whole(self.part(name, ("I64", "I32"), [2], [*lead, 2], [len(lead) + 2])).tolist()
        *_, rows, k = stored[0] if isinstance(stored[0], list) else stored
        if rows != n or cdiv(k, self.per_word) != num_words:
            raise ValueError(f"wrong shape: {self.name} is {[*lead, n, num_words]}, {name} says {stored}")
        return k

    def codes(self, lead: list[int], rows: slice, inputs: slice) -> Tensor:
        words, among = in_words(inputs, self.per_word)
        place = (*lead, rows, words)
        return unpack(self._codes[place], self.scheme.bits)[:, among]


class Integers(RowMajor):
    """compressed-tensors' int-quantized: int8, whatever the bits."""

    def check(self) -> list[int]:
        *lead, n, k = self.matrix(("I8",))
        self.check_scales(f"{self.name}_scale", lead, n, k)
        self.check_zeros(f"{self.name}_zero_point")
        return [*lead, n, k]

    def codes(self, lead: list[int], rows: slice, inputs: slice) -> Tensor:
        place = (*lead, rows, inputs)
        return self.unsigned(self._codes[place])


class Floats(RowMajor):
    """FP8: compressed-tensors' float-quantized, DeepSeek's blocks.

    The kernels multiply whole numbers, so these floats are rounded to Q8_0. Of bell-shaped weights a float with 3 bits
    after its first one has lost 2.6 %, root mean square. Whole numbers with a scale for 32 of them lose another 0.5 %,
    which makes 2.7 % together. Where single numbers stand out among their neighbours, floats are the better 8 bits.
    """

    is_float = True

    def check(self) -> list[int]:
        *lead, n, k = self.matrix(FLOAT8)
        scale = next((f"{self.name}{end}" for end in ("_scale_inv", "_scale") if self.has(f"{self.name}{end}")), None)
        self.check_scales(scale or f"{self.name}_scale", lead, n, k)
        zeros = f"{self.name}_zero_point"  # floats have none, but some packers write them
        if self.has(zeros) and whole(self.part(zeros, (*FLOAT8, "I8", *SCALES))).float().any():
            raise ValueError(f"not zero: {zeros}, and zero points of floats are not computed with")
        return [*lead, n, k]

    def numbers(self, lead: list[int], rows: slice, inputs: slice) -> Tensor:
        share = (*lead, rows, inputs)
        return float8_numbers(self._codes[share]) * self.scales(lead, rows).index_select(1, self.groups[inputs])

    @cached_property
    def fits(self) -> bool:
        """Does Q8_0 lose little of this weight? Some rows of it are looked at."""
        *lead, n, k = self.shape
        num_rows, most = min(SAMPLED_ROWS, n), 0.0
        for place in range(SAMPLED_PLACES):
            first = (n - num_rows) * place // (SAMPLED_PLACES - 1)
            one = [size * place // SAMPLED_PLACES for size in lead]
            numbers = self.numbers(one, slice(first, first + num_rows), slice(0, k))
            lost = (quantize_q8_0(numbers).dequantize() - numbers).norm() / numbers.norm()
            most = max(most, lost.nan_to_num().item())  # NaN: of zeros, or of what is refused when all is read
        return most <= MOST_LOST


class BitsAndBytes(PublishedWeight):
    """QLoRA's NF4 (arXiv:2305.14314), or FP4: codes are places in a table of 16 numbers, in blocks of a flat weight.

    Scales may be quantized themselves: places in a table of 256, with a scale for 256 of them, and an offset.
    """

    KIND = "quant_state.bitsandbytes__"
    is_float = True
    fits = True

    def check(self) -> list[int]:
        self._codes = self.part(self.name, ("U8",))
        kind = "fp4" if self.has(f"{self.name}.{self.KIND}fp4") else "nf4"
        state = f"{self.name}.{self.KIND}{kind}"
        stored = whole(self.part(state, ("U8",))).flatten()
        try:
            found = dict(json.loads(bytes(stored.tolist())))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"wrong state: {state} is no object in JSON") from error
        n, k = pair_of(found.get("shape"), f"wrong state: {state}: shape")
        self.size = check_number(f"wrong state: {state}: blocksize", found.get("blocksize"), Integral, 1, 2**24)
        if prod(self._codes.get_shape()) != n * k // 2 or k % 2:
            raise ValueError(f"wrong shape: {self.name} is {self._codes.get_shape()}, its state says {[n, k]}")
        num_blocks = cdiv(n * k, self.size)
        self._table = self.part(f"{self.name}.quant_map", ("F32",), [16])
        self._scales = self.part(f"{self.name}.absmax", ("F32", "U8"), [num_blocks])
        self.is_nested = self._scales.get_dtype() == "U8"
        if self.is_nested:
            nested = f"wrong state: {state}: nested"
            self.nested_size = check_number(f"{nested}_blocksize", found.get("nested_blocksize"), Integral, 1)
            self.offset = check_number(f"{nested}_offset", found.get("nested_offset"), Real)
            self._nested_table = self.part(f"{self.name}.nested_quant_map", ("F32",), [256])
            self._nested = self.part(f"{self.name}.nested_absmax", ("F32",), [cdiv(num_blocks, self.nested_size)])
        return [n, k]

    def numbers(self, lead: list[int], rows: slice, inputs: slice) -> Tensor:
        k = self.shape[1]
        first, end = rows.start * k, rows.stop * k
        share = (slice(first // 2, end // 2), *(slice(0, size) for size in self._codes.get_shape()[1:]))
        stored = self._codes[share].flatten()
        codes = torch.stack((stored >> 4, stored & 15), dim=-1).flatten()
        begin = first % self.size  # in its block
        scales = self._block_scales(slice(first // self.size, cdiv(end, self.size))).repeat_interleave(self.size)
        table = self._table[(slice(0, 16),)]
        weights = table.index_select(0, codes.int()) * scales[begin : begin + end - first]
        return weights.view(-1, k)[:, inputs]

    def _block_scales(self, blocks: slice) -> Tensor:
        """float32, one a block."""
        scales = self._scales[(blocks,)]
        if not self.is_nested:
            return scales
        nested = self._nested[(slice(0, self._nested.get_shape()[0]),)]
        of_nested = torch.arange(blocks.start, blocks.stop, device="cpu") // self.nested_size
        table = self._nested_table[(slice(0, 256),)]
        return table[scales.long()] * nested[of_nested] + self.offset


LAYOUTS = {"gptq": GPTQ, "awq": AWQ, "packed": Packed, "integers": Integers, "floats": Floats}
LAYOUTS |= {"bitsandbytes": BitsAndBytes}
