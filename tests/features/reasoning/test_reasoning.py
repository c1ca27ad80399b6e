"""Reasoning, told from the answer: in a text, in tokens, and before a grammar."""

import re
from copy import copy
from functools import cache
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.features.grammar.after_reasoning import AfterReasoning
from nanovllm.features.grammar.grammar import GrammarCompiler
from nanovllm.features.reasoning.think import Reasoning, ReasoningCounter, parse_reasoning
from nanovllm.features.tool_calls.source import Source
from nanovllm.sampling_params import StructuredOutputsParams
from tests.checkpoints import make_tokenizer
from tests.errors import expect

CALL = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CASES = [  # text, the prompt opens it, reasoning, content
    ("<think>One gull.</think>Two.", False, "One gull.", "Two."),
    ("\n <think>\nOne.\n</think>\n\nTwo.", False, "\nOne.\n", "\n\nTwo."),
    ("One gull.</think>Two.", True, "One gull.", "Two."),
    ("<think>One gull.</think>Two.", True, "One gull.", "Two."),  # and the model again
    ("Two. <think>x</think>", False, None, "Two. <think>x</think>"),
    ("Two.", False, None, "Two."),
    ("One gull, one", True, "One gull, one", None),
    ("<think>One gull, </thi", False, "One gull, </thi", None),
    ("<thin", False, None, "<thin"),
    ("<think></think>Two.", False, None, "Two."),
    ("", True, None, None),
    (f"I call.{CALL}", True, "I call.", CALL),
    ("A <tool_call> is {}.</think>Two.", True, "A <tool_call> is {}.", "Two."),
]


@pytest.mark.parametrize("text, is_open, reasoning, content", CASES)
def test_texts(text, is_open, reasoning, content):
    assert parse_reasoning(text, is_open=is_open) == (reasoning, content)


def test_parsers():
    assert parse_reasoning("[THINK]a[/THINK]b", "mistral") == ("a", "b")
    assert parse_reasoning("a</think>b", "deepseek_r1") == parse_reasoning("<think>a</think>b", "deepseek_r1")
    expect("the reasoning parser must be one of qwen3", parse_reasoning, "x", "qwen4")
    for prompt, found in (("<think>\n", True), ("", False), ("<think>\n\n</think>\n\n", None)):
        reasoning = Reasoning.of(None, "... <think> ...", f"assistant\n{prompt}")
        assert (reasoning and reasoning.is_open) is found
    assert Reasoning.of(None, "no such tag", "assistant\n") is None
    assert Reasoning.of("none", "... <think> ...", "assistant\n<think>") is None
    assert Reasoning.of(None, "[THINK]", "").closing == "[/THINK]"
    assert Reasoning.of("deepseek_r1", "", "").is_open
    assert not Reasoning.of(None, "{{ content.split('</think>')[-1] }}", "").is_open  # DeepSeek R1's has no other tag


USER = {"role": "user", "content": "What does <think> do? And </think>?"}
TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ANSWERS = TURNS + "{% if add_generation_prompt %}assistant: "
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
THOUGHT = {"role": "assistant", "content": "<think>a</think>b"}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
BLANK = {"role": "tool", "content": "", "tool_call_id": "abcdefgh1"}
SWITCHED = (  # as SmolLM3's
    "{% set system = messages[0].content %}{{ system.replace('/no_think', '').replace('/think', '') }}\n"
    "{{ messages[1].content }}\nassistant: {% if '/think' not in system %}<think>\n\n</think>\n{% endif %}"
)
BEGUN = {  # what a template, and a message that is continued, have begun -> is reasoning open? None: it is over
    "nothing": (ANSWERS + "{% if x %}<think>{% endif %}{% endif %}", [USER], {}, False),
    "the tag": (ANSWERS + "<think>\n{% endif %}", [USER], {}, True),
    "words after it": (ANSWERS + "<think>\nOkay,{% endif %}", [USER], {}, True),
    "an end": (ANSWERS + "<think>\n\n</think>\n\n{% endif %}", [USER], {}, None),
    "words after the end": (ANSWERS + "<think></think>\n\nAnswer:{% endif %}", [USER], {}, None),
    "an answer before": (ANSWERS + "{% endif %}", [{"role": "user", "content": "hi"}, THOUGHT, USER], {}, False),
    "an open message": (TURNS, [USER, {"role": "assistant", "content": "<think>\nLet me"}], CONTINUED, True),
    "an open message without words": (TURNS, [USER, {"role": "assistant", "content": "<think>\n"}], CONTINUED, True),
    "an open answer": (TURNS, [USER, THOUGHT], CONTINUED, None),
    "a blank result of a call": (
        TURNS.replace(
            "{{ m.content }}", "{{ m.content or '' }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
        )
        + "{% if add_generation_prompt %}assistant: {% endif %}",
        [USER, {"role": "assistant", "content": "<think>a</think>", "tool_calls": [CALL]}, BLANK],
        {},
        False,
    ),
    "a blank question": (ANSWERS + "{% endif %}", [USER, THOUGHT, {"role": "user", "content": ""}], {}, False),
    "a switch alone": (
        SWITCHED.replace("'/think' not", "'/no_think'"),
        [{"role": "system", "content": "/no_think"}, USER],
        {},
        None,
    ),
    "a switch among words": (SWITCHED, [{"role": "system", "content": "Be /think kind"}, USER], {}, False),
    "a system prompt about it": ("Write <think> first. " + ANSWERS + "{% endif %}", [USER], {}, False),
}


@pytest.mark.parametrize("name", BEGUN)
def test_whether_reasoning_is_open(llm, name):
    """The last tag in the answer's own part of the prompt says so, not a user's words."""
    template, messages, options, expected = BEGUN[name]
    prompt = llm.chat_prompt(messages, chat_template=template, **options)
    assert USER["content"] in prompt["prompt"]
    reasoning = Reasoning.of("qwen3", template, prompt.begun)
    assert (reasoning and reasoning.is_open) is expected


TEXTS = [text for text, *_ in CASES]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3), st.booleans(), st.data())
def test_no_cut_changes_what_is_read(texts, is_open, data):
    text = "".join(texts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    source, found = Source(), {"reasoning": "", "text": ""}
    events = Reasoning("<think>", "</think>", is_open).read(source)
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        source.rest += text[start:end]
        source.ended = end == len(text) and start == (cuts or [0])[-1]
        while (event := next(events, None)) is not None:
            found[event.kind] += event.text
    assert (found["reasoning"] or None, found["text"] or None) == parse_reasoning(text, is_open=is_open)


@pytest.fixture(scope="module")
def tokenizer():
    """With the tags as one token each, as the models have them that write them."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    return tokenizer


@pytest.mark.parametrize("has_tags", [False, True])
def test_tokens(tokenizer, has_tags):
    tokenizer = tokenizer if has_tags else make_tokenizer()
    ids = {text: tokenizer.encode(text, add_special_tokens=False) for text in ("<think>gulls</think>", "two", "gulls")}
    thought = len(ids["<think>gulls</think>"])
    for is_open in (False, True):
        reasoning = Reasoning("<think>", "</think>", is_open)

        def num_tokens(token_ids, reasoning=reasoning):
            return ReasoningCounter(reasoning, tokenizer).count(token_ids)

        assert num_tokens(ids["<think>gulls</think>"] + ids["two"]) == thought
        assert num_tokens(ids["<think>gulls</think>"][:-1]) == thought - 1
        assert num_tokens(ids["gulls"]) == is_open * len(ids["gulls"])


PARTS = ["a boat ", "é", "🙂", "</thin", "k>", "<think>", "</think>", " \n", "<tool_call>", "<function=f>"]
PIECES = st.lists(st.sampled_from(PARTS), max_size=20)


plain_tokenizer = cache(make_tokenizer)


@settings(max_examples=100, deadline=None)
@given(st.booleans(), st.booleans(), PIECES, st.lists(st.integers(0, 6), max_size=60))
@example(True, False, ["é", "<tool_call>", " \n", "<function=f>", "</think>"], [1] * 60)
def test_tokens_of_a_growing_answer(is_open, begins, pieces, sizes):
    """Counted in steps of any size they are those of a whole answer: the shortest beginning with the closing text, or
    all before a call."""
    tokenizer = plain_tokenizer()
    token_ids = tokenizer.encode("<think>" * begins + "".join(pieces), add_special_tokens=False)
    reasoning = Reasoning("<think>", "</think>", is_open)
    counter = ReasoningCounter(reasoning, tokenizer)
    for place in accumulate(sizes):
        begun = token_ids[:place]
        expected = 0
        if is_open or tokenizer.decode(begun).lstrip().startswith("<think>"):
            closed = (end for end in range(len(begun)) if "</think>" in tokenizer.decode(begun[:end]))
            expected = next(closed, len(begun))
            text = tokenizer.decode(begun)
            call = re.search(r"<tool_call>(?=\s*<function=)", text)
            if call and "</think>" not in text[: call.start()]:
                expected = max(
                    i for i in range(len(begun)) if tokenizer.decode(begun[i:]).endswith(text[call.start() :])
                )
        assert counter.count(begun) == ReasoningCounter(reasoning, tokenizer).count(begun) == expected


def allowed(grammar, token_ids: list[int], vocab_size: int) -> list[int]:
    bits = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
    grammar.write_mask(token_ids, bits.data_ptr(), bits.nbytes)
    words = bits.tolist()  # a number of a tensor costs microseconds
    return [t for t in range(vocab_size) if words[t // 32] >> t % 32 & 1]


@pytest.mark.parametrize("opening", ["", "<think>"])
def test_a_grammar_begins_behind_the_reasoning(tokenizer, opening):
    vocab_size, [open_id, close_id, five, x] = (
        len(tokenizer),
        tokenizer.convert_tokens_to_ids(["<think>", "</think>", "5", "x"]),
    )
    grammar = GrammarCompiler(tokenizer, vocab_size, {1}).compile(StructuredOutputsParams(regex="[0-9]x"))
    after = copy(AfterReasoning(grammar, tokenizer, opening, "</think>"))
    anything = [t for t in range(vocab_size) if t != 1]  # which would end it
    digits = allowed(grammar, [], vocab_size)
    begun = [open_id] if opening else []
    assert allowed(after, [], vocab_size) == (sorted([*digits, open_id]) if opening else anything)
    for thought in ([], [x], [x, five, x]):
        if begun + thought:
            assert allowed(after, begun + thought, vocab_size) == anything
            assert not after.is_complete(begun + thought)
        ended = [*begun, *thought, close_id]
        assert allowed(after, ended, vocab_size) == digits
        assert allowed(after, [*ended, five], vocab_size) == [x]
        assert after.is_complete([*ended, five, x]) and not after.is_complete([*ended, five])
    assert after.possible([*begun, x], [five, close_id, five, five]) == [five, close_id, five]
    assert after.possible([*begun, x], [five, five]) == [five, five]
    if opening:
        assert allowed(after, [five], vocab_size) == [x] and after.is_complete([five, x])
    assert after.error == ""


def test_structured_outputs_with_reasoning(llm):
    """The engine's part: the first "e" ends what is free."""
    form = StructuredOutputsParams(regex="[0-9]{3}x", reasoning=("", "e"))
    bias = {llm.get_tokenizer().convert_tokens_to_ids("e"): 2.0}
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=200, structured_outputs=form, logit_bias=bias)
    [output] = llm.generate(["two gulls"], params, use_tqdm=False)
    text = output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop" and len(text) > 5, text
    assert re.fullmatch("[^e]*e[0-9]{3}x", text), text


def test_what_a_closing_token_carries_is_the_grammars():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([">5", ">x", "k>7x", "z</think>"])
    vocab_size, pieces = len(tokenizer), tokenizer.encode("</think", add_special_tokens=False)
    five, x, carries, wrong, whole, plain = tokenizer.convert_tokens_to_ids(["5", "x", ">5", ">x", "k>7x", "z</think>"])
    grammar = GrammarCompiler(tokenizer, vocab_size, {1}).compile(StructuredOutputsParams(regex="[0-9]x"))
    after = AfterReasoning(grammar, tokenizer, "", "</think>")
    assert {carries, wrong, whole} <= {*allowed(after, [x], vocab_size)}, "they close nothing yet"
    assert wrong not in (now := allowed(after, pieces, vocab_size)) and carries in now
    assert allowed(after, [*pieces, carries], vocab_size) == [x]
    assert after.is_complete([*pieces, carries, x]) and not after.is_complete([*pieces, carries])
    assert after.possible(pieces, [carries, x, x]) == [carries, x]
    assert after.possible(pieces, [wrong]) == []
    assert allowed(after, [x, plain], vocab_size) == allowed(grammar, [], vocab_size)
    begun = tokenizer.encode("</thin", add_special_tokens=False)
    assert after.is_complete([*begun, whole])
    # a tag in pieces, where the vocabulary has it as one token, too
    tokenizer.add_tokens(["</think>"])
    copied = AfterReasoning(grammar, tokenizer, "", "</think>")
    gt = tokenizer.convert_tokens_to_ids(">")
    assert allowed(copied, [*pieces, gt], vocab_size) == allowed(grammar, [], vocab_size)
    assert five in allowed(copied, [*pieces, gt], vocab_size)


def test_a_rejected_draft_does_not_decode_the_reasoning_again(monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["</think>"])
    five, x, close = tokenizer.convert_tokens_to_ids(["5", "x", "</think>"])
    grammar = GrammarCompiler(tokenizer, len(tokenizer), {1}).compile(StructuredOutputsParams(regex="[0-9]x"))
    after = AfterReasoning(grammar, tokenizer, "", "</think>")
    thought, calls, decode = [x] * 500, [], grammar.vocabulary.decode
    monkeypatch.setattr(grammar.vocabulary, "decode", lambda token_ids: calls.append(token_ids) or decode(token_ids))
    assert not after.is_complete(thought)
    calls.clear()
    for draft in ([five, five, five], [five, close, five], [close, five, x]):
        assert after.possible(thought, draft) == draft
        thought += [x]
        assert not after.is_complete(thought)
    assert len(calls) < 50
    assert after.is_complete([*thought, close, five, x])
