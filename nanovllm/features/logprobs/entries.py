"""What the sampler knows of a token's probability, as a user reads it: with the token's text."""

from typing import Any

from nanovllm.detokenizer import REPLACEMENT
from nanovllm.files.token_bytes import WORD_BEGIN
from nanovllm.outputs import Logprob

MAX_BYTES = 4  # of a character, and so the most tokens that one can have


def make_entries(tokenizer: Any, found: Any, token_ids: list[int], position: int) -> dict[int, Logprob]:
    """found: the TokenLogprobs of the token at this position of token_ids. tokenizer None: without texts."""
    token_id, before = token_ids[position], token_ids[max(0, position - MAX_BYTES) : position]

    def entry(token_id: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, None if tokenizer is None else decoded_token(tokenizer, token_id, before))

    entries = {token_id: entry(token_id, found.logprob, found.rank)}
    ranks = found.top_ranks or range(1, len(found.top_token_ids) + 1)
    for other, logprob, rank in zip(found.top_token_ids, found.top_logprobs, ranks, strict=True):
        if other != token_id:
            entries[other] = entry(other, logprob, rank)
    return entries


def decoded_token(tokenizer: Any, token_id: int, before: list[int]) -> str:
    """A token's own text, special tokens included, as vLLM gives it.

    Bytes that do not end a character are "", and the token that ends it has the whole character.
    """
    if not hasattr(tokenizer, "_token_texts"):
        tokenizer._token_texts = {}  # kept by the tokenizer: a prompt's logprobs name the same tokens again and again
    text = tokenizer._token_texts.get(token_id)
    if text is None:
        text = tokenizer._token_texts[token_id] = _own_text(tokenizer, token_id)
    return _end_of_character(tokenizer, token_id, before) if text.endswith(REPLACEMENT) else text


def _own_text(tokenizer: Any, token_id: int) -> str:
    text = tokenizer.decode([token_id])
    piece = tokenizer.convert_ids_to_tokens(token_id) or ""
    num_spaces = len(piece) - len(piece.lstrip(WORD_BEGIN))
    return " " * (num_spaces - (len(text) - len(text.lstrip(" ")))) + text


def _end_of_character(tokenizer: Any, token_id: int, before: list[int]) -> str:
    for length in range(1, min(MAX_BYTES, len(before)) + 1):
        context = before[-length:]
        together = tokenizer.decode([*context, token_id])
        if not together.endswith(REPLACEMENT):
            while context and tokenizer.decode(context[-1:]).endswith(REPLACEMENT):
                context.pop()
            return together[len(tokenizer.decode(context)) if context else 0 :]
    return ""
