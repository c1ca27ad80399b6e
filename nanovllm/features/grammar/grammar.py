"""Structured outputs: text that fits a JSON schema, a regular expression, a list of choices or a grammar (chapter 8).

llguidance says which tokens may come next; features/logits_processors takes the others' logits away. A state belongs to
a sequence and is brought up to its tokens whenever it is asked, forwards or backwards: a step that failed, a preemption
or a rejected draft token need no word from anybody. `pip install nanovllm[structured]`.
"""

import ctypes
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import fields
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from nanovllm.features.grammar.after_reasoning import AfterReasoning
from nanovllm.features.grammar.base import GrammarPart
from nanovllm.features.grammar.lark import NO_FORCING, quoted
from nanovllm.features.grammar.notations import lark_of_grammar, lark_of_regex
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.features.grammar.schemas import lark_of_json
from nanovllm.features.grammar.tags import lark_of
from nanovllm.features.grammar.trial import LIMITS, one_budget, try_to_compile
from nanovllm.features.grammar.vocabulary import Vocabulary
from nanovllm.files.token_bytes import WORD_BEGIN

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine
    from nanovllm.request import Request

# What a sequence may take of llguidance's time: this, and so much more for each mask, which takes 0.1 to 0.4 ms.
FREE_S, MASK_S = 0.25, 0.002


class GrammarCompiler:
    """Grammars of one model's tokenizer."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.tokenizer, self.vocab_size, self.eos_token_ids = tokenizer, vocab_size, sorted(eos_token_ids)
        self._compiled: tuple[str, Any] = "", None  # the newest: samples of a request and lines of a job share it

    @cached_property
    def _special_texts(self) -> dict[str, int]:
        """And their tokens."""
        return {text: token for text, token in self.tokenizer.get_added_vocab().items() if text.strip()}

    @cached_property
    def _llg_tokenizer(self) -> Any:
        """Made at the first request that needs it: it takes half a second."""
        import llguidance.hf

        try:
            return llguidance.hf.from_tokenizer(self.tokenizer, self.vocab_size, eos_token=self.eos_token_ids)
        except Exception as error:
            raise ValueError(f"this checkpoint's tokenizer does not suit llguidance: {error}") from error

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._llg_tokenizer)

    def compile_for(self, requests: list["Request"]) -> None:
        """Give every sample of these requests its grammar, compiled once for those that share it. Raises ValueError."""
        compiled: dict[int, Grammar | AfterReasoning] = {}
        for request in requests:
            if (asked := request.params.structured_outputs) is not None:
                grammar = compiled[id(asked)] = compiled.get(id(asked)) or self._compile_for(asked)
                for sample in request.samples:
                    sample.seq.parts["grammar"] = copy(grammar)

    def _compile_for(self, asked: StructuredOutputsParams) -> "Grammar | AfterReasoning":
        grammar = self.compile(asked)
        return grammar if asked.reasoning is None else AfterReasoning(grammar, self.tokenizer, *asked.reasoning)

    @one_budget()
    def compile(self, params: StructuredOutputsParams) -> "Grammar":
        """A grammar at its beginning. ValueError for one that is broken, or that no text can fit."""
        try:
            import llguidance
        except ImportError as missing:
            raise ValueError('structured outputs need llguidance:  pip install "nanovllm[structured]"') from missing
        try:
            source = trial = _source(params)
            plain = source.replace("\\", "")
            if params.structural_tag is not None:
                source = _source(params, self._special_texts)
            elif any(text in plain for text in (*self._special_texts, WORD_BEGIN)):
                # llguidance would write a text that has to come in the fewest tokens: as the special one, as a space.
                source = trial = source + NO_FORCING
            known, matcher = self._compiled
            if source != known or _first_error(matcher):  # copies share a lexer, and one that is exhausted stays so
                try_to_compile(trial)  # by a tokenizer that has no special tokens
                limits = llguidance.LLParserLimits(**LIMITS)
                matcher = llguidance.LLMatcher(self._llg_tokenizer, source, log_level=0, limits=limits)
                if error := _first_error(matcher):
                    raise ValueError(error)
                self._compiled = source, matcher
        except ValueError as problem:
            kind = next(f.name for f in fields(params) if getattr(params, f.name) not in (None, False))
            raise ValueError(f"structured outputs: {kind} cannot be used: {str(problem).strip()[:2000]}") from None
        return Grammar(matcher, self.vocab_size, self.eos_token_ids, self._vocabulary)


class Grammar(GrammarPart):
    """How far one sequence has come in its grammar. May be asked by two threads.

    error: why llguidance has given up (a grammar can grow beyond its limits), or "". No token can follow then, either.
    """

    def __init__(self, matcher: Any, vocab_size: int, eos_token_ids: list[int], vocabulary: Vocabulary) -> None:
        self.vocab_size, self.eos_token_ids, self.error = vocab_size, eos_token_ids, ""
        self.vocabulary = vocabulary
        self._beginning, self._matcher, self._lock = matcher, matcher.deep_copy(), Lock()
        self._token_ids: list[int] | None = []  # that the matcher has taken in; None: not known
        self._spent_s = 0.0  # of the asking threads' own time
        self._num_masks = 0  # and draft tokens: these have cost time, too, whether they were accepted or not

    def __copy__(self) -> "Grammar":
        """Another one, at its beginning."""
        return Grammar(self._beginning, self.vocab_size, self.eos_token_ids, self.vocabulary)

    def is_complete(self, token_ids: list[int]) -> bool:
        with self._asked():
            self._follow(token_ids)
            if not self.error and (reason := _first_line(self._matcher) or self._is_slow()):
                self.error = f"structured outputs: llguidance has given up: {reason}"
            return bool(self.error) or self._matcher.is_stopped()

    def write_mask(self, token_ids: list[int], address: int, num_bytes: int) -> None:
        """Write the bits of the tokens that may follow: token t is bit t % 8 of byte t // 8."""
        with self._asked():
            self._follow(token_ids)
            self._num_masks += 1
            self._matcher.unsafe_compute_mask_ptr(address, num_bytes)
            if self._matcher.is_error():  # its mask is EOS, and the answer would look complete; is_complete() ends it
                other = next(token for token in range(self.vocab_size) if token not in self.eos_token_ids)
                ctypes.memset(address, 0, num_bytes)
                ctypes.c_ubyte.from_address(address + other // 8).value = 1 << other % 8

    def possible(self, token_ids: list[int], draft: list[int]) -> list[int]:
        """The draft tokens that may follow these tokens, up to one that completes the text."""
        with self._asked():
            for n, token_id in enumerate(draft):
                self._follow(token_ids + draft[:n])
                self._num_masks += 1
                if self._matcher.is_stopped() or not self._matcher.validate_tokens([token_id]):
                    return draft[:n]
        return draft

    @contextmanager
    def _asked(self) -> Iterator[None]:
        with self._lock:
            began = time.thread_time()
            yield
            self._spent_s += time.thread_time() - began

    def _is_slow(self) -> str:
        """Why that is an error, or "". llguidance's limits leave room for masks of a second, at every step."""
        limit_s = FREE_S + MASK_S * self._num_masks
        return f"its masks have taken {self._spent_s:.2f} s, above {limit_s:.2f} s" * (self._spent_s > limit_s)

    def _follow(self, token_ids: list[int]) -> None:
        known, self._token_ids = self._token_ids, None  # until it is done: an exception may come between any two lines
        same = min(len(known or ()), len(token_ids))
        while known and known[:same] != token_ids[:same]:  # a rejected draft token, or a failed step
            same -= 1
        if known is None or (same < len(known) and not self._matcher.rollback(len(known) - same)):
            self._matcher = self._beginning.deep_copy()  # reset() keeps an error
            same = 0
        self._matcher.consume_tokens(token_ids[same:])
        self._token_ids = list(token_ids)


def make(engine: "LLMEngine") -> GrammarCompiler:
    """See wings.ON_DEMAND."""
    return GrammarCompiler(engine.tokenizer, engine.model_config.vocab_size, engine.model_config.eos_token_ids)


def _first_error(matcher: Any) -> str:
    """Why there is no first token, or ""."""
    if error := matcher.get_error():
        return error
    first = matcher.deep_copy()
    first.compute_bitmask()
    error = _first_line(first)
    return "no text fits it: there is no first token" if error.startswith("NoExtension") else error


def _first_line(matcher: Any) -> str:
    """Of its error; what follows is llguidance's state."""
    return matcher.get_error().partition("\n")[0]


def _source(params: StructuredOutputsParams, token_ids: dict[str, int] | None = None) -> str:
    """The grammar in Lark's notation, as llguidance extends it. Raises ValueError.

    token_ids: of texts that are special; a structural tag's come as these tokens.
    """
    if params.regex is not None:
        return lark_of_regex(params.regex)
    if params.grammar is not None:
        return lark_of_grammar(params.grammar)
    if params.choice is not None:
        lexeme = " | ".join(map(quoted, params.choice))  # one: as rules, 2,000 are too many
        return f"start: CHOICE\nCHOICE: {lexeme}"
    options: dict[str, Any] = {"whitespace_flexible": not params.disable_any_whitespace}
    if params.structural_tag is not None:
        return lark_of(params.structural_tag, params.disable_additional_properties, options, token_ids)
    given = params.json if params.json is not None else {"type": "object"}
    return lark_of_json(given, params.disable_additional_properties, options)
