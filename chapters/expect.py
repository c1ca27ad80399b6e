"""Expect: what a check says when the student's code did something else than it should. Needs nothing but Python."""

import builtins
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from pickle import dumps, loads
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., None])
NOT_GIVEN: Any = object()  # None may be what was expected, or what the student's code returned
Table = dict[str | tuple[str, str], Iterable[tuple[Any, ...]]]  # for cases()


class Wrong(Exception):
    """The student's code did something else than it should. section: heading to read again, if not the check's."""

    def __init__(
        self, hint: str, *, expected: Any = NOT_GIVEN, got: Any = NOT_GIVEN, section: str | None = None
    ) -> None:
        super().__init__(hint)
        self.hint, self.expected, self.got, self.section = hint, expected, got, section


def read_again(section: str) -> Callable[[F], F]:
    """Of a check: the heading of the chapter that helps whoever fails it, if it is not the task's."""

    def name(check: F) -> F:
        check.section = section  # pyrefly: ignore[missing-attribute]
        return check

    return name


class Checkable(Protocol):
    """A BlockManager or a Scheduler."""

    def check_integrity(self) -> None: ...


def expect(expected: Any, got: Any, hint: str, section: str | None = None) -> None:
    if expected != got:
        raise Wrong(hint, expected=expected, got=got, section=section)


def ensure(is_so: bool, hint: str, *, expected: Any = NOT_GIVEN, got: Any = NOT_GIVEN) -> None:
    """As expect(), where the two are not compared, but something else must be true."""
    if not is_so:
        raise Wrong(hint, expected=expected, got=got)


def differs(expected: Any, got: Any, absolute: Any, relative: float = 0.0) -> Any:
    """Is `got` farther from `expected` than absolute + relative * |expected|? NaN is, from everything; infinity is,
    from all but itself.

    Of numbers, or of each number in two tensors of one shape: then a tensor of bools. Every check that compares
    computed numbers asks here.
    """
    off = abs(got - expected)
    near = (got == expected) | ((off <= absolute + relative * abs(expected)) & (off < math.inf))
    return ~near if hasattr(near, "shape") else not near


WHOLE = (builtins.max, builtins.min, builtins.sum, builtins.sorted, math.fsum)  # given one thing, they go through all


@contextmanager
def once(size: int) -> Iterator[None]:
    """The student's function is given a list of this size: it does not go through it anew for each of its entries."""
    calls = Counter[str]()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            if len(args) == 1 and (not hasattr(args[0], "__len__") or 2 * len(args[0]) >= size):
                calls[function.__name__] += 1
            return function(*args, **options)

        return call

    owners = [(math if function is math.fsum else builtins, function) for function in WHOLE]
    for owner, function in owners:
        setattr(owner, function.__name__, counting(function))
    try:
        yield
    finally:
        for owner, function in owners:
            setattr(owner, function.__name__, function)
    for name, num_calls in calls.items():
        if num_calls >= size >= 8:
            hint = f"{name}() stands inside a loop or a comprehension and goes through the whole list for each token: "
            hint += "with the model's 49,152 tokens that takes minutes. Compute it once, before"
            raise Wrong(hint, expected=f"{name}() once", got=f"{num_calls} times for {size} tokens")


def is_list_of(kind: Any, thing: Any, size: int) -> bool:
    """A list of so many things of this type, or of these types."""
    return isinstance(thing, list) and len(thing) == size and all(isinstance(each, kind) for each in thing)


def expect_answer(expected: bool, got: Any, when: str) -> None:
    """Of a function that answers True or False."""
    hint = f"the answer is wrong {when}"
    if got is None:
        hint = f"it returned nothing {when}: does every way through the function end with return True or return False?"
    expect(expected, got, hint)


def expect_sane(structure: Checkable, when: str = "") -> None:
    try:
        structure.check_integrity()
    except AssertionError as error:
        raise Wrong(f"{when}check_integrity() complains: {error}") from error


def cases(ask: Callable[..., Any], table: Table) -> tuple[Callable[[Any, Any], None], ...]:
    """Checks that differ in what they ask: each calls ask(function, *row) for its rows.

    table: title of the check -> rows; (title, heading to read again) -> rows.
    """

    def check_of(title: str, section: str, rows: list[tuple[Any, ...]]) -> Callable[[Any, Any], None]:
        def check(function: Any, bench: Any) -> None:
            for row in rows:
                ask(function, *deepcopy(row))  # whatever the student's code does to it

        check.__doc__ = title
        return read_again(section)(check) if section else check

    return tuple(check_of(*((key, "") if isinstance(key, str) else key), [*rows]) for key, rows in table.items())


@contextmanager
def unchanged(hint: str, *given: Any) -> Iterator[None]:
    """While the student's function runs, these lists and tensors stay as they are."""
    # Through pickle: a tenth of the time of deepcopy, and a router is asked thousands of times.
    before = [thing.clone() if hasattr(thing, "clone") else loads(dumps(thing)) for thing in given]
    yield
    for a, b in zip(before, given, strict=True):
        if not (a.shape == b.shape and bool((a == b).all()) if hasattr(a, "shape") else a == b):
            raise Wrong(hint)


def expect_form(expected: Any, got: Any, hint: str) -> None:
    """A tensor of the shape and the dtype of this one."""
    forms = [f"{list(x.shape)}, {x.dtype}" if hasattr(x, "dtype") else repr(x)[:80] for x in (expected, got)]
    expect(forms[0], forms[1], hint)
