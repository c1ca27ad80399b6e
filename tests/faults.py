"""What goes wrong on purpose, and the steps after it."""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any

import pytest

from nanovllm import RequestOutput
from nanovllm.engine import LLMEngine


class PanicException(BaseException):
    """As pyo3 raises it for a panic in Rust code."""


class Fault:
    """Calls of a function, counted; some of them fail."""

    num_calls = num_failures = 0


def plant(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    fails: Collection[int] | Callable[[int], bool],
    error: BaseException | type[BaseException] = RuntimeError("no memory left"),
    *,
    after: bool = False,
) -> Fault:
    """Let calls of owner.name raise `error`: those with these numbers, from 1, or for whose number `fails` is true.

    after: when their work is done.
    """
    whole, fault = getattr(owner, name), Fault()

    def call(*args: Any, **options: Any) -> Any:
        fault.num_calls += 1
        number = fault.num_calls
        result = whole(*args, **options) if after else None
        if fails(number) if callable(fails) else number in fails:
            fault.num_failures += 1
            raise error
        return result if after else whole(*args, **options)

    monkeypatch.setattr(owner, name, call)
    return fault


def run_to_end(engine: LLMEngine, *errors: type[BaseException]) -> dict[str, RequestOutput]:
    """Step until nothing is left; a step that raises one of these is tried again. Returns the last output of each."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        with suppress(*errors):
            outputs.update((output.request_id, output) for output in engine.step())
        engine.scheduler.check_integrity()
    return outputs
