"""How C is called: structs of arguments, tensors as C reads them, and calls that are written down (chapter 10)."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

PTR, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def args_of(ctype: type, names: str) -> list[tuple[str, type]]:
    """Fields of a ctypes.Structure: each of the names, as this type."""
    return [(name, ctype) for name in names.split()]


def address(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], apart: int = 0, room: int = 0) -> int:
    """Where a tensor's numbers lie, for a function that takes them for `shape` numbers of `dtype`, row after row.

    apart: how many dimensions, from the first on, may have any stride (the function is told which). room: the least
    number of elements from the first one on, if more than the shape has. Raises TypeError for any other tensor.
    """
    if (
        tensor.dtype is not dtype
        or tensor.shape != shape
        or not (tensor.is_contiguous() or (apart and _are_together(tensor, apart)))
        or not tensor.is_cpu
        or (room and tensor.untyped_storage().nbytes() < (tensor.storage_offset() + room) * dtype.itemsize)
    ):
        wanted = f"{dtype} {list(shape)}" + (f" with room for {room} numbers" if room else "")
        found = f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        raise TypeError(f"a function in C reads {wanted}, and this is {found}")
    return tensor.data_ptr()


def address_or_null(tensor: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
    """address(), or NULL where there is no tensor."""
    return None if tensor is None else address(tensor, dtype, shape)


def _are_together(tensor: Tensor, apart: int) -> bool:
    """Do the numbers of each row lie side by side, a row being what the first `apart` dimensions lead to?"""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[apart:]), reversed(tensor.stride()[apart:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def out_address(out: Tensor, dtype: torch.dtype, shape: tuple[int, ...], name: str = "out") -> dict[str, int]:
    """A struct's field and its value: `name` if results are rounded to dtype, `name`_floats if they stay float32."""
    is_rounded = out.dtype == dtype
    return {name if is_rounded else f"{name}_floats": address(out, dtype if is_rounded else torch.float32, shape)}


Call = tuple[Callable[[ctypes.Structure], None], ctypes.Structure]  # a C function and its struct of arguments


class Recorder:
    """Makes the calls of one library's C functions, or writes them down."""

    def __init__(self) -> None:
        self._calls: list[Call] | None = None

    def call(self, function: Callable[[ctypes.Structure], None], args: ctypes.Structure) -> None:
        """Call the function; while a step is recorded, append the call to the record instead: nothing is computed."""
        if self._calls is None:
            function(args)
        else:
            self._calls.append((function, args))

    @contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Meanwhile calls are written down, in the list."""
        self._calls = []
        try:
            yield self._calls
        finally:
            self._calls = None
