"""Expect: what a check says when the student's code did something else than it should. Needs nothing but Python."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

F = TypeVar("F", bound=Callable[..., None])


class Wrong(Exception):
    """The student's code did something else than it should. section: heading to read again, if not the check's."""

    def __init__(self, hint: str, *, expected: Any = None, got: Any = None, section: str | None = None) -> None:
        super().__init__(hint)
        self.hint, self.expected, self.got, self.section = hint, expected, got, section


def read_again(section: str) -> Callable[[F], F]:
    """Of a check: the heading of the chapter that helps whoever fails it, if it is not the task's."""

    def name(check: F) -> F:
        check.section = section  # type: ignore[attr-defined]
        return check

    return name


class Checkable(Protocol):
    """A BlockManager or a Scheduler."""

    def check_integrity(self) -> None: ...


def expect(expected: Any, got: Any, hint: str, section: str | None = None) -> None:
    if expected != got:
        raise Wrong(hint, expected=expected, got=got, section=section)


def ensure(is_so: bool, hint: str, *, expected: Any = None, got: Any = None) -> None:
    """As expect(), where the two are not compared, but something else must be true."""
    if not is_so:
        raise Wrong(hint, expected=expected, got=got)


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
