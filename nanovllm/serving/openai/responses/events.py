"""A response that grows: deltas of a chat become its items, and the events that tell a stream's reader of them."""

import json
import time
from typing import Any

Event = dict[str, Any]
TEXT, REASONING, CALL = "message", "reasoning", "function_call"  # kinds of items
PREFIX = {TEXT: "msg", REASONING: "rs", CALL: "fc"}  # of an item's id
ENDS = {"length": "incomplete", "abort": "cancelled"}  # of a chat -> a response's status; the others complete it
NAME = {TEXT: "output_text", REASONING: "reasoning_text", CALL: "function_call_arguments"}  # of the events of its text


class Item:
    """One that grows. call: of a function, its call_id and name."""

    def __init__(self, kind: str, item_id: str, index: int, call: dict[str, str] | None = None) -> None:
        self.kind, self.item_id, self.index, self.call = kind, item_id, index, call
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    def part(self, is_done: bool = True) -> dict[str, Any]:
        """The one part of its content."""
        text = "".join(self.texts) if is_done else ""
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if is_done else []}

    def shown(self, status: str) -> dict[str, Any]:
        """The item in a response; in_progress: without its text."""
        is_done, head = status != "in_progress", {"id": self.item_id, "type": self.kind, "status": status}
        if self.kind == CALL:
            return head | (self.call or {}) | {"arguments": "".join(self.texts) if is_done else ""}
        more: dict[str, Any] = (
            {"role": "assistant"} if self.kind == TEXT else {"summary": [], "encrypted_content": None}
        )
        return head | more | {"content": [self.part()] if is_done else []}


class GrowingResponse:
    """echoed: fields that repeat what was asked. unique: names the response, and its items."""

    def __init__(self, unique: str, model: str, echoed: dict[str, Any]) -> None:
        self.unique = unique
        self.body: dict[str, Any] = {
            "id": f"resp_{unique}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            "max_tool_calls": None,
            **echoed,
        }
        self.num_events = 0
        self.finish_reason = "stop"
        self._item: Item | None = None
        self._blank = Item(TEXT, "", 0)  # white space that is text only if a text follows

    def begin(self) -> list[Event]:
        return [self._whole("created"), self._whole("in_progress")]

    def add(self, choice: dict[str, Any]) -> list[Event]:
        """A choice of a chat's chunk: what its delta brings, and the logprobs of its content."""
        delta, events = choice["delta"], []
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if reasoning := delta.get("reasoning"):
            events += self._grow(REASONING, reasoning)
        logprobs = (choice.get("logprobs") or {}).get("content") or []
        if delta.get("content") or logprobs:
            events += self._add_text(delta["content"], logprobs)
        for call in delta.get("tool_calls", ()):
            events += self._add_call(call)
        return events

    def end(self, usage: dict[str, Any]) -> list[Event]:
        """usage: the chat's."""
        status = ENDS.get(self.finish_reason, "completed")
        events: list[Event] = []
        if not self.body["output"] and self._item is None:  # an answer without a text is one, too
            text, logprobs = "".join(self._blank.texts), self._blank.logprobs
            events += self._grow(TEXT, text, logprobs) if text or logprobs else self._open(TEXT)
        events += self._close("completed" if status == "completed" else "incomplete")
        self.body |= {"status": status, "usage": _usage(usage)}
        if status == "incomplete":
            self.body["incomplete_details"] = {"reason": "max_output_tokens"}
        elif status == "completed":
            self.body["completed_at"] = int(time.time())
        return [*events, self._whole(status)]

    def fail(self, code: str, message: str) -> list[Event]:
        events = self._close("incomplete")
        self.body |= {"status": "failed", "error": {"code": code, "message": message}}
        return [*events, self._whole("failed")]

    # -- items ----------------------------------------------------------------------------------------------------

    @property
    def _kind(self) -> str | None:
        return self._item.kind if self._item else None

    def _add_text(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        if self._kind != TEXT and not text.strip():
            self._blank.texts.append(text)
            self._blank.logprobs += logprobs
            return []
        if self._kind != TEXT:
            text, logprobs = "".join([*self._blank.texts, text]), self._blank.logprobs + logprobs
        return self._grow(TEXT, text, logprobs)

    def _add_call(self, call: dict[str, Any]) -> list[Event]:
        """The beginning of a call, which has an id, or more of its arguments."""
        function, events = call["function"], []
        if "id" in call:
            events = self._close("completed") + self._open(CALL, {"call_id": call["id"], "name": function["name"]})
        return events + (self._grow(CALL, function["arguments"]) if function["arguments"] else [])

    def _grow(self, kind: str, text: str, logprobs: list[dict[str, Any]] | None = None) -> list[Event]:
        events: list[Event] = []
        if self._kind != kind:
            events += self._close("completed")
            events += self._open(kind)
        assert self._item is not None
        self._item.texts.append(text)
        self._item.logprobs += logprobs or []
        more = {"logprobs": logprobs or []} if kind == TEXT else {}
        return [*events, self._of_item("delta", delta=text, **more)]

    def _open(self, kind: str, call: dict[str, str] | None = None) -> list[Event]:
        index = len(self.body["output"])
        self._item = item = Item(kind, f"{PREFIX[kind]}_{self.unique}_{index}", index, call)
        self._blank = Item(TEXT, "", 0)
        events = [self._event("response.output_item.added", output_index=index, item=item.shown("in_progress"))]
        return events if kind == CALL else [*events, self._of_part("added", item.part(False))]

    def _close(self, status: str) -> list[Event]:
        """The item is complete, or cut short; the next one begins after it. A call is complete if its arguments are."""
        item = self._item
        if item is None:
            return []
        if item.kind == CALL:
            status = "completed" if _is_json("".join(item.texts)) else "incomplete"
        shown = item.shown(status)
        if item.kind == CALL:
            events = [self._of_item("done", name=shown["name"], arguments=shown["arguments"])]
        else:
            part = item.part()
            more = {"logprobs": item.logprobs} if item.kind == TEXT else {}
            events = [self._of_item("done", text=part["text"], **more), self._of_part("done", part)]
        self.body["output"].append(shown)
        self._item = None
        return [*events, self._event("response.output_item.done", output_index=item.index, item=shown)]

    # -- events ---------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> Event:
        self.num_events += 1
        return {"type": kind, "sequence_number": self.num_events - 1, **fields}

    def _whole(self, status: str) -> Event:
        kind = "incomplete" if status == "cancelled" else status  # OpenAI's events know no other name for it
        return self._event(f"response.{kind}", response=dict(self.body, output=list(self.body["output"])))

    def _of_item(self, what: str, **fields: Any) -> Event:
        item = self._item
        assert item is not None
        where = {} if item.kind == CALL else {"content_index": 0}
        about = {"item_id": item.item_id, "output_index": item.index} | where | fields
        return self._event(f"response.{NAME[item.kind]}.{what}", **about)

    def _of_part(self, what: str, part: dict[str, Any]) -> Event:
        assert self._item is not None
        about = {"item_id": self._item.item_id, "output_index": self._item.index, "content_index": 0, "part": part}
        return self._event(f"response.content_part.{what}", **about)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _usage(chat: dict[str, Any]) -> dict[str, Any]:
    """A response's usage, made of a chat's.

    Nothing is billed for what is written to the cache: clients of newer versions look for it.
    """
    cached = (chat.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    reasoning = (chat.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": chat["total_tokens"],
    }
