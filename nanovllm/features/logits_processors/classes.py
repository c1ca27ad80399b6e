"""LLM(logits_processors=[...]): classes in vLLM's form, whose objects change the logits of a batch (chapter 8).

Here an object's batch is one sequence: row 0, added when the sequence begins and never moved. So a request's answer
does not depend on its company, and a class that keeps a state for each row works as it does in vLLM.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.checks.values import shorten
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from nanovllm.config import EngineConfig
    from nanovllm.engine import LLMEngine

RequestLogitsProcessor = Callable[..., "torch.Tensor"]


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """What has changed in the batch. added: (row, parameters, prompt's tokens, the list that grows with each token)."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    moved: Sequence[tuple[int, int, MoveDirectionality]]


@dataclass(frozen=True)
class VllmConfig:
    """What a constructor is told of the engine. All parts of vLLM's configuration are the one EngineConfig here."""

    engine: "EngineConfig"

    @property
    def model_config(self) -> "EngineConfig":
        return self.engine

    scheduler_config = cache_config = parallel_config = speculative_config = model_config


class LogitsProcessor(ABC):
    """What a class derives from. The names are vLLM's; is_argmax_invariant() is not asked: apply() is always called."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raises ValueError for a request that this class cannot serve. A class may leave it out."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: "torch.device", is_pin_memory: bool) -> None: ...

    @abstractmethod
    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        """[rows, vocab_size], which it may change, to the same."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool: ...

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before apply(). None: the batch is the same, and each row has one more token."""


class AdapterLogitsProcessor(LogitsProcessor):
    """For functions of one row: derive from this and say which function a request gets."""

    def __init__(self, vllm_config: VllmConfig, device: "torch.device", is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[..., Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """f(generated, row) or f(prompt, generated, row); None: this request is left alone."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        for row, function in self.req_info.items():
            logits[row] = function(logits[row])
        return logits

    def _bound(self, params: SamplingParams, prompt: list[int] | None, generated: list[int]) -> Any:
        if (function := self.new_req_logits_processor(params)) is None:
            return None
        has_three = len(inspect.signature(function).parameters) == 3
        return partial(function, *([prompt, generated] if has_three else [generated]))


def process_dict_updates(entries: dict[int, Any], update: BatchUpdate | None, new_state: Callable[..., Any]) -> bool:
    """Keep row -> state up to date; new_state(params, prompt, generated) may be None: no state. Has it changed?"""
    before = dict(entries)
    for row, *given in update.added if update is not None else ():
        entries[row] = new_state(*given)
    for row in update.removed if update is not None else ():
        entries.pop(row, None)
    for first, second, direction in update.moved if update is not None else ():
        here, there = entries.pop(first, None), entries.pop(second, None)
        entries[second] = here
        if direction is MoveDirectionality.SWAP:
            entries[first] = there
    for row in [row for row, state in entries.items() if state is None]:
        del entries[row]
    return entries != before


def classes_of(value: Any) -> tuple[type[LogitsProcessor], ...]:
    """The option: a list of such classes, or of their names ("package.module:Class"). Raises ValueError."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"logits_processors must be a list of classes, found {shorten(value)}")
    return tuple(_class_of(each) for each in value)


def _class_of(given: Any) -> type[LogitsProcessor]:
    found = given
    if isinstance(given, str):
        module, _, name = given.partition(":")
        try:
            found = getattr(import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"logits_processors: {shorten(given)} cannot be imported: {error}") from None
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        base = "nanovllm.v1.sample.logits_processor.LogitsProcessor"
        raise ValueError(f"logits_processors must be classes derived from {base}, found {shorten(given)}")
    return found


def check_classes(engine: "LLMEngine", params: SamplingParams) -> list[Callable[..., "OneRow"]]:
    """One maker for each of the engine's classes, of a function for a new sequence. Raises ValueError."""
    for cls in engine.config.logits_processors:
        cls.validate_params(params)
    return [partial(OneRow, cls, engine, params) for cls in engine.config.logits_processors]


class OneRow:
    """An object of such a class as a function of one sequence (functions.py)."""

    def __init__(self, cls: type[LogitsProcessor], engine: "LLMEngine", params: SamplingParams) -> None:
        self.cls, self.params = cls, params
        self.config, self.device = VllmConfig(engine.config), engine.model_runner.device
        self.__qualname__ = cls.__qualname__
        self._generated: list[int] = []
        self._object: LogitsProcessor | None = None

    def __call__(self, prompt: list[int], generated: list[int], row: "torch.Tensor") -> "torch.Tensor":
        update = None
        if self._object is None or len(generated) != len(self._generated) + 1:  # it begins, or a step is done again
            self._object, self._generated = self.cls(self.config, self.device, False), []
            update = BatchUpdate(1, [], [(0, self.params, prompt, self._generated)], [])
        self._generated[:] = generated
        self._object.update_state(update)
        return self._object.apply(row.unsqueeze(0))[0]
