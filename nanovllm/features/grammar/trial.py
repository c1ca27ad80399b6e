"""A grammar that a stranger has sent is tried in a sandbox first: what passes there costs as much again here."""

from typing import Any

from nanovllm.checks.sandbox import Sandbox, TooMuch, is_guarding

SCRIPT = "nanovllm.features.grammar.sandboxed_grammars"
TRIAL = Sandbox(SCRIPT, seconds=2, max_mb=32, niceness=5, packages=("llguidance", "nanovllm"))
# llguidance's own limits, for this process, too: an ordinary grammar needs a tenth.
LIMITS: dict[str, Any] = {"initial_lexer_fuel": 500_000, "step_max_items": 10_000, "max_lexer_states": 50_000}


def tried(kind: str, text: str) -> str:
    """See sandboxed_grammars.py. Raises ValueError."""
    try:
        return TRIAL.answer(kind, text, LIMITS)
    except TooMuch as error:
        remedy = "use smaller numbers (multipleOf, lengths, repetitions) or fewer parts"
        raise ValueError(f"to compile it {error} ({len(text)} characters): {remedy}") from None


def try_to_compile(source: str) -> None:
    """Raises ValueError for a stranger's grammar that costs too much; a script's own is compiled without a trial."""
    if is_guarding():
        tried("compile", source)
