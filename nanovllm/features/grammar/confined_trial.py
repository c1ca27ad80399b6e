"""What is asked about grammars: does this one compile? Run by checks/confined_process.py."""

from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from


class Bytes:
    """A tokenizer whose tokens are bytes: what llguidance bounds badly does not depend on the tokens."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def answer(kind: str, text: str, limits: dict[str, Any]) -> str:
    """ "convert": the grammar in Lark's notation. "compile": nothing, if it can be. Raises what is wrong with it."""
    if kind == "convert":
        return grammar_from("grammar", text)
    matcher = LLMatcher(TOKENIZER, text, log_level=0, limits=LLParserLimits(**limits))
    if error := matcher.get_error():
        raise ValueError(error)
    matcher.compute_bitmask()  # a failure here is one of the first token: it is explained in the other process
    return ""
