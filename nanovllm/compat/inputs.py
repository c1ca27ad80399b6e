"""vLLM's names for what may be a prompt, for type checkers."""

from typing import TypedDict


class TextPrompt(TypedDict, total=False):
    """A text, as a dict. cache_salt: K/V is shared only between prompts whose salts are equal."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """Token ids, as a dict. prompt: their text, to be shown."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


PromptType = SingletonPrompt = str | list[int] | TextPrompt | TokensPrompt
