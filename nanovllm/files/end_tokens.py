"""What ends an answer: every token that any of a checkpoint's files calls an end, as in vLLM and llama.cpp. No torch.

Files disagree: config.json may name the end of a text, generation_config.json that of a turn, the tokenizer one of the
two. A token that one of them calls an end is never a part of an answer.
"""

import logging
from collections.abc import Iterable
from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_number

logger = logging.getLogger("nanovllm")

EndTokens = dict[int, tuple[str, ...]]  # {token id: who calls it an end}

# Of a text, a turn, a message; in code that is filled in, of the file: tokenizer.ggml.eos_token_id, ...
IN_GGUF = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# What llama.cpp takes for ends by their text, whatever the metadata say (llama-vocab.cpp, special_eog_ids).
TEXTS = "<|im_end|> <|eot_id|> <|eom_id|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <|endoftext|>".split()
TEXTS += "<|end_of_text|> <|message_end|> <end_of_turn> <end_of_utterance> <turn|> _<EOT>".split()
TEXTS += "<｜end▁of▁sentence｜> <|fim_pad|> <fim-pad> <fim_pad> <|fim_repo|> <|repo_name|> <|file_sep|>".split()
TEXTS += "<fim-repo> <reponame> <EOT>".split()
# These are ends only where the file marks them as special: ordinary text may look so.
MARKED_TEXTS = ("</s>", "<eos>", "[EOS]", "[EOT]", "<PAD>", "[PAD]", "<REPO>")
NORMAL_TOKEN = 1  # of tokenizer.ggml.token_type
HARMONY = {"<|return|>", "<|call|>", "<|end|>"}  # of a vocabulary with all three, the last ends a message, no answer


def ids_of(eos: Any) -> list[Any]:
    """eos_token_id of a checkpoint's files, a number, a list of numbers or None, as a list that is not checked."""
    return eos if isinstance(eos, list) else [] if eos is None else [eos]


def end_tokens(sources: Iterable[tuple[str, Any]], vocab_size: int, where: Path) -> EndTokens:
    """Their union. sources: (who, an id, a list of ids or None). Raises ValueError for what is no token's id."""
    found: dict[int, tuple[str, ...]] = {}
    for who, eos in sources:
        for token_id in ids_of(eos):
            check_number(f"{where}: {who}: eos_token_id", token_id, Integral, 0, vocab_size - 1)
            if who not in found.get(token_id, ()):
                found[token_id] = (*found.get(token_id, ()), who)
    return found


def overriding(overrides: dict[str, Any]) -> list[tuple[str, Any]]:
    """What hf_overrides names instead of all files, at its top or for the language model. Empty if it names nothing."""
    parts = [part for part in (overrides, overrides.get("text_config")) if isinstance(part, dict)]
    return [("hf_overrides", part["eos_token_id"]) for part in parts if "eos_token_id" in part]


def gguf_sources(metadata: dict[str, Any]) -> list[tuple[str, Any]]:
    """What a GGUF file names: by its metadata, and by the texts of its vocabulary."""
    sources = [(name, metadata.get(name)) for name in (f"tokenizer.ggml.{kind}_token_id" for kind in IN_GGUF)]
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list):
        return sources
    # -1, as some converters write for "none". The tokenizer warns of that of a text, a turn or a message.
    sources = [(name, eos) for name, eos in sources if not isinstance(eos, int) or 0 <= eos < len(tokens)]
    wanted = {*TEXTS, *MARKED_TEXTS} - ({"<|end|>"} if set(tokens) >= HARMONY else set())
    for token_id, text in enumerate(tokens):
        if text in wanted:
            is_marked = isinstance(types, list) and token_id < len(types) and types[token_id] != NORMAL_TOKEN
            if is_marked or text not in MARKED_TEXTS:
                sources.append(("its text", token_id))
    return sources


def with_tokenizer(found: EndTokens, eos: int | None, who: str, vocab_size: int, where: Path) -> EndTokens:
    """And the tokenizer's. One beyond the vocabulary cannot be generated: a warning, or a ValueError if it is the only
    one."""
    if found and eos is not None and not 0 <= eos < vocab_size:
        logger.warning("%s: %s's end token %d is not among the model's %d", where, who, eos, vocab_size)
        return found
    more = end_tokens([(who, eos)], vocab_size, where)
    return found | {token_id: (*found.get(token_id, ()), *names) for token_id, names in more.items()}


def described(found: EndTokens, tokenizer: Any) -> list[str]:
    """A line for each: its id, its text, who names it."""
    texts = {token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in found}
    return [f"{token_id} {texts[token_id]!r} ({', '.join(found[token_id])})" for token_id in sorted(found)]
