"""What is asked about chat templates: the text that one makes of a conversation. Run by checks/confined_process.py."""

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template


def answer(template: str, conversation: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """The text. Raises whatever the template raises."""
    found: Any = render_jinja_template(conversations=[conversation], chat_template=template, **options)
    return found[0][0]
