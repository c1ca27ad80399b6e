"""SpeculativeConfig: where draft tokens come from, and how many, checked before any work (chapter 13)."""

import os
from dataclasses import dataclass
from typing import Any

from nanovllm.checks.names import check_options, names_checked, option
from nanovllm.checks.values import MAX_INT32, check_choice, shorten
from nanovllm.config import BITS

METHODS = ("ngram", "draft_model", "self")
NGRAM_LENGTHS = 4, 2  # longest and shortest
ONLY_OF = {  # option -> the methods that have it
    **dict.fromkeys(("prompt_lookup_max", "prompt_lookup_min"), ("ngram",)),
    **dict.fromkeys(("model", "revision"), ("draft_model",)),
    **dict.fromkeys(("quantization", "max_model_len"), ("draft_model", "self")),
}


@names_checked("SpeculativeConfig")
@dataclass(frozen=True)
class SpeculativeConfig:
    """What LLM(speculative_config={...}) may say; names and meanings are vLLM's, "self" is ours."""

    method: str | None = option(
        None,
        '"ngram" (a text goes on as it did before), "draft_model" (a smaller model with the same vocabulary proposes), '
        '"self" (the model itself in fewer bits does)',
    )
    model: str | None = option(None, 'the draft model\'s directory or hub id; method is "draft_model" then')
    num_speculative_tokens: int = option(
        5, "draft tokens of one sequence in a step; how many pay is measured", low=1, high=64
    )
    prompt_lookup_max: int | None = option(None, "tokens of the longest n-gram that is looked up", low=1, high=64)
    prompt_lookup_min: int | None = option(None, "and of the shortest", low=1, high=64)
    quantization: str | None = option(None, 'of the draft model\'s weights: "int8" or "int4"')
    revision: str | None = option(None, "branch, tag or commit of the draft model in the hub")
    max_model_len: int | None = option(None, "tokens up to which the draft model proposes", low=2, high=MAX_INT32)

    def __post_init__(self) -> None:
        def assign(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        if isinstance(self.model, os.PathLike):
            assign("model", str(self.model))
        check_options(self)
        if self.method is None and self.model is not None:
            assign("method", "draft_model")
        check_choice("speculative_config: method", self.method, METHODS)
        for name, methods in ONLY_OF.items():
            if getattr(self, name) is not None and self.method not in methods:
                found = shorten(getattr(self, name))
                raise ValueError(f"speculative_config: {name} is for {' and '.join(methods)}, found {name}={found}")
        if self.method == "draft_model" and (not isinstance(self.model, str) or not self.model):
            found = shorten(self.model)
            raise ValueError(f"speculative_config: model must be a checkpoint's directory or a hub id, found {found}")
        if self.method == "self":
            assign("quantization", self.quantization or "int4")
        if self.quantization is not None:
            check_choice("speculative_config: quantization", self.quantization, BITS)
        if self.method == "ngram":
            given = [n for n in (self.prompt_lookup_max, self.prompt_lookup_min) if n is not None] or NGRAM_LENGTHS
            assign("prompt_lookup_max", given[0])
            assign("prompt_lookup_min", given[-1])
            if given[0] < given[-1]:
                raise ValueError(
                    f"speculative_config: prompt_lookup_min={given[-1]} is more than prompt_lookup_max={given[0]}"
                )
