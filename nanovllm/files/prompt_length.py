"""How long a text may be: a server refuses a prompt that cannot fit untokenized; a tokenizer may not make it endless.

Tokenizing two million characters takes seconds, and looking at their number takes none. Forty rules that write "aa" for
"a" take a terabyte for one letter.
"""

import base64
import json
import re
from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any
from unicodedata import decomposition

MAX_GROWTH = 1000  # that of real tokenizers is below 20
SPACES = "".join(char for char in map(chr, range(0x3001)) if char.isspace())  # beyond U+3000 there is none


class PromptTooLong(ValueError):
    """By its words, or by the code that a server gives it, clients know that they have to send less.

    what: is too long, in tokens or characters. max_model_len: of prompt and output together.
    """

    def __init__(self, what: str, max_model_len: int) -> None:
        super().__init__(what, max_model_len)  # as they are: another process makes it anew of these

    def __str__(self) -> str:
        what, max_model_len = self.args
        return f"{what} (this model's maximum context length is {max_model_len} tokens)"


def length_check(tokenizer: Any, max_model_len: int) -> Callable[[str], None]:
    """A function that raises PromptTooLong for a text that surely has more tokens than that.

    It lets every text pass where the tokenizer may drop characters, or join many into one unknown token.
    """
    longest, lost = _longest_token(tokenizer)
    max_chars = longest * max_model_len

    def check(text: str) -> None:
        num_chars = len(text)
        if longest and num_chars > max_chars:
            num_chars -= sum(map(text.count, lost + composed()))  # some tokenizers compose characters, too
            if num_chars > max_chars:
                raise PromptTooLong(
                    f"the prompt has {len(text)} characters, and no token has more than {longest} characters; "
                    f"max_model_len is {max_model_len} tokens, prompt and output together",
                    max_model_len,
                )

    return check


@cache
def composed() -> str:
    """Characters that NFC may join to the one before: of all others, one is left at least.

    A stranger's text is not composed to count what is left: Python sorts marks by insertion, a million in 24 minutes.
    """
    hangul = [chr(code) for code in (*range(0x1161, 0x1176), *range(0x11A8, 0x11C3))]  # vowels and finals
    first, seconds = {}, {*hangul}
    for char in map(chr, range(0x110000)):
        parts = decomposition(char).split()
        if parts and not parts[0].startswith("<"):
            first[char], *second = (chr(int(part, 16)) for part in parts)
            seconds.update(second)
    while more := {char for char, begins in first.items() if begins in seconds} - seconds:
        seconds |= more  # such as two marks in one
    return "".join(sorted(seconds))


def _longest_token(tokenizer: Any) -> tuple[int, str]:
    """The most characters (in NFC) that one token stands for, 0 if that isn't known; characters that may need none."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return 0, ""
    parts = [*_parts(backend.normalizer), *_parts(backend.pre_tokenizer)]
    if not all(map(_keeps_characters, parts)):
        return 0, ""
    vocabulary, model = tokenizer.get_vocab(), backend.model
    longest = max(map(len, vocabulary))
    # Beside such a token spaces are dropped.
    lost = SPACES if any(t.lstrip or t.rstrip for t in tokenizer.added_tokens_decoder.values()) else ""
    if any(part["type"] == "ByteLevel" for part in parts):
        missing = [char for char, sign in _signs() if sign not in vocabulary]  # without a token for that byte: dropped
        return (0, "") if any(char > "\x7f" for char in missing) else (longest, lost + "".join(missing))
    if model.byte_fallback:
        is_whole = vocabulary.keys() >= {f"<0x{byte:02X}>" for byte in range(256)}
    else:
        is_whole = model.unk_token is not None and not model.fuse_unk
    return (longest, lost) if is_whole else (0, "")


def _parts(component: Any) -> list[dict[str, Any]]:
    """A normalizer or a pre-tokenizer as tokenizer.json has it, or those of which it is a sequence."""
    state = json.loads(component.__getstate__()) if component is not None else {"normalizers": []}
    return state.get("normalizers") or state.get("pretokenizers") or ([state] if "type" in state else [])


def _keeps_characters(part: dict[str, Any]) -> bool:
    if part["type"] == "Replace":
        text = part["pattern"].get("String")  # None: it is a regular expression
        return text is not None and len(part["content"]) >= len(text)
    known = ("NFC", "Prepend", "ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")
    return part["type"] in known and part.get("behavior") != "Removed"


def _signs() -> list[tuple[str, str]]:
    """(character, what a byte-level vocabulary has for its last byte): of ASCII, and of each last byte beyond it."""
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    return [(char, split(char)[0][0][-1]) for char in map(chr, range(0xC0))]


# -- tokenizer.json ---------------------------------------------------------------------------------------------------

# What works on texts: small values, in a file whose vocabulary takes json.loads() half a second.
WORKS_ON_TEXTS = ("normalizer", "pre_tokenizer", "decoder")
VALUE_FOLLOWS = re.compile(rb"\s*:\s*(?=[{\[])")
ESCAPED_LETTER = re.compile(rb"\\u00(?:[456][0-9a-fA-F]|7[0-9a-eA-E])")  # nobody writes them, but they can be written


def check_growth(path: Path) -> None:
    """Raises ValueError for a tokenizer.json whose rules may make a text more than MAX_GROWTH times as long.

    It must come before the file is loaded: the rules are applied to added tokens then.
    """
    raw = path.read_bytes()
    if ESCAPED_LETTER.search(raw):
        raw = json.dumps(json.loads(raw)).encode()
    for name in WORKS_ON_TEXTS:
        place = raw.find(key := f'"{name}"'.encode())
        while place >= 0:
            value = VALUE_FOLLOWS.match(raw, place + len(key))
            growth = 1 if value is None else _growth(_first_value(raw, value.end()))
            if growth > MAX_GROWTH:
                raise ValueError(f"the {name} in {path.name} may make a text {growth:.0e} times as long")
            place = raw.find(key, place + 1)


def _first_value(raw: bytes, start: int) -> Any:
    """The first value of JSON that begins here. Raises ValueError."""
    decode = json.JSONDecoder().raw_decode
    try:
        return decode(raw[start : start + (1 << 16)].decode("utf-8", "ignore"))[0]
    except ValueError:  # a longer one, with a table of SentencePiece's
        return decode(raw[start:].decode())[0]


def _growth(part: Any) -> float:
    """The most characters that a normalizer, a pre-tokenizer or a decoder makes of one, bounded from above.

    Only parts count whose effects multiply where there are many. They are known by their fields: older files name no
    types.
    """
    if not isinstance(part, dict):
        return 1
    for name in ("normalizers", "pretokenizers", "decoders"):
        if isinstance(part.get(name), list):
            return prod(map(_growth, part[name]))
    if "pattern" in part and isinstance(content := part.get("content"), str):
        pattern = part["pattern"].get("String") if isinstance(part["pattern"], dict) else part["pattern"]
        return max(1, len(content) / len(pattern)) if pattern else 1 + len(content)  # a regex may match between letters
    if isinstance(prefix := part.get("prepend"), str):
        return 1 + len(prefix)
    if isinstance(charsmap := part.get("precompiled_charsmap"), str):  # SentencePiece's: a trie, then texts
        return max(1, *map(len, base64.b64decode(charsmap).split(b"\0")))
    return 4 if "add_prefix_space" in part else 1  # a byte-level one makes letters of bytes
