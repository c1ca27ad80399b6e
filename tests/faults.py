"""What goes wrong on purpose, and the steps after it."""

import inspect
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress
from types import FrameType
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


class Instants:
    """The instants of a call at which code in these files may be interrupted.

    event: "call", where Python calls signals' handlers, "line", or "opcode": where a trace function may raise. It is no
    call that a generator is resumed or closed.
    """

    def __init__(self, *files: str, event: str = "line") -> None:
        self.files, self.event = files, event

    def trace(self, function: Callable[[], Any], at: Callable[[int, FrameType], None]) -> None:
        """Call it; before each instant at(number, frame), counted from 0. What `at` raises is raised there."""
        numbers = itertools.count()

        def trace(frame: FrameType, event: str, arg: Any) -> Any:
            if not frame.f_code.co_filename.startswith(self.files):
                return None
            frame.f_trace_opcodes = self.event == "opcode"
            is_resumed = event == "call" and frame.f_code.co_flags & inspect.CO_GENERATOR
            if event == self.event and not is_resumed:
                at(next(numbers), frame)
            return trace

        sys._getframe().f_trace_opcodes = self.event == "opcode"  # in 3.12 settrace() looks whether any frame wants it
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(before)

    def of(self, function: Callable[[], Any], executions: Collection[int] = (1,)) -> list[int]:
        """Numbers of the instants of a call: of each place when it is executed for the first time, or so many times."""
        seen, chosen = Counter[tuple[str, int, int]](), list[int]()

        def at(number: int, frame: FrameType) -> None:
            where = frame.f_code.co_filename, frame.f_code.co_firstlineno, frame.f_lasti
            seen[where] += 1
            if seen[where] in executions:
                chosen.append(number)

        self.trace(function, at)
        return chosen

    def interrupt(self, numbers: Collection[int], function: Callable[[], Any], interrupt: Callable[[], None]) -> None:
        """Call it, and interrupt() at these instants."""
        self.trace(function, lambda number, frame: interrupt() if number in numbers else None)
