"""The items that the events of a response tell."""

from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from nanovllm.serving.openai.responses.events import GrowingResponse

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ECHOED = {"parallel_tool_calls": True, "tools": [], "tool_choice": "auto"}
# What ends, and what has to be open then.
PAIRS = {
    "output_item.done": "output_item.added",
    "content_part.done": "content_part.added",
    "output_text.done": "content_part.added",
    "reasoning_text.done": "content_part.added",
    "function_call_arguments.done": "output_item.added",
}
ENDS = ("completed", "incomplete", "failed")


def response() -> GrowingResponse:
    return GrowingResponse("0a", "tiny", ECHOED)


def output(events: list[dict]) -> list[tuple]:
    """(kind, text, name of a function) of each item, as the events before the last tell it; checks that they agree."""
    items: list[tuple] = []
    open_events: list[str] = []
    text = ""
    for number, event in enumerate(events):
        EVENT.validate_python(event)
        assert event["sequence_number"] == number
        kind = event["type"].removeprefix("response.")
        if kind in ("created", "in_progress", *ENDS):
            assert not open_events and (number < 2) == (kind not in ENDS) and (kind in ENDS) == (event is events[-1])
            continue
        assert event["output_index"] == len(items)
        if kind.endswith("added"):
            open_events.append(kind)
            text = ""
        elif kind.endswith("delta"):
            text += event["delta"]
        else:
            assert open_events[-1] == PAIRS[kind]
            if kind in ("output_item.done", "content_part.done"):
                open_events.pop()
            else:
                assert text == event.get("text", event.get("arguments"))
            if kind == "content_part.done":
                assert event["part"]["text"] == text
        if kind == "output_item.added":
            item_id = event["item"]["id"]
            assert event["item"]["status"] == "in_progress"
        elif kind == "output_item.done":
            item = event["item"]
            assert item["id"] == item_id and item in events[-1]["response"]["output"]
            shown = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
            assert shown == text
            items.append((item["type"], text, item.get("name")))
        else:
            assert event["item_id"] == item_id
    assert len(events[-1]["response"]["output"]) == len(items)
    Response.model_validate(events[-1]["response"])
    return items
