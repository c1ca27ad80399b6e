"""Which of a checkpoint's files has its chat template. transformers decides; this asks it, and names the file."""

import json
from pathlib import Path
from typing import Any

Templates = dict[str, str]  # by their names; "default" is the one that a chat without a name gets


def take_processors_template(tokenizer: Any, place: Path) -> None:
    """Give a tokenizer the template of the checkpoint's processor, with which a model that sees images is used.

    AutoProcessor takes that of processor_config.json, then that of chat_template.json, before it looks where a
    tokenizer looks. Raises ValueError for files that it refuses.
    """
    from transformers.processing_utils import ProcessorMixin

    if place.is_file():  # GGUF
        return
    try:
        found = ProcessorMixin.get_processor_dict(place, local_files_only=True)[0].get("chat_template")
        if found:
            tokenizer.chat_template = _by_name(found) if isinstance(found, list) else found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"the chat template in {place} cannot be read: {error!r}") from error


def file_of(template: str, place: Path, sees_images: bool) -> str:
    """The file of the checkpoint that has this template. sees_images: a processor's files count, too."""
    if place.is_file():  # GGUF
        return place.name
    processor_files = ("processor_config.json", "chat_template.json") if sees_images else ()
    named = sorted(place.glob("additional_chat_templates/*.jinja"))
    files = [
        *(place / name for name in (*processor_files, "chat_template.jinja")),
        *named,
        place / "tokenizer_config.json",
    ]
    found = (path for path in files if path.is_file() and template in _templates_in(path).values())
    return next((str(path.relative_to(place)) for path in found), "no file of the checkpoint")


def _templates_in(path: Path) -> Templates:
    text = path.read_text("utf-8")
    if path.suffix == ".jinja":
        return {path.stem: text}
    found = json.loads(text).get("chat_template") or {}
    if isinstance(found, str):
        return {"default": found}
    return _by_name(found) if isinstance(found, list) else found


def _by_name(templates: list[dict[str, str]]) -> Templates:
    return {template["name"]: template["template"] for template in templates}
