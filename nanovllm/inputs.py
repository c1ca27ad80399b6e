"""The forms of a prompt that are dicts, under vLLM's names."""

from typing import TypedDict


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    prompt: str


class TokensPrompt(_Salted, total=False):
    prompt_token_ids: list[int]
    prompt: str
