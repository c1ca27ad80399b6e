"""Items of the responses API -> messages of a chat. One answer's reasoning, text and calls are one message there."""

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.checks.values import check_text, shorten
from nanovllm.serving.openai.fields import Known, by_type, fields
from nanovllm.serving.openai.openai_request import MAX_ENTRIES

ROLES = ("user", "assistant", "system", "developer")
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # type of part -> its key
OPEN = ("in_progress", "incomplete")  # statuses of a message that the answer goes on with
MAX_ITEMS = 100  # of a page
PARTS = by_type(
    {
        **dict.fromkeys(("input_text", "text"), fields("type", "text")),
        "output_text": fields("type", "text", "annotations", "logprobs"),
        "refusal": fields("type", "refusal"),
        "input_image": fields("type", "image_url", "file_id", detail=("auto",)),
    }
)
KINDS: dict[str, Known] = {  # of items, and what is known of them
    "message": fields("type", "id", "status", "role", content=[PARTS]),
    "function_call": fields("type", "id", "status", "call_id", "name", "arguments"),
    "function_call_output": fields("type", "id", "status", "call_id", output=[PARTS]),
    "reasoning": fields("type", "id", "status", "summary", "content", "encrypted_content"),
    "item_reference": fields("type", "id"),
}


def known_of_item(item: Any) -> Known:
    """What is known of an item of the input (fields.py)."""
    kind = _type_of(item) if isinstance(item, dict) else None
    return KINDS.get(kind) if isinstance(kind, str) else None


def without_other_tools(items: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """An input's items without those of tools that are not here; these, as a warning names them. Raises ValueError.

    A server runs such a tool, or it takes free text. Agents send their items back to every server.
    """
    kept: list[dict[str, Any]] = []
    others: list[str] = []
    for place, item in enumerate(items):
        kind = _type_of(item)
        if _is_of_other_tool(kind):
            others.append(f"input[{place}] of type {kind[:40]!a}")
        else:
            kept.append(item)
    if not kept:
        raise ValueError("all items of the input are of tools that this server does not have")
    return kept, others


def _is_of_other_tool(kind: Any) -> bool:
    return isinstance(kind, str) and kind not in KINDS and ("_call" in kind or kind.startswith(("mcp_", "tool_")))


def read_input(given: Any, find_items: Callable[[str], dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """A body's input as items, references replaced by what they stand for. Raises ValueError.

    find_items: of the answer that was kept and has this item, all items by their ids; empty if there is none. Each
    answer is read once, and each item referred to once: a short body asks for no long work or conversation.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise ValueError(f"input must be a text, or a list of items, not empty; found {shorten(given)}")
    if len(given) > MAX_ENTRIES["messages"]:
        raise ValueError(f"input may have {MAX_ENTRIES['messages']} items, found {len(given)}")
    items = []
    found: dict[str, dict[str, Any]] = {}
    referred: set[str] = set()
    for index, item in enumerate(given):
        if not isinstance(item, dict):
            raise ValueError(f"input item {index} must be an object, found {shorten(item)}")
        if _type_of(item) == "item_reference":
            item_id = item.get("id")
            if isinstance(item_id, str) and item_id not in found:
                found |= find_items(item_id)
            if not isinstance(item_id, str) or item_id not in found:
                raise ValueError(
                    f"input item {index}: no answer that is kept has the item {shorten(item_id)}; send the item itself"
                )
            if item_id in referred:
                raise ValueError(f"input item {index}: {shorten(item_id)} is referred to twice; once is enough")
            referred.add(item_id)
            item = found[item_id]
        items.append(item)
    return items


def add_items(
    messages: list[dict[str, Any]], items: list[dict[str, Any]], goes_on: bool = False
) -> list[dict[str, Any]]:
    """The messages and those of the items; the last message may take in the first items. Raises ValueError.

    Items of tools that are not here are left out. goes_on: the last message is an answer that the items are more of.
    """
    messages = [*messages[:-1], *map(dict, messages[-1:])]
    growing = messages[-1] if goes_on else None
    last = next((item for item in reversed(items) if not _is_of_other_tool(_type_of(item))), None)
    for index, item in enumerate(items):
        kind = _type_of(item)
        try:
            answer = _unfinished(messages, growing)
            if kind == "message":
                is_open_end = item is last and item.get("status") in OPEN
                if is_open_end and answer is not None and "tool_calls" in answer:
                    answer = None  # no template can go on with a text that calls follow
                _add_message(messages, item, answer)
            elif kind == "reasoning":
                _add_reasoning(messages, item, answer)
            elif kind == "function_call":
                _add_call(messages, item)
            elif kind == "function_call_output":
                call_id = check_text("call_id", item.get("call_id"))
                messages.append({"role": "tool", "tool_call_id": call_id, "content": text_of(item.get("output"))})
            elif not _is_of_other_tool(kind):
                raise ValueError(f"this server reads items of type {', '.join(KINDS)}; found type {shorten(kind)}")
        except ValueError as error:
            raise ValueError(f"input item {index}: {error}") from None
    for message in messages:
        if isinstance(contents := message.get("content"), _Pieces):
            message["content"] = _joined(contents)
        if isinstance(thoughts := message.get("reasoning"), _Pieces):
            message["reasoning"] = "\n".join(filter(None, thoughts))
    return messages


def add_answer(messages: list[dict[str, Any]], output: list[dict[str, Any]], goes_on: bool) -> list[dict[str, Any]]:
    """The messages of a conversation, and an answer's items, which are one message even where it was cut short.

    goes_on: the answer is more of the last message.
    """
    return add_items(messages, [item | {"status": "completed"} for item in output], goes_on)


def is_open(items: list[dict[str, Any]]) -> bool:
    """Is the last item an assistant's message that is to go on?"""
    last = items[-1]
    return _type_of(last) == "message" and last.get("role") == "assistant" and last.get("status") in OPEN


def text_of(content: Any) -> str:
    """A text, or parts that have one: each begins a line, as in a chat. Raises ValueError."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(TEXTS[kind]) if isinstance(kind, str) and kind in TEXTS else None
        if not isinstance(text, str):
            raise ValueError(f"content must be a text or parts of type input_text or output_text; {_found(part)}")
        texts.append(text)
    return "\n".join(texts)


def content_of(content: Any) -> Any:
    """A text, or the parts of a chat's message if there are images among them. Raises ValueError."""
    parts = content if isinstance(content, list) else [content]
    if not any(isinstance(part, dict) and part.get("type") == "input_image" for part in parts):
        return text_of(content)
    found: list[dict[str, Any]] = []
    for part in parts:
        if not (isinstance(part, dict) and part.get("type") == "input_image"):
            found.append({"type": "text", "text": text_of([part])})
        elif isinstance(part.get("image_url"), str):
            found.append({"type": "image_url", "image_url": {"url": part["image_url"]}})
        else:
            raise ValueError("an input_image needs an image_url; this server keeps no files that a file_id could name")
    return found


def _found(part: Any) -> str:
    if isinstance(part, dict) and part.get("type") == "input_image":
        return "images belong in messages"
    is_other = isinstance(part, dict) and part.get("type") in ("input_file", "input_audio")
    return f"this engine reads no {part['type'][6:]}s" if is_other else f"found {shorten(part)}"


def _type_of(item: dict[str, Any]) -> Any:
    return item.get("type") or ("message" if "role" in item or "id" not in item else "item_reference")


def _unfinished(messages: list[dict[str, Any]], growing: dict[str, Any] | None) -> dict[str, Any] | None:
    """The last message, if the next item may be of the same answer: nothing stands between calls and their results."""
    if not messages or messages[-1]["role"] != "assistant":
        return None
    last = messages[-1]
    return last if last is growing or "tool_calls" in last or "content" not in last else None


def _add_message(messages: list[dict[str, Any]], item: dict[str, Any], answer: dict[str, Any] | None) -> None:
    if (role := item.get("role")) not in ROLES:
        raise ValueError(f"role must be one of {', '.join(ROLES)}, found {shorten(role)}")
    is_empty = role == "assistant" and item.get("content") is None
    content = "" if is_empty else content_of(item.get("content"))
    if role == "assistant" and answer is not None:
        answer["content"] = _with(answer.get("content", ""), content)
    else:
        messages.append({"role": role, "content": content})


class _Pieces(list):
    """What is joined in the end: each piece would copy all those before it."""


def _with(before: Any, piece: Any) -> _Pieces:
    pieces = before if isinstance(before, _Pieces) else _Pieces([before])
    pieces.append(piece)
    return pieces


def _joined(contents: _Pieces) -> Any:
    """Contents as one."""
    if all(isinstance(content, str) for content in contents):
        return "".join(contents)
    return [part for content in contents for part in _parts_of(content)]


def _parts_of(content: Any) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _add_reasoning(messages: list[dict[str, Any]], item: dict[str, Any], answer: dict[str, Any] | None) -> None:
    """Add an item's reasoning to the messages; an item without any text shows nothing."""
    parts = item.get("content") or item.get("summary") or []
    if not parts and item.get("encrypted_content"):
        raise ValueError("encrypted_content was made by another server; this one shows reasoning as it is, in content")
    texts = (
        [part.get("text") if isinstance(part, dict) else None for part in parts] if isinstance(parts, list) else [None]
    )
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"reasoning must have a list of parts with a text, found {shorten(parts)}")
    if not (text := "\n".join(map(str, texts))):
        return
    if answer is None:
        messages.append({"role": "assistant", "reasoning": text})
    else:
        answer["reasoning"] = _with(answer.get("reasoning"), text)


def _add_call(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    function = {name: check_text(name, item.get(name)) for name in ("name", "arguments")}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("content", "")
    call = {"id": check_text("call_id", item.get("call_id")), "type": "function", "function": function}
    messages[-1]["tool_calls"] = [*messages[-1].get("tool_calls", []), call]


def input_items(items: list[dict[str, Any]], unique: str) -> list[dict[str, Any]]:
    """Items of a body as the API shows them: each has an id of its own, a type and a status, a message parts."""
    shown: list[dict[str, Any]] = []
    seen: set[Any] = set()
    for index, item in enumerate(items):
        item = {name: value for name, value in item.items() if value is not None}
        if not isinstance(item.get("id"), str) or item["id"] in seen:
            item["id"] = f"in_{unique}_{index}"
        seen.add(item["id"])
        item = {"type": "message", "status": "completed"} | item
        if item["type"] == "message" and isinstance(text := item.get("content"), str):
            is_answer = item["role"] == "assistant"
            part = {"type": "output_text", "text": text, "annotations": []} if is_answer else {"type": "input_text"}
            item["content"] = [{"text": text} | part]
        shown.append(item)
    return shown


def page(items: list[dict[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Those after the item `after`, `limit` of them, in the order asc or desc. Raises ValueError."""
    order, limit, after = query.get("order", "desc"), query.get("limit", "20"), query.get("after")
    if order not in ("asc", "desc"):
        raise ValueError(f"order must be asc or desc, found {shorten(order)}")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= MAX_ITEMS):
        raise ValueError(f"limit must be a number from 1 to {MAX_ITEMS}, found {shorten(limit)}")
    items = items if order == "asc" else items[::-1]
    ids = [item["id"] for item in items]
    if after is not None and after not in ids:
        raise ValueError(f"after must be the id of an item of this list, found {shorten(after)}")
    start = 0 if after is None else ids.index(after) + 1
    data = items[start : start + int(limit)]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": start + len(data) < len(items)}
