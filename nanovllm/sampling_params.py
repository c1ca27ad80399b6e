"""SamplingParams: how the tokens of one request are chosen and when they end (chapter 8).

Names, defaults and meanings are vLLM's. Neither torch nor NumPy: the control plane imports this file.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.option_checks import check_parameter
from nanovllm.structured_outputs import StructuredOutputsParams
from nanovllm.vllm_names import Named, accepted


@dataclass
class SamplingParams(metaclass=Named):
    """Parameters of one request, copied when it is made.

    Applied in this order: structured_outputs, allowed_token_ids, bad_words, logit_bias, penalties, temperature, min_p,
    top_k, top_p.

    n:                   samples per prompt; they share the prompt's K/V through the prefix cache
    temperature:         0 is greedy (the most likely token, always); less than 1e-5 counts as 0
    top_p:               probability mass to keep
    min_p:               least probability to keep, as a share of the largest
    top_k:               number of tokens to keep; 0 or -1 keeps all
    seed:                same seed, same tokens, whatever else is in the batch; None or -1: the engine chooses
    max_tokens:          most tokens to generate; None: as many as fit in max_model_len
    min_tokens:          what ends the sequence comes after so many tokens
    stop:                strings that end the text (they are not part of it)
    stop_token_ids:      token ids that end the sequence, beside the checkpoint's EOS
    include_stop_str_in_output: what ended the text is part of it: a stop string, a stop token's text
    ignore_eos:          generate on past EOS
    logprobs:            how many top tokens to report a position, of the raw logits (structured_outputs apart); 0: the
                         chosen one alone; -1: all
    prompt_logprobs:     the same for the tokens of the prompt; it is then computed anew, for a cache has no logits
    repetition_penalty:  > 1 discourages tokens of prompt and output (CTRL, arXiv:1909.05858)
    presence_penalty:    subtracted from the logits of tokens that the output has
    frequency_penalty:   subtracted from them once for each time
    logit_bias:          {token id: what is added to its logit}
    allowed_token_ids:   no other token is chosen
    bad_words:           texts that are not generated: the token that would complete one is not chosen
    structured_outputs:  what the text has to fit: a JSON schema, a regex, a choice, a grammar (structured_outputs.py)
    detokenize:          False: the output has token ids and no text
    skip_special_tokens: special tokens are not part of the text
    spaces_between_special_tokens: where they are, spaces stand between them (of tokenizers in pure Python)

    Raises ValueError for an unknown name, a wrong type or a value out of range, when a field is assigned, too.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Iterable[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dataclass_fields__ or accepted({name: value}, self.__dataclass_fields__, "SamplingParams"):
            kind = self.__dataclass_fields__[name].type
            object.__setattr__(self, name, check_parameter(name, value, kind))

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are found in the text: they need detokenize=True")
        if self.structured_outputs is not None and self.allowed_token_ids is not None:
            raise ValueError("allowed_token_ids may leave no token of structured_outputs: give one of them")

    def clone(self) -> "SamplingParams":
        """A copy that shares no list; checked as a whole, as fields may have been assigned in any order."""
        return replace(self)
