"""Tensors as C reads them: whoever hands a pointer to C says here what C takes it for (chapter 10)."""

import torch
from torch import Tensor


def address(tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], apart: int = 0, room: int = 0) -> int:
    """Where a tensor's numbers lie, for a function that takes them for `shape` numbers of `dtype`, row after row.

    apart: so many dimensions, from the first on, may have any stride; the function is told which. room: so many numbers
    have to be there from the first one on, if that is more than the shape has. Raises TypeError for any other tensor.
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
