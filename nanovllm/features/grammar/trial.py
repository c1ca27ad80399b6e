"""A grammar that a stranger has sent is tried in a sandbox first: what passes there costs as much again here."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from nanovllm.checks.sandbox import Sandbox, TooMuch, is_guarding

SCRIPT = "nanovllm.features.grammar.sandboxed_grammars"
TRIAL = Sandbox(SCRIPT, seconds=2, max_mb=32, niceness=5, packages=("llguidance", "nanovllm"))
# llguidance's own limits, for this process, too: an ordinary grammar needs a tenth.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 500_000, "step_max_items": 10_000, "max_lexer_states": 50_000}


@dataclass
class Budget:
    """Of one request, whose grammar may have thousands of schemas, each a question.

    seconds: of a processor, that its questions have taken. answers: to these questions, none of which is asked twice.
    """

    seconds: float = 0.0
    answers: dict[tuple[str, str], str] = field(default_factory=dict)


_budget: ContextVar[Budget] = ContextVar("budget")


@contextmanager
def one_budget() -> Iterator[None]:
    """What is tried here may take, all together, what one question may."""
    token = _budget.set(Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def tried(kind: str, text: str) -> str:
    """See sandboxed_grammars.py. Raises ValueError."""
    budget = _budget.get(None) or Budget()
    if (kind, text) in budget.answers:
        return budget.answers[kind, text]
    try:
        result, seconds = TRIAL.answer(kind, text, LIMITS)
        budget.seconds += seconds
        if is_guarding() and budget.seconds > TRIAL.seconds:
            raise TooMuch(TRIAL.too_much())
        budget.answers[kind, text] = result
        return result
    except TooMuch as error:
        remedy = "use smaller numbers (multipleOf, lengths, repetitions) or fewer parts"
        raise ValueError(f"to compile it {error} ({len(text)} characters): {remedy}") from None


def try_to_compile(source: str) -> None:
    """Raises ValueError for a stranger's grammar that costs too much; a script's own is compiled without a trial."""
    if is_guarding():
        tried("compile", source)
