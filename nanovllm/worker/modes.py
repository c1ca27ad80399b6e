"""PyTorch's modes, which belong to the caller: what he has set around a call of ours changes nothing here.

A default device and a default dtype need no mode: every tensor is made with a device and a dtype of its own
(tests/worker/test_modes.py looks for one that is not).
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])


@contextmanager
def own_modes(device: torch.device) -> Iterator[None]:
    """Without autocast and inference mode, so that what is made here can be changed later; gradients nobody wants."""
    with ExitStack() as modes:
        for kind in {"cpu", device.type}:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        yield


def in_own_modes(method: Method) -> Method:
    """A decorator for methods of an object that has a device: they run in own_modes()."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with own_modes(self.device):
            return method(self, *args, **options)

    return call  # type: ignore[return-value]
