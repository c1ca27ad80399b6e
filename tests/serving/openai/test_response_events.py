"""A chat's deltas become a response and its events: what these add up to, and OpenAI's own types of them."""

import json
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.serving.openai.responses.items import add_items
from tests.serving.openai.response_items import EVENT, output, response

USAGE = {"prompt_tokens": 9, "completion_tokens": 5, "total_tokens": 14}


def stream(deltas: Iterable[dict], reason: str = "stop") -> list[dict]:
    """The events of these deltas."""
    made = response()
    events = made.begin()
    for delta in deltas:
        events += made.add({"delta": delta, "finish_reason": None})
    events += made.add({"delta": {}, "finish_reason": reason})
    return events + made.end(USAGE)


def pieces(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def call(index: int, arguments: str, **more: str) -> dict:
    function = {"arguments": arguments} | ({"name": more["name"]} if "name" in more else {})
    head = {"id": more["id"], "type": "function"} if "id" in more else {}
    return {"tool_calls": [{"index": index, "function": function} | head]}


CUTS = st.lists(st.integers(0, 60), max_size=5)


@settings(max_examples=40, deadline=None, database=None, derandomize=True)
@given(st.text(), st.text(min_size=1), st.lists(st.tuples(st.sampled_from("fg"), st.text())), CUTS)
def test_any_cutting_adds_up_to_the_whole(thought, text, calls, cuts):
    """Events agree with each other, and with the response that is made of the same answer in one piece."""
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"reasoning": piece, "reasoning_content": piece} for piece in pieces(thought, cuts)]
    deltas += [{"content": piece} for piece in pieces(text, cuts)]
    calls = [(name, json.dumps({"a": text})) for name, text in calls]
    for index, (name, arguments) in enumerate(calls):
        deltas.append(call(index, "", name=name, id=f"call_{index}"))
        deltas += [call(index, piece) for piece in pieces(arguments, cuts)]
    events = stream(deltas)
    found = output(events)
    expected = [("reasoning", thought, None)] if thought else []
    if text.strip() or not (thought or calls):
        expected.append(("message", text, None))
    assert found == expected + [("function_call", arguments, name) for name, arguments in calls]

    one_piece = [{"reasoning": thought}, {"content": text}]
    for index, (name, arguments) in enumerate(calls):
        one_piece += [call(index, "", name=name, id=f"call_{index}"), call(index, arguments)]
    whole = stream(one_piece)[-1]["response"]
    assert whole["output"] == events[-1]["response"]["output"]


def test_a_stream_that_calls_two_functions():
    """As a larger model does it: a thought, an empty line, two calls in pieces."""
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "Both cities"},
        {"reasoning": " are asked for."},
        {"content": "\n\n"},
        call(0, "", id="call_a", name="weather"),
        call(0, '{"city": '),
        call(0, '"Oslo"}'),
        call(1, '{"city": "Bergen"}', id="call_b", name="weather"),
    ]
    events = stream(deltas, "tool_calls")
    assert output(events) == [
        ("reasoning", "Both cities are asked for.", None),
        ("function_call", '{"city": "Oslo"}', "weather"),
        ("function_call", '{"city": "Bergen"}', "weather"),
    ]
    done = events[-1]["response"]
    assert done["status"] == "completed" and [item.get("call_id") for item in done["output"]][1:] == [
        "call_a",
        "call_b",
    ]
    # The next turn shows it to the model as one message.
    [message] = add_items([], done["output"])
    assert message["reasoning"] == "Both cities are asked for." and len(message["tool_calls"]) == 2


def test_an_answer_that_is_cut_short():
    events = stream([call(0, '{"ci', id="a", name="f")], "length")
    [item], last = output(events), events[-1]["response"]
    assert item == ("function_call", '{"ci', "f") and events[-1]["type"] == "response.incomplete"
    assert last["incomplete_details"] == {"reason": "max_output_tokens"} and last["output"][0]["status"] == "incomplete"
    assert last["completed_at"] is None


def test_an_answer_that_is_ended():
    """OpenAI's events have no name for it."""
    last = stream([{"content": "half"}], "abort")[-1]
    assert EVENT.validate_python(last).type == "response.incomplete" and last["response"]["status"] == "cancelled"


def test_an_answer_without_a_text():
    for deltas in ([], [{"content": ""}], [{"role": "assistant"}]):
        assert output(stream(deltas)) == [("message", "", None)]
    assert output(stream([{"content": "\n"}])) == [("message", "\n", None)]


def test_logprobs_stay_with_their_text():
    entries = [{"token": text, "logprob": -1.0, "bytes": [1], "top_logprobs": []} for text in ("a", "", "b")]
    made = response()
    events = made.begin()
    for text, entry in zip(("a", "", "b"), entries, strict=True):  # a piece of a character gives no text yet
        events += made.add({"delta": {"content": text}, "logprobs": {"content": [entry]}})
    events += made.end(USAGE)
    assert output(events) == [("message", "ab", None)]
    assert [entry for event in events if event["type"].endswith("text.delta") for entry in event["logprobs"]] == entries
    assert made.body["output"][0]["content"][0]["logprobs"] == entries


def test_the_models_order_is_kept():
    """A call, and a text that follows it."""
    events = stream([call(0, "{}", id="a", name="f"), {"content": " so"}])
    assert output(events) == [("function_call", "{}", "f"), ("message", " so", None)]


def test_a_call_that_the_model_breaks_off_is_incomplete():
    events = stream([call(0, '{"a": ', id="a", name="f")])
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


def test_a_failure_ends_the_stream():
    made = response()
    events = made.begin() + made.add({"delta": {"content": "half"}}) + made.fail("server_error", "it broke")
    assert output(events) == [("message", "half", None)]
    assert events[-1]["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert made.body["status"] == "failed" and made.body["usage"] is None


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": None, "completion_tokens_details": None}])
def test_usage(details):
    made = response()
    made.end(USAGE | details)
    assert made.body["usage"]["input_tokens_details"]["cached_tokens"] == 0
    made = response()
    more = {"prompt_tokens_details": {"cached_tokens": 8}, "completion_tokens_details": {"reasoning_tokens": 3}}
    made.end(USAGE | more)
    assert made.body["usage"] == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 14,
    }
