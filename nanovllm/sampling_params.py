"""SamplingParams: how the tokens of one request are chosen and when they end (chapter 8).

Names, defaults and meanings are vLLM's. The control plane imports this file, so it imports nothing: checks/sampling.py,
which `import nanovllm` loads, puts its checks in front of the class.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.features.callers.output_kind import RequestOutputKind
    from nanovllm.features.grammar.params import StructuredOutputsParams


def option(default: Any, text: str) -> Any:
    """A dataclass's field with this default. text: what it means, and what --help says of its flag."""
    return field(default=default, metadata={"help": text})


@dataclass
class SamplingParams:
    """Parameters of one request, copied when it is made.

    Applied in this order: structured_outputs, allowed_token_ids, bad_words, logit_bias, logits_processors, penalties,
    temperature, min_p, top_k, top_p.

    Logprobs are of the logits before all that, structured_outputs apart.

    Raises ValueError for an unknown name, a wrong type or a value out of range, when a field is assigned, too.
    """

    n: int = option(1, "samples per prompt; they share the prompt's K/V through the prefix cache")
    temperature: float = option(1.0, "0 is greedy (the most likely token, always); less than 1e-5 counts as 0")
    top_p: float = option(1.0, "probability mass to keep")
    top_k: int = option(0, "number of tokens to keep; 0 or -1 keeps all")
    min_p: float = option(0.0, "least probability to keep, as a share of the largest")
    seed: int | None = option(None, "same seed, same tokens, whatever else is in the batch; -1: the engine chooses")
    max_tokens: int | None = option(16, "most tokens to generate; None: as many as fit in max_model_len")
    min_tokens: int = option(0, "before so many tokens neither EOS nor a stop ends the sequence")
    stop: str | Iterable[str] | None = option(None, "strings that end the text (they are not part of it)")
    stop_token_ids: Iterable[int] | None = option(None, "token ids that end the sequence, beside the checkpoint's EOS")
    include_stop_str_in_output: bool = option(False, "a stop string, or a stop token's text, is part of the text")
    ignore_eos: bool = option(False, "generate on past EOS")
    logprobs: int | None = option(None, "top tokens to report beside the chosen one, at each position; -1: all")
    logprob_token_ids: list[int] | None = option(None, "tokens to report there instead of the top ones")
    prompt_logprobs: int | None = option(None, "the same for the prompt, computed anew then: a cache has no logits")
    repetition_penalty: float = option(1.0, "> 1 discourages tokens of prompt and output (CTRL, arXiv:1909.05858)")
    presence_penalty: float = option(0.0, "subtracted from the logits of tokens that the output has")
    frequency_penalty: float = option(0.0, "subtracted from them once for each time")
    logit_bias: dict[int, float] | None = option(None, "{token id: what is added to its logit}")
    allowed_token_ids: list[int] | None = option(None, "no other token is chosen")
    bad_words: Iterable[str] | None = option(None, "texts not generated: a token that would complete one is not chosen")
    logits_processors: list[Any] | None = option(None, "functions (generated_token_ids, logits_row) -> logits_row")
    extra_args: dict[str, Any] | None = option(None, "what the classes of LLM(logits_processors=...) are to know")
    structured_outputs: "StructuredOutputsParams | None" = option(
        None, "what the text has to fit: a JSON schema, a regex, a choice, a grammar"
    )
    detokenize: bool = option(True, "False: the output has token ids and no text")
    skip_special_tokens: bool = option(True, "special tokens are not part of the text")
    spaces_between_special_tokens: bool = option(True, "where they are, spaces stand between them")
    output_kind: "RequestOutputKind" = option(
        0, "what outputs of a running request hold (features/callers/output_kind.py)"
    )

    def clone(self) -> "SamplingParams":
        """A copy that shares no list, checked as a whole: fields may have been assigned one by one."""
        return replace(self)
