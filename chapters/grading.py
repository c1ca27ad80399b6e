"""Grading: the student's code in place of ours in the real engine, checked from easy to hard.

A chapter's checks.py lists its TASKS. A task names a function of exercise.py and says how it is put into the engine; a
check is a function of that function and a Bench, with a docstring that names it, and raises Wrong.

This file needs the standard library and nanovllm/core until a check asks for a model, so that a browser can grade, too.
"""

import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any

from chapters.expect import Wrong
from nanovllm import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time there was", "One two three four five six seven"]
TIME_LIMIT_S = 120


class Bench:
    """What checks work with: an engine on a real checkpoint, loaded when it is first asked for."""

    def __init__(self, model: str) -> None:
        self.model = model

    @cached_property
    def llm(self) -> LLM:
        return LLM(self.model, max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=64, block_size=16)

    @cached_property
    def expected_tokens(self) -> list[list[int]]:
        """What our own engine generates, asked for before the student's code is put in."""
        return self.generate()

    def generate(self) -> list[list[int]]:
        """Greedy tokens for PROMPTS, from an empty cache."""
        self.llm.reset_prefix_cache()
        outputs = self.llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), False)
        return [output.outputs[0].token_ids for output in outputs]

    def clean(self) -> None:
        """Empty the cache. An engine in which a failed check has left requests, sequences or blocks is given up."""
        if "llm" in vars(self):
            engine, all_free = self.llm.engine, self.llm.reset_prefix_cache()
            if engine.has_unfinished_requests() or engine.scheduler.has_unfinished() or not all_free:
                del self.llm

    def same_tokens(self) -> None:
        """Generate with what is installed now and compare with our tokens. Raises Wrong."""
        for prompt, expected, got in zip(PROMPTS, self.expected_tokens, self.generate(), strict=True):
            if expected != got:
                at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), len(got))
                text = self.llm.get_tokenizer().decode
                raise Wrong(
                    f"the model answers {prompt!r} with other tokens, from token {at} on",
                    expected=text(expected),
                    got=text(got),
                )


class NoModel(Exception):
    """A check asks for a model where there is none."""


class BenchWithoutModel(Bench):
    """For a browser: checks that work without a model are run, the others are left open."""

    def __init__(self) -> None:
        super().__init__("")

    @property
    def llm(self) -> LLM:
        raise NoModel

    @property
    def expected_tokens(self) -> list[list[int]]:
        return []


Check = Callable[[Any, Bench], None]


@dataclass(frozen=True)
class Task:
    """name: of the function in exercise.py. section: heading of the chapter to read again. use(function): a context in
    which the engine runs with it. checks: from easy to hard; each runs inside that context."""

    name: str
    section: str
    use: Callable[[Any], AbstractContextManager]
    checks: tuple[Check, ...]

    @property
    def titles(self) -> list[str]:
        return [(check.__doc__ or check.__name__).strip().splitlines()[0] for check in self.checks]


@dataclass(frozen=True)
class Result:
    """num_passed: checks before the first that failed. Those in `open` could not be run without a model."""

    task: Task
    num_passed: int
    problem: str = ""  # what the first check that failed says; empty when all passed
    not_started: bool = False
    open: tuple[int, ...] = ()  # indexes of checks

    @property
    def passed(self) -> bool:
        return self.num_passed == len(self.task.checks) and not self.open


def grade(task: Task, function: Any, bench: Bench, begins: Callable[[int], None] = lambda number: None) -> Result:
    """Run the checks of one task until one fails. Each begins with an engine that has nothing in it.

    begins(number) is called before each check.
    """
    _ = bench.expected_tokens
    bench.clean()
    no_model: list[int] = []
    for number, check in enumerate(task.checks):
        begins(number)
        try:
            with _time_limit(), task.use(function):
                check(function, bench)
        except NoModel:
            no_model.append(number)
        except NotImplementedError:
            problem = "not started: it still raises NotImplementedError"
            return Result(task, number, problem, not_started=True, open=tuple(no_model))
        except Wrong as wrong:
            return Result(task, number, _explain(wrong), open=tuple(no_model))
        except Exception as error:
            return Result(task, number, _explain_crash(error, function), open=tuple(no_model))
        finally:
            bench.clean()
    return Result(task, len(task.checks), open=tuple(no_model))


def _explain(wrong: Wrong) -> str:
    lines = [wrong.hint]
    lines += [f"expected: {wrong.expected}"] if wrong.expected is not None else []
    lines += [f"got:      {wrong.got}"] if wrong.got is not None else []
    return "\n".join(lines)


def _explain_crash(error: Exception, function: Any) -> str:
    """What was raised, and the line of the student's file that led to it."""
    frames, file = traceback.extract_tb(error.__traceback__), getattr(function, "__code__", compile("", "", "exec"))
    where = next((frame for frame in reversed(frames) if frame.filename == file.co_filename), frames[-1])
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"your code led to {what}\n{where.filename.rsplit('/', 1)[-1]}, line {where.lineno}: {where.line}"


class _TooLong(Exception):
    pass


@contextmanager
def _time_limit() -> Iterator[None]:
    """A loop that never ends is a mistake like any other."""
    if not hasattr(signal, "setitimer"):  # in a browser, whose page ends the worker instead
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise _TooLong(f"it was not done after {TIME_LIMIT_S} s of computing: is there a loop that never ends?")

    before = signal.signal(signal.SIGPROF, stop)  # of this process's computing, whatever else the machine does
    signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
