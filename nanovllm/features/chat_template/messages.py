"""Messages as OpenAI's API allows them: checked, and then in the form that a chat template reads (reads.py).

A checked message's content is None, a text or a list of parts of type text, and of type image in a user's message; a
call's arguments are as they came.
"""

import json
import logging
from collections.abc import Collection
from typing import Any

from nanovllm.checks.values import shorten

logger = logging.getLogger("nanovllm")

Message = dict[str, Any]
TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text"), "text")  # type -> its key
TEXT_PARTS |= {"refusal": "refusal", "thinking": "thinking"}  # vLLM reads these as texts, too
# type of a part -> the keys under which its image may be, as OpenAI's APIs, vLLM and transformers write them
IMAGE_PARTS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "image_url", "url", "path"),
    "image_pil": ("image_pil",),
}
KEYS_OF_IMAGES = ("image_url", "image", "image_pil")  # which no part of another type has
FORMATS_OF_CONTENT = ("auto", "string", "openai")  # vLLM's names for the forms of content
STRING, PARTS, ONE_PART = "string", "parts", "one part"  # what a template may read as content
OBJECT, TEXT = "object", "text"  # what it may read as the arguments of a call


def checked_messages(messages: Any) -> list[Message]:
    """Raises ValueError for what no template takes. Fields that are null, or that JSON cannot hold, are left out."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"a conversation is a list of messages, not empty; found {shorten(messages)}")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            known = "a dict with strings 'role' and 'content'"
            raise ValueError(f"message {index} must be {known}, found {shorten(message)}")
        if message.get("images"):  # Ollama's
            raise ValueError(
                f"message {index}: images are parts of its content, of type image_url, and no field beside it"
            )
        calls = message.get("tool_calls") or None
        if not isinstance(calls, list | None):
            raise ValueError(f"message {index}: tool_calls must be a list, found {shorten(calls)}")
        read_here = ("role", "content", "tool_calls", "reasoning")
        kept = {name: value for name, value in message.items() if name not in read_here and _is_told(value)}
        content = _checked_content(message.get("content"), index, message["role"])
        if not content and isinstance(kept.get("refusal"), str):  # OpenAI's field for an answer that is none
            content = kept["refusal"]
        _check_id(kept, "tool_call_id", index)
        if calls:
            kept["tool_calls"] = [_checked_call(call, index) for call in calls]
        if message.get("reasoning") is not None:
            kept |= {"reasoning": message["reasoning"], "reasoning_content": message["reasoning"]}
        checked.append({"role": message["role"], "content": content, **kept})
    return checked


def plain_messages(messages: Any) -> list[Message]:
    """Checked messages whose contents are texts."""
    return [message | {"content": text_of(message["content"])} for message in checked_messages(messages)]


def text_of(content: Any) -> str:
    """The text of a checked message. Parts are joined as vLLM joins them for templates that read a text."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part["type"] == "text")
    return content or ""


def has_images(content: Any) -> bool:
    """Does a checked message have images?"""
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def take_images(messages: list[Message]) -> list[Any]:
    """What checked messages name as images, in order. The parts stay, as templates read them: {"type": "image"}."""
    parts = [part for message in messages if has_images(message["content"]) for part in message["content"]]
    return [part.pop("image") for part in parts if part["type"] == "image"]


def with_text_before(content: Any, text: str) -> Any:
    """A checked content that begins with this text."""
    if has_images(content):
        return [{"type": "text", "text": f"{text}\n\n"}, *content]
    return f"{text}\n\n{text_of(content)}"


def as_parts(content: Any) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def fitting_content(content: Any, forms: Collection[str]) -> Any:
    """A checked content in one of the forms that a template reads: as it came, if that is one, or if it has images."""
    if has_images(content):
        return content
    if not isinstance(content, list):
        return content or "" if STRING in forms or not forms else as_parts(content)
    if PARTS in forms or (ONE_PART in forms and len(content) == 1):
        return content
    return as_parts(text_of(content)) if ONE_PART in forms and STRING not in forms else text_of(content)


def fitting_call(call: Message, forms: Collection[str], index: int) -> Message:
    """A checked call with arguments as a template reads them: as they came, if it does. index: of its message."""
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        if TEXT not in forms:
            arguments = arguments_as_object(arguments, index)
    elif TEXT in forms and OBJECT not in forms:
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        arguments = arguments_as_object(arguments, index)
    return call | {"function": function | {"arguments": arguments}}


def arguments_as_object(arguments: Any, index: int) -> dict[str, Any]:
    """Broken ones become empty, as in vLLM: a model wrote them, no user."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if isinstance(arguments, dict):
        return arguments
    logger.warning("message %d: the arguments of a tool call are not a JSON object; none are shown", index)
    return {}


def one_call_at_a_time(messages: list[Message]) -> list[Message]:
    """Calls that were made together, each followed by its own result: for a template that shows one of a message."""
    shown: list[Message] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        calls = message.get("tool_calls", [])
        results = messages[place + 1 : place + 1 + len(calls)]
        place += 1
        if len(calls) < 2 or [result["role"] for result in results] != ["tool"] * len(calls):
            shown.append(message)
            continue
        by_id = {result.get("tool_call_id"): result for result in results}
        for number, call in enumerate(calls):
            silent = {"role": message["role"], "content": "", "index": message["index"]}
            told = silent if number else message
            result = by_id.get(call.get("id")) if len(by_id) == len(calls) else None
            shown += [told | {"tool_calls": [call]}, result or results[number]]
        place += len(calls)
    return shown


def _checked_content(content: Any, index: int, role: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in IMAGE_PARTS:
            if role != "user":
                raise ValueError(f"message {index}: images belong in messages of role user, found one of role {role}")
            parts.append({"type": "image", "image": _image_of(part, index)})
            continue
        if isinstance(part, dict) and any(part.get(key) is not None for key in KEYS_OF_IMAGES):
            raise ValueError(f"message {index}: a part with an image is of type image_url; found {shorten(part)}")
        if isinstance(part, dict) and isinstance(kind := part.get("type", "text"), str):
            if kind in ("text", "refusal") and "type" in part and part.get(kind) is None:
                logger.warning("message %d: a part of type %s has no text and is left out", index, kind)
                continue
            part = part.get(TEXT_PARTS.get(kind, ""), part)
        if not isinstance(part, str):
            known = "a string or a list of strings and of parts of type text or image_url (this engine reads no other)"
            raise ValueError(f"message {index}: content must be {known}, found {shorten(content)}")
        parts.append({"type": "text", "text": part})
    return parts


def _image_of(part: dict[str, Any], index: int) -> Any:
    """A PIL image, a path or a URL."""
    keys = IMAGE_PARTS[part["type"]]
    named = [part[key] for key in keys if part.get(key) is not None]
    if len(named) > 1:
        raise ValueError(f"message {index}: a part of type {part['type']} has one image, found {len(named)}")
    value = named[0] if named else None
    if isinstance(value, dict):  # OpenAI's form; its "detail" is the processor's choice here
        value = value.get("url")
    if value is None:
        raise ValueError(f"message {index}: a part of type {part['type']} has its image under {keys[0]!r}")
    return value


def _checked_call(call: Any, index: int) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        known = "of type 'function' with a 'function'"
        raise ValueError(f"message {index}: a tool call must be {known}, found {shorten(call)}")
    _check_id(call, "id", index)
    return call


def _check_id(message: dict[str, Any], name: str, index: int) -> None:
    if not isinstance(message.get(name), str | int | None):
        raise ValueError(f"message {index}: {name} must be a string or a whole number, found {shorten(message[name])}")


def _is_told(value: Any) -> bool:
    if value is None:
        return False
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def developer_as_system(messages: list[Message]) -> list[Message]:
    """For a template that does not know the role: all system messages in one, at the beginning."""
    roles = ("system", "developer")
    texts = [text for message in messages if message["role"] in roles and (text := text_of(message["content"]))]
    others = [message for message in messages if message["role"] not in roles]
    first = next(message for message in messages if message["role"] in roles)
    return [{**first, "role": "system", "content": "\n\n".join(texts)}, *others]
