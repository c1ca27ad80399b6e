"""Answers that are kept to be asked for again: in memory, within a bound, the oldest given up first."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from nanovllm.serving.openai.json_lines import to_json

MAX_ANSWERS, MAX_BYTES = 1000, 64 << 20  # of each tenant


@dataclass(frozen=True, slots=True)
class Stored:
    """As JSON, so that bytes are counted.

    conversation   its messages, the answer's own included; None until it ends, and of one that would not fit
    inputs         items that were asked with
    events         of a stream in the background, as they travel
    is_working     it is being made in the background
    """

    response: str
    conversation: str | None
    item_ids: tuple[str, ...]
    inputs: str
    events: tuple[str, ...] = ()
    is_working: bool = False

    @property
    def num_bytes(self) -> int:
        texts = (self.response, self.conversation or "", self.inputs, *self.events)
        return sum(map(len, texts))  # ASCII


class ResponseStore:
    """Answers of one tenant. Any thread may ask."""

    def __init__(self, max_answers: int = MAX_ANSWERS, max_bytes: int = MAX_BYTES) -> None:
        self.max_answers, self.max_bytes = max_answers, max_bytes
        self.num_bytes = 0
        self._stored: dict[str, Stored] = {}  # the oldest first
        self._where: dict[str, str] = {}  # an item's id -> its response's
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._stored)

    def put(
        self,
        response: dict[str, Any],
        conversation: list[dict[str, Any]] | None,
        inputs: Sequence[dict[str, Any]] = (),
        events: Iterable[str] = (),
    ) -> None:
        """In place of what had its id. conversation: None while it is being made; then it is not given up.

        Of one that is larger than the whole bound, the response alone is kept.
        """
        ids = tuple(item["id"] for item in response["output"])
        text = None if conversation is None else to_json({"messages": conversation})
        is_working = conversation is None
        stored = Stored(to_json(response), text, ids, to_json({"items": list(inputs)}), tuple(events), is_working)
        if stored.num_bytes > self.max_bytes:
            stored = replace(stored, conversation=None, inputs=to_json({"items": []}), events=())
        with self._lock:
            self._drop(response["id"])
            self._stored[response["id"]] = stored
            self._where |= dict.fromkeys(ids, response["id"])
            self.num_bytes += stored.num_bytes
            ended = [each for each, known in self._stored.items() if not known.is_working]
            while ended and (len(self._stored) > self.max_answers or self.num_bytes > self.max_bytes):
                self._drop(ended.pop(0))

    def get(self, response_id: str) -> Stored | None:
        with self._lock:
            return self._stored.get(response_id)

    def items(self, item_id: str) -> dict[str, dict[str, Any]]:
        """All items, by their ids, of the answer that has this one. Empty if there is none."""
        with self._lock:
            found = self._stored.get(self._where.get(item_id, ""))
        return {} if found is None else {item["id"]: item for item in json.loads(found.response)["output"]}

    def delete(self, response_id: str) -> bool:
        """Was it there?"""
        with self._lock:
            return self._drop(response_id)

    def _drop(self, response_id: str) -> bool:
        found = self._stored.pop(response_id, None)
        if found is None:
            return False
        self.num_bytes -= found.num_bytes
        for item_id in found.item_ids:
            del self._where[item_id]
        return True
