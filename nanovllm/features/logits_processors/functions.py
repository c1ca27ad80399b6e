"""Functions of the caller's that change a request's logits: SamplingParams(logits_processors=[...]) (chapter 8)."""

import inspect
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nanovllm.checks.values import MAX_POSITIVE, shorten
from nanovllm.core.sequence import SequencePart

if TYPE_CHECKING:
    from torch import Tensor

    from nanovllm.core.sequence import Sequence as TokenSequence

FORMS = "f(generated_token_ids, logits_row) or f(prompt_token_ids, generated_token_ids, logits_row)"


def functions_of(value: Any) -> list[Callable[..., Any]]:
    """A list or tuple of such functions as a list; None is an empty one. Raises ValueError."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise ValueError(f"logits_processors must be a list of functions, {FORMS}; found {shorten(value)}")
    for function in value:
        num_arguments(function)
    return list(value)


def num_arguments(function: Any) -> int:
    """2 or 3; 2 if both work. Raises ValueError for what cannot be called so."""
    if callable(function):
        try:
            signature = inspect.signature(function)
        except (ValueError, TypeError):  # of some that are written in C nobody knows
            return 2
        for num in (2, 3):
            with suppress(TypeError):
                signature.bind(*range(num))
                return num
    raise ValueError(f"logits_processors holds {shorten(function)}, which cannot be called as {FORMS}")


class CallersFunctions(SequencePart):
    """Those of one sequence, called one after another.

    A function gets a row of float32 [vocab_size] that it may change, and returns the row. What it returns should depend
    on its arguments only: with draft tokens it is called for tokens that may come, after a step that failed once more.

    error: what one of them has done wrong; "" if nothing. The sequence ends there.
    """

    changes_logits = True

    def __init__(self, functions: Sequence[Callable[..., Any]], makers: Sequence[Callable[[], Any]] = ()) -> None:
        """makers: make functions that each sequence has of its own. They come first."""
        self._given, self._makers = functions, makers
        made = [*(make() for make in makers), *functions]
        self.functions = [(function, num_arguments(function)) for function in made]
        self.error = ""
        self._failed_at = 0  # tokens of the sequence, or of a draft of it, when that happened

    def for_sample(self) -> "CallersFunctions":
        return CallersFunctions(self._given, self._makers)

    def apply(self, seq: "TokenSequence", logits: "Tensor") -> "Tensor":
        """A sequence's row of logits as the functions leave it; NaN, so that no token is chosen, if one has failed.

        What is -infinity before stays so: a grammar cannot be left. +infinity counts as 1e10.
        """
        import torch  # not at the top: `import nanovllm` stays light

        row = logits.clone()  # a function may keep it, or fail half-way
        num_tokens = len(seq.tokens)
        if self.error and num_tokens > self._failed_at:
            return row.fill_(torch.nan)  # after a draft token for which a function has failed
        self.error, self._failed_at = "", num_tokens
        for number, (function, num_given) in enumerate(self.functions):
            given = [seq.generated_token_ids]
            if num_given == 3:
                given = [seq.tokens[: seq.num_prompt_tokens], *given]
            name = f"logits_processors[{number}] ({getattr(function, '__qualname__', None) or shorten(function)})"
            try:
                result = function(*given, row)
                if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
                    found = list(result.shape) if isinstance(result, torch.Tensor) else shorten(result)
                    raise ValueError(f"it must return the row, {list(logits.shape)}, found {found}")
                row = result.to(logits)
            except Exception as error:
                *_, place = traceback.extract_tb(error.__traceback__)
                self.error = f"{name} failed: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
                return torch.full_like(logits, torch.nan)
        return row.clamp(max=MAX_POSITIVE).masked_fill(logits == -torch.inf, -torch.inf)
