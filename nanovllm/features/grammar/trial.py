"""A sandbox in which a grammar is tried first: what passes there costs as much again here, and not more."""

from pathlib import Path
from typing import Any

from nanovllm.checks.sandbox import Sandbox, TooMuch

TRIAL = Sandbox(Path(__file__).with_name("sandboxed_grammars.py"), seconds=2, max_mb=32, niceness=5)
# llguidance's own limits, for this process, too: an ordinary grammar needs a tenth.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 500_000, "step_max_items": 10_000, "max_lexer_states": 50_000}


def tried(kind: str, text: str) -> str:
    """See sandboxed_grammars.py. Raises ValueError."""
    try:
        return TRIAL.ask(kind, text, LIMITS)
    except TooMuch as error:
        remedy = "use smaller numbers (multipleOf, lengths, repetitions) or fewer parts"
        raise ValueError(f"to compile it {error} ({len(text)} characters): {remedy}") from None
