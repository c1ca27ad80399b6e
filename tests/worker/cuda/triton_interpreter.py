"""nanovllm.worker.cuda.triton_kernels in Triton's interpreter, which runs them in Python, with NumPy, on a CPU."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import patch

KERNELS = "nanovllm.worker.cuda.triton_kernels"


def import_interpreted() -> ModuleType:
    """A copy of the module, beside the one that everybody else imports.

    Triton looks at TRITON_INTERPRET when a kernel is defined, its own library's included, and PyTorch may have imported
    it already: a second copy is imported for this, and neither the variable nor the copy is left behind.
    """
    before = {module: sys.modules.pop(module) for module in [*triton_modules(), KERNELS] if module in sys.modules}
    with patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        made = importlib.import_module(KERNELS)
    interpreter = sys.modules["triton.runtime.interpreter"]
    # It would compute every sum and product of integers twice; the offsets of tests are small.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
    interpreter.InterpretedFunction.__call__ = calls(interpreter.InterpretedFunction.__call__)
    for module in [*triton_modules(), KERNELS]:
        del sys.modules[module]
    sys.modules.update(before)
    return made


def calls(first_call: Callable[..., Any]) -> Callable[..., Any]:
    """Calls of tl.max() and the like. Only the first one has to look through all of Triton's language."""
    known: set[Any] = set()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.fn in known:
            return self.rewrite()(*args, **kwargs)
        known.add(self.fn)
        return first_call(self, *args, **kwargs)

    return call


def triton_modules() -> list[str]:
    return [module for module in sys.modules if module.split(".")[0] == "triton" and "._C" not in module]
