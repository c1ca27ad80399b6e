"""What an answer was made from, as a list of items that comes in pages."""

from collections.abc import Mapping
from typing import Any

from nanovllm.checks.values import shorten

MAX_ITEMS = 100  # of a page


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
    """Those behind the item `after`, `limit` of them, in the order asc or desc. Raises ValueError."""
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
