"""Answers that are kept: within a bound, the oldest given up first."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.serving.openai.responses.store import ResponseStore

STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "begin", "delete"]), st.integers(0, 5), st.integers(0, 300)))


def answer(response_id: str, text: str) -> dict:
    return {"id": response_id, "output": [{"id": f"msg_{response_id}", "type": "message", "text": text}]}


@settings(deadline=None, database=None, derandomize=True)
@given(STEPS)
def test_within_its_bounds_the_newest_are_there(steps):
    """Against a plain list of all that was put. What has begun and not ended is not given up."""
    store = ResponseStore(max_answers=3, max_bytes=700)
    kept: list[tuple[str, int, bool]] = []  # ids, bytes, has it ended?, the oldest first
    for what, number, length in steps:
        name = str(number)
        was_there = any(each[0] == name for each in kept)
        kept = [each for each in kept if each[0] != name]
        if what == "delete":
            assert store.delete(name) == was_there
        else:
            made = answer(name, "x" * length)
            conversation = None if what == "begin" else [{"role": "user", "content": "y" * length}]
            inputs, events = [{"role": "user"}] * (length % 3), ["data: x\n\n"] * (length % 2)
            store.put(made, conversation, inputs, events)
            texts = [{"items": inputs}, *([] if conversation is None else [{"messages": conversation}])]
            size = len(json.dumps(made)) + sum(len(json.dumps(text)) for text in texts) + len("".join(events))
            if size > 700:  # then the response is kept alone
                size = len(json.dumps(made)) + len(json.dumps({"items": []}))
            kept.append((name, size, what == "put"))
        while len(kept) > 3 or sum(size for _, size, _ in kept) > 700:
            if (oldest := next((each for each in kept if each[2]), None)) is None:
                break
            kept.remove(oldest)
        assert store.num_bytes == sum(size for _, size, _ in kept) and len(store) == len(kept)
        for number in range(6):
            name = str(number)
            found, items = store.get(name), store.items(f"msg_{name}")
            assert (found is not None) == bool(items) == any(each[0] == name for each in kept)
            assert items.keys() <= {f"msg_{name}"}
