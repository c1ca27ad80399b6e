"""What tests of the CUDA path have in common."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def full_float32() -> Iterator[None]:
    """Products and convolutions of float32 on a GPU without TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield
    torch.set_float32_matmul_precision(before)
