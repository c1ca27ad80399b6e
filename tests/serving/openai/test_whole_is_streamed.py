"""A whole answer is the stream in one piece: chats and responses, of any text, in steps of every size."""

from itertools import accumulate
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import CompletionOutput, Logprob, RequestOutput
from nanovllm.detokenizer import Detokenizer
from nanovllm.features.logprobs.entries import decoded_token
from nanovllm.features.reasoning.think import Reasoning
from nanovllm.features.tool_calls.parse import FORMATS, schemas_of
from nanovllm.outputs import RequestMetrics
from nanovllm.serving.openai import answer
from nanovllm.serving.openai.answer import Chunks, response_body
from nanovllm.serving.openai.reading import Reader, Reading
from nanovllm.serving.openai.responses.events import GrowingResponse
from nanovllm.serving.openai.shown import CHAT, Shown
from tests.checkpoints import make_tokenizer
from tests.features.tool_calls.answers import DAMAGES, PARTS, TOOLS, damaged
from tests.serving.openai.response_items import output

TOKENIZER = make_tokenizer()
EOS = 1
TEXTS = [*PARTS, " So. ", "\n", "é🙂", "</think>", "<think>Hm. <tool_call> ", "🙂</think>\n\n"]
READINGS = st.builds(
    Reading,
    format=st.sampled_from([*FORMATS, "json_list", ""]),
    functions=st.just(schemas_of(TOOLS)),
    reasoning=st.sampled_from([None, Reasoning("<think>", "</think>", False), Reasoning("<think>", "</think>", True)]),
    shows_reasoning=st.booleans(),
    several=st.booleans(),
    are_forced=st.booleans(),
).filter(lambda reading: reading.format or not reading.are_forced)


def outputs(text: str, sizes: list[int], reason: str) -> list[RequestOutput]:
    """What an engine gives while it writes this text, so many tokens a step."""
    token_ids = [*TOKENIZER.encode(text, add_special_tokens=False), EOS]
    detokenizer, texts = Detokenizer(TOKENIZER), []
    for token_id in token_ids[:-1]:
        detokenizer.append([token_id])
        texts.append(detokenizer.text)
    texts.append(detokenizer.text)
    before = [token_ids[max(0, at - 4) : at] for at in range(len(token_ids))]
    entries = [{t: Logprob(-1.0, 1, decoded_token(TOKENIZER, t, b))} for t, b in zip(token_ids, before, strict=True)]
    places = sorted({min(place, len(token_ids)) for place in [*accumulate(sizes), len(token_ids)]})
    made = []
    for place in places:
        ending = reason if place == len(token_ids) else None
        sample = CompletionOutput(0, texts[place - 1], token_ids[:place], ending, logprobs=entries[:place])
        made.append(RequestOutput("0", "", [5], [sample], ending is not None, 0, RequestMetrics(0.0)))
    return made


def message_of(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """Deltas, put together as a client does, without ids."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "logprobs": []}
    for choice in choices:
        message["content"] += choice["delta"].get("content") or ""
        message["reasoning"] += choice["delta"].get("reasoning") or ""
        message["logprobs"] += (choice["logprobs"] or {"content": []})["content"]
        for call in choice["delta"].get("tool_calls", ()):
            if "name" in call["function"]:
                assert call["index"] == len(message["calls"]) and call["id"]
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][-1][1] += call["function"]["arguments"]
    return message | {"reason": choices[-1]["finish_reason"]}


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


@settings(max_examples=40, deadline=None)
@given(
    READINGS,
    st.lists(st.sampled_from(TEXTS), max_size=3),
    DAMAGES,
    st.lists(st.integers(1, 40), max_size=60),
    st.sampled_from(["stop", "length", "abort"]),
)
def test_steps_change_nothing(reading, texts, damages, sizes, reason):
    made = outputs(damaged("".join(texts), damages), sizes, reason)
    shown = Shown(TOKENIZER, num_logprobs=0, reading=reading)
    chunks = Chunks("id", CHAT, "tiny", shown)
    streamed = message_of([choice for each in made for chunk in chunks.of(0, each) for choice in chunk["choices"]])
    [choice] = response_body("id", CHAT, "tiny", shown, made[-1:])["choices"]
    message = choice["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    assert streamed == {
        "content": message["content"] or "",
        "reasoning": message.get("reasoning") or "",
        "calls": calls,
        "logprobs": choice["logprobs"]["content"],
        "reason": choice["finish_reason"],
    }

    responses = []
    for steps in (made, made[-1:]):
        chunks = Chunks("id", CHAT, "tiny", Shown(TOKENIZER, num_logprobs=0, reading=reading, by_text=True))
        response = GrowingResponse("0a", "tiny", {"parallel_tool_calls": True, "tools": [], "tool_choice": "auto"})
        events = response.begin()
        for each in steps:
            for chunk in chunks.of(0, each):
                for choice in chunk["choices"]:
                    events += response.add(choice)
        events += response.end({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})
        output(events)
        responses.append((without_ids(response.body["output"]), response.body["status"]))
    assert responses[0] == responses[1]
    for item in responses[0][0]:
        if item["type"] == "message":
            [part] = item["content"]
            told = bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode()
            assert part["text"].strip() in told or not part["text"].strip()


def test_a_stream_is_read_by_one_reader(monkeypatch):
    """A reader copies all tools' schemas."""
    made = []
    monkeypatch.setattr(answer, "Reader", lambda reading: made.append(reading) or Reader(reading))
    chunks = Chunks("id", CHAT, "tiny", Shown(TOKENIZER, reading=Reading("hermes", functions=schemas_of(TOOLS))))
    for each in outputs("two gulls", [1] * 9, "stop"):
        list(chunks.of(0, each))
    assert len(made) == 1


def test_a_forced_call_that_is_cut_short_is_no_content():
    """Before the first call's name, and before the second's; nothing else is left out."""
    text = "\n".join(['<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'] * 2)
    free, forced = (
        Reading("hermes", functions=schemas_of(TOOLS), are_forced=are_forced) for are_forced in (False, True)
    )
    has_content = []
    for end in range(len(text) + 1):
        (expected, has_called), found = free.message(text[:end]), forced.message(text[:end])
        assert [call["function"] for call in found[0].get("tool_calls", ())] == [
            call["function"] for call in expected.get("tool_calls", ())
        ]
        assert not found[0]["content"] and found[1] == has_called
        has_content.append(bool(expected["content"]))
        shown = Shown(TOKENIZER, num_logprobs=0, reading=forced, by_text=True)
        chunks, response = Chunks("id", CHAT, "tiny", shown), GrowingResponse("0a", "tiny", {})
        for each in outputs(text[:end], [3, 5, 7], "length"):
            for chunk in chunks.of(0, each):
                response.add(chunk["choices"][0])
        response.end({"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2})
        for item in response.body["output"]:
            if item["type"] == "message":
                assert item["content"][0]["text"] == ""
            else:
                assert (item["status"] == "completed") == (item["arguments"] == '{"a": 1}')
    assert any(has_content), "where nothing forces a call, its beginning is text"


class CountingTokenizer:
    """Notes how many tokens it decodes."""

    num_decoded = 0

    def decode(self, token_ids: list[int]) -> str:
        self.num_decoded += len(token_ids)
        return TOKENIZER.decode(token_ids)


def test_usage_of_each_chunk_costs_what_is_new():
    """A long answer of a model that reasons: its beginning is not decoded again for each chunk."""
    made = outputs("a red boat " * 80 + "</think>" + "two gulls " * 80, [1] * 2000, "stop")
    for is_open in (True, False):
        tokenizer = CountingTokenizer()
        shown = Shown(tokenizer, reading=Reading(reasoning=Reasoning("<think>", "</think>", is_open)))
        chunks = Chunks("id", CHAT, "tiny", shown, include_usage=True, continuous_usage=True)
        counts = [
            chunk["usage"]["completion_tokens_details"]["reasoning_tokens"]
            for each in made
            for chunk in chunks.of(0, each)
        ]
        assert tokenizer.num_decoded < 200 * len(made)
        [last] = chunks.last()
        whole = response_body("id", CHAT, "tiny", shown, made[-1:])
        assert whole["usage"] == last["usage"]
        assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert (0 < counts[-1] < len(made)) == is_open
