"""Answers that are kept: within a bound, the oldest given up first."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.serving.openai.responses.store import ResponseStore

STEPS = st.lists(st.tuples(st.sampled_from(["put", "put", "delete"]), st.integers(0, 5), st.integers(0, 300)))


def answer(response_id: str, text: str) -> dict:
    return {"id": response_id, "output": [{"id": f"msg_{response_id}", "type": "message", "text": text}]}


@settings(deadline=None, database=None, derandomize=True)
@given(STEPS)
def test_within_its_bounds_the_newest_are_there(steps):
    """Against a plain list of all that was put."""
    store = ResponseStore(max_answers=3, max_bytes=700)
    kept: list[tuple[str, int]] = []  # ids and bytes, the oldest first
    for what, number, length in steps:
        name = str(number)
        was_there = name in dict(kept)
        kept = [(other, size) for other, size in kept if other != name]
        if what == "delete":
            assert store.delete(name) == was_there
        else:
            made, conversation = answer(name, "x" * length), [{"role": "user", "content": "y" * length}]
            inputs, events = [{"role": "user"}] * (length % 3), ["data: x\n\n"] * (length % 2)
            store.put(made, conversation, inputs, events)
            texts = {"messages": conversation}, {"items": inputs}
            size = len(json.dumps(made)) + sum(len(json.dumps(text)) for text in texts) + len("".join(events))
            kept += [(name, size)] if size <= 700 else []
        while len(kept) > 3 or sum(size for _, size in kept) > 700:
            kept.pop(0)
        assert store.num_bytes == sum(size for _, size in kept) and len(store) == len(kept)
        for number in range(6):
            name = str(number)
            found, items = store.get(name), store.items(f"msg_{name}")
            assert (found is not None) == bool(items) == (name in dict(kept))
            assert items.keys() <= {f"msg_{name}"}
