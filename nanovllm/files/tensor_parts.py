"""Parts of a checkpoint's tensors that look like tensors of their own: the files merge some that are apart here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.quantization.formats import GROUP_SIZE, QuantizedRows, concatenate


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


def check_size(whole: Part, axis: int, size: int) -> None:
    """Raise ValueError unless the file's tensor has this size: parts of a larger one would fit all the same."""
    shape = whole.stored_shape()
    if shape[axis : axis + 1] != [size]:
        raise ValueError(
            f"{whole.name} has the shape {shape}; the sizes in the configuration ask for {size} in axis {axis}"
        )
