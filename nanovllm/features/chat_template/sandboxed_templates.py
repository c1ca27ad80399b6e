"""What is asked about chat templates: the text that one makes of a conversation. Run by checks/sandbox_process.py."""

from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template


def answer(
    template: str,
    conversation: list[dict[str, Any]],
    options: dict[str, Any],
    twin: list[dict[str, Any]] | None = None,
    twins_options: dict[str, Any] | None = None,
) -> str | tuple[str, str | None]:
    """The text. Raises whatever the template raises.

    twin: another conversation; twins_options: what is different of its options. The answer is then (text, the twin's
    text), or (text, None) if the template does not take the twin.
    """
    text = _render(template, conversation, options)
    if twin is None:
        return text
    try:
        return text, _render(template, twin, options | (twins_options or {}))
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error.__context__, MemoryError):
            raise
        return text, None


def _render(template: str, conversation: list[dict[str, Any]], options: dict[str, Any]) -> str:
    found: Any = render_jinja_template(conversations=[conversation], chat_template=template, **options)
    return found[0][0]
