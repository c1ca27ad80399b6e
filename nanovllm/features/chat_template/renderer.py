"""A template's text of a conversation, made in transformers' sandboxed environment, as vLLM makes it, too."""

from typing import Any

from nanovllm.features.chat_template.messages import Message


def render(template: str, conversation: list[Message], options: dict[str, Any]) -> str:
    """options: what the template asks for by name. Raises ValueError with the text of whatever the template raises."""
    from transformers.utils.chat_template_utils import render_jinja_template  # not at the top: --help needs no torch

    try:
        found: Any = render_jinja_template(conversations=[conversation], chat_template=template, **options)
    except Exception as error:
        raise ValueError(str(error) or type(error).__name__) from error
    return found[0][0]


def check_syntax(template: str) -> None:
    """Raises ValueError for a text that is no template. A template may refuse the empty conversation."""
    from jinja2 import TemplateSyntaxError

    try:
        render(template, [], {})
    except ValueError as error:
        if isinstance(error.__cause__, TemplateSyntaxError):
            raise
