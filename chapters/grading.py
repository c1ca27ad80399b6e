"""Grading: the student's code in place of ours in the real engine, checked from easy to hard.

A chapter's checks.py lists its TASKS. A task names a function of exercise.py and says how it is put into the engine; a
check is a function of that function and a Bench, with a docstring that names it, and raises Wrong. Where only inputs
and sentences differ, expect.cases() makes checks of a table.

This file needs the standard library and nanovllm/core until a check asks for a model, so that a browser can grade, too.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, is_dataclass, replace
from functools import cached_property, wraps
from importlib import import_module
from itertools import chain, islice
from typing import Any

from chapters.expect import NOT_GIVEN, Wrong, expect, expect_sane
from chapters.patching import our_engine, use_manager
from chapters.submission import describe, full_kind_of, is_of_ours, kind_of, not_started, raised_by_checks, readable
from nanovllm import LLM, SamplingParams
from nanovllm.core.block_manager import BlockManager

SIZES = {"max_model_len": 128, "max_num_seqs": 8, "num_gpu_blocks_override": 64, "block_size": 16}
PROMPTS = ["The capital of France is", "Once upon a time there was", "One two three four five six seven"]


class Bench:
    """What checks work with: an engine on a real checkpoint, loaded when it is first asked for.

    Without a model (None), a check that asks for the engine gets NoModel. loads(): is called before it is loaded.
    options: of the engine, as LLM takes them; its sizes are SIZES by default.
    """

    def __init__(self, model: str | None = None, loads: Callable[[], None] = lambda: None, **options: Any) -> None:
        self._model, self._loads, self._options = model, loads, SIZES | options
        self._is_closed = False

    @property
    def model(self) -> str:
        if self._model is None:
            raise NoModel
        if self._is_closed:
            raise NotPrepared
        return self._model

    @cached_property
    def llm(self) -> LLM:
        return LLM(self.model, **self._options)

    @cached_property
    def expected_tokens(self) -> list[list[int]]:
        """What our own engine generates, asked for before the student's code is put in."""
        return self.generate()

    def generate(self, max_tokens: int = 12) -> list[list[int]]:
        """Greedy tokens for PROMPTS, from an empty cache."""
        self.llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        outputs = self.llm.generate(PROMPTS, params, False)
        return [output.outputs[0].token_ids for output in outputs]

    def close(self) -> None:
        """Until prepare(), a check that asks for an engine that is not loaded gets NotPrepared."""
        self._is_closed = self._model is not None and "llm" not in vars(self)

    def prepare(self) -> None:
        """Do what takes long and is not the student's: load, and ask our own engine what is expected."""
        self._loads()
        self._is_closed = False
        _ = self.expected_tokens, self.llm
        self.clean()

    def clean(self) -> None:
        """Empty the cache. An engine in which a failed check has left requests, sequences or blocks is given up."""
        if "llm" in vars(self):
            try:
                engine, all_free = self.llm.engine, self.llm.reset_prefix_cache()
                sound = all_free and not engine.has_unfinished_requests() and not engine.scheduler.has_unfinished()
            except Exception:  # what has been left there does not even work
                sound = False
            if not sound:
                del self.llm

    def same_tokens(
        self,
        expected_tokens: list[list[int]] | None = None,
        answers: list[list[int]] | None = None,
        may_differ: Callable[[str, list[int], int], bool] = lambda prompt, before, token_id: False,
    ) -> None:
        """Compare answers to PROMPTS, by default those of what is installed now, with our tokens. Raises Wrong.

        Where steps are not the usual ones (smaller, in different company), expected_tokens must come from steps like
        them: rounding in bf16 may tip the choice of a token. may_differ(prompt, tokens before it, the first token that
        differs): is that as good?
        """
        rows = zip(PROMPTS, expected_tokens or self.expected_tokens, answers or self.generate(), strict=True)
        for prompt, expected, got in rows:
            pairs = zip(expected, got, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
            both = at < min(len(expected), len(got))
            if expected != got and not (both and may_differ(prompt, expected[:at], got[at])):
                text, hint = self.llm.get_tokenizer().decode, f"the model answers {prompt!r} with different tokens"
                raise Wrong(f"{hint}, from token {at} on", expected=text(expected), got=text(got))


class NoModel(Exception):
    """A check asks for a model where there is none."""


class NotPrepared(Exception):
    """A check asks for the engine before it is loaded: not while the student's code is in its place."""


Check = Callable[[Any, Bench], None]


def answers_as_before(function: Any, bench: Bench) -> None:
    """the real model answers as before"""
    bench.same_tokens()


def answers_in_a_small_pool(function: Any, bench: Bench) -> None:
    """the real model answers as before in a pool that makes it preempt"""
    with our_engine():
        expected, num_preemptions = _answer_in_a_small_pool(bench)
    got, got_preemptions = _answer_in_a_small_pool(bench)
    expect(
        num_preemptions, got_preemptions, "the same pool, but a different number of preemptions than with our function"
    )
    bench.same_tokens(expected, got)


def _answer_in_a_small_pool(bench: Bench) -> tuple[list[list[int]], int]:
    """Greedy tokens and the number of preemptions. The pool has just the blocks that the prompts need.

    Prefix caching is off, so that the steps are the same whichever function is the student's: rounding cannot tell them
    apart.
    """
    scheduler, manager, encode = bench.llm.engine.scheduler, bench.llm.engine.block_manager, bench.llm.get_tokenizer()
    num_blocks = sum(manager.num_blocks_for(len(encode(prompt).input_ids)) for prompt in PROMPTS)
    small, before = BlockManager(num_blocks, manager.block_size, enable_prefix_caching=False), scheduler.num_preemptions
    with use_manager(bench.llm, small):
        answers = bench.generate(manager.block_size + 1)  # everybody grows by a block
    expect_sane(small, "after preemption ")
    return answers, scheduler.num_preemptions - before


@dataclass(frozen=True)
class Task:
    """name: of the function in exercise.py. section: heading of the chapter to read again, where a check names no other
    (expect.py). use(function): a context in which the engine runs with it. checks: from easy to hard; each runs inside
    that context."""

    name: str
    section: str
    use: Callable[[Any], AbstractContextManager]
    checks: tuple[Check, ...]

    @property
    def titles(self) -> list[str]:
        return [(check.__doc__ or check.__name__).strip().splitlines()[0] for check in self.checks]


@dataclass(frozen=True)
class Result:
    """num_passed: checks before the first that failed. Those in `open` could not be run without a model.
    section: heading of the chapter to read again. seconds, printed: of the task's own process (examine.py)."""

    task: Task
    num_passed: int
    problem: str = ""  # what the first check that failed says; empty when all passed
    not_started: bool = False
    open: tuple[int, ...] = ()  # indexes of checks
    section: str = ""
    seconds: float = 0.0
    printed: str = ""

    @property
    def passed(self) -> bool:
        return self.num_passed == len(self.task.checks) and not self.open


def grade(
    task: Task,
    function: Any,
    bench: Bench,
    begins: Callable[[int], None] = lambda number: None,
    file: str | None = None,
) -> Result:
    """Run the checks of one task until one fails, in this process: nothing here ends a check that never ends.

    Each begins with an engine that has nothing in it; the first that needs one begins again when it is loaded.
    begins(number) is called before each check. file: the name that load_submission() got, so that the student's lines
    are quoted; by default the file that defines the function. Raises what loading the engine raises.
    """
    name: str = getattr(getattr(function, "__code__", None), "co_filename", "") if file is None else file
    watched = Watched(function)
    no_model: list[int] = []
    number = 0
    bench.close()
    while number < len(task.checks):
        begins(number)
        failed = _attempt(task, number, watched, bench, name)
        if isinstance(failed, NotPrepared):
            bench.prepare()
            continue
        if isinstance(failed, Result):
            return replace(failed, open=tuple(no_model))
        if isinstance(failed, NoModel):
            no_model.append(number)
        number += 1
    return Result(task, len(task.checks), open=tuple(no_model))


def _attempt(
    task: Task, number: int, watched: "Watched", bench: Bench, name: str
) -> "Result | NoModel | NotPrepared | None":
    """One check. None if it passes."""
    check, unwritten = task.checks[number], ""
    section = getattr(check, "section", task.section)
    try:
        with task.use(watched.function):
            check(watched.function, bench)
        return None
    except (NoModel, NotPrepared) as lacking:
        return lacking
    except Wrong as wrong:
        problem, section = "\n".join(filter(None, (_explain(wrong), watched.odd_value()))), wrong.section or section
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: the student's code raises them
        problem, unwritten = f"your code led to {describe(error, name)}", not_started(error)
        if unwritten:
            problem = f"not started: {unwritten}, still raises NotImplementedError"
        elif is_of_ours(error, name) and (odd := watched.odd_value() or watched.value_for(error)):
            problem = odd
    finally:
        bench.clean()
    return Result(task, number, problem, bool(unwritten), section=section)


class Watched:
    """The student's function, and what it has returned lately."""

    def __init__(self, function: Any) -> None:
        self.function, self._returned = function, deque[Any](maxlen=16)
        if callable(function):

            @wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                found = function(*args, **kwargs)
                if (odd := what_compares_by_itself(found)) is not None:
                    what = f"{function.__name__} returned {_shown(odd, 80)}, of the type {full_kind_of(odd)}"
                    raise Wrong(f"{what}, which decides by itself how it compares: return Python's own")
                if not hasattr(found, "__next__"):  # an iterator that nobody reads is to end
                    self._returned.append(found)
                return found

            self.function = call

    def odd_value(self) -> str:
        """A sentence about a value of a kind that no check takes; empty if there is none."""
        for odd in odd_values(self._returned):
            what = f"{self.function.__name__} returned {_shown(odd, 80)}, of the type {full_kind_of(odd)}"
            return f"{what}: the checks take Python's own numbers, texts and lists, and tensors"
        return ""

    def value_for(self, error: BaseException) -> str:
        """A sentence about what was returned, with which our own code has come to this error."""
        if not self._returned or not raised_by_checks(error):
            return ""
        what = f"{self.function.__name__} returned {_shown(self._returned[-1], 200)}"
        return f"{what}, and the check cannot work with that: {readable(error)}"


OTHER_NUMBERS = ("numpy", "fractions", "decimal", "array")  # modules of what no check takes
BELIEVED = ("builtins", "collections", "enum", "nanovllm", "torch", "chapters", "numbers", *OTHER_NUMBERS)
CONTAINERS = (list, tuple, set, frozenset, deque, dict)
VALUES = (int, float, complex, str, bytes, *CONTAINERS)
# Methods that decide what a check sees.
OPERATORS = {name for kind in VALUES for name in vars(kind) if name.startswith("__")} - vars(object).keys()
OPERATORS |= {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__torch_function__"}
# Each NamedTuple has __getnewargs__ of its own; __class_getitem__ decides nothing that a check sees.
OPERATORS -= {"__class_getitem__", "__getnewargs__"}
_there_before: dict[int, type] = {}  # by id: a metaclass may have its own ==


def believe_classes_there_are(submission: bytes) -> None:
    """Before it is loaded: of the classes that say they are Python's or ours, only these are, from now on."""
    for name in ("torch", *OTHER_NUMBERS):
        if name.encode() in submission:  # it may be the first to import this
            with suppress(ImportError, OSError):
                import_module(name)
    todo = [object]
    while todo:
        kind = todo.pop()
        if id(kind) not in _there_before:
            _there_before[id(kind)] = kind
            todo += type.__subclasses__(kind)


def values_in(value: Any, depth: int = 6) -> Iterator[Any]:
    """The value itself, and what it holds if it is one of Python's own containers, whatever class is made from it, or a
    dataclass of the course's."""
    yield value
    kind = type(value)
    if not depth:
        return
    if is_dataclass(kind) and kind.__module__.startswith("chapters.") and _is_believed(kind):  # such as Summary
        held = vars(value).values()
    elif issubclass(kind, dict):
        held = chain(dict.keys(value), dict.values(value))
    elif issubclass(kind, CONTAINERS):
        held = next(each for each in CONTAINERS if issubclass(kind, each)).__iter__(value)
    else:
        return
    for each in islice(held, 10_000):
        yield from values_in(each, depth - 1)


def odd_values(value: Any) -> Iterator[Any]:
    """What is in it that is neither Python's own nor the engine's, such as numpy's numbers and fractions."""
    for each in values_in(value):
        if type(each) is complex or full_kind_of(each).split(".")[0] in OTHER_NUMBERS:
            yield each


def what_compares_by_itself(value: Any) -> Any:
    """An object in what was returned whose class has its own ==, or another operator; None if there is none."""
    for each in {id(type(each)): each for each in values_in(value)}.values():  # thousands of numbers are of one type
        ways = OPERATORS if issubclass(type(each), VALUES) else OPERATORS - {"__iter__"}  # which any iterator has
        for kind in type.__dict__["__mro__"].__get__(type(each)):  # not as a metaclass says it
            if type.__dict__["__dict__"].__get__(kind).keys() & ways and not _is_believed(kind):
                return each
    return None


def _is_believed(kind: type) -> bool:
    if _there_before and id(kind) not in _there_before:
        return False
    return kind.__module__.split(".")[0] in BELIEVED and not kind.__module__.endswith(".submission")


def _shown(value: Any, most_characters: int) -> str:
    try:
        return readable(repr(value), most_characters)
    except BaseException as error:  # it is the student's
        return f"something whose repr() raises {kind_of(error)}"


def _explain(wrong: Wrong) -> str:
    lines = [readable(wrong.hint)]
    lines += [f"expected: {readable(wrong.expected)}"] if wrong.expected is not NOT_GIVEN else []
    lines += [f"got:      {readable(wrong.got)}"] if wrong.got is not NOT_GIVEN else []
    return "\n".join(lines)
