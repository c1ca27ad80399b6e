"""The chat template: conversations become prompts, in a process that is ended when a template takes too much."""

import resource
import sys

import pytest

from nanovllm.checks.confined import end
from nanovllm.features.chat_template.render import RENDERER
from tests.errors import expect
from tests.test_llm import sampled


def test_chat_uses_the_template(llm):
    conversation = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    [output] = llm.chat(conversation, sampled())
    assert (
        output.prompt
        == "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert output.prompt_token_ids[0] == 2, "<|im_start|> is one token"
    assert len(llm.chat([conversation, conversation], sampled())) == 2


def test_messages(llm, monkeypatch):
    user = {"role": "user", "content": "hi"}
    expect("at most 9 messages", llm.chat, [user] * 10)
    expect(
        "conversations[1]: the chat template does not take these messages: at most 9", llm.chat, [[user], [user] * 10]
    )
    expect("unknown role wizard", llm.chat, [{"role": "wizard", "content": "hi"}])
    expect("message 0 must be a dict with strings 'role' and 'content'", llm.chat, [{"content": "hi"}])
    expect("message 1: content must be a string or a list", llm.chat, [user, {"role": "user", "content": [5]}])
    expect("parts of type text", llm.chat, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    expect("message 0: a tool call must be of type 'function'", llm.chat, [{"role": "assistant", "tool_calls": ["f"]}])
    expect("tools must be a list of dicts", llm.chat, [user], tools={"name": "f"})
    expect("chat_template_kwargs must be a dict", llm.chat, [user], chat_template_kwargs=["thinking"])
    expect("chat_template must be a template's text", llm.chat, [user], chat_template=5)
    expect("it needs add_generation_prompt=False", llm.chat, [user], continue_final_message=True)
    expect("chat has no argument 'chat_tempalte'; did you mean 'chat_template'?", llm.chat, [user], chat_tempalte="x")
    expect("not empty", llm.chat, [])
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    for value in (object(), nested):
        expect("only what JSON can hold is taken", llm.chat, [user], chat_template_kwargs={"now": value})
    llm.get_tokenizer().chat_template = None
    expect("no chat template", llm.chat, [user])


TWO_GB = "{% for i in range(99999) %}{{ 'x' * 20000 }}{% endfor %}"
TOO_MUCH = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    TWO_GB,
    "{% set text %}" + TWO_GB + "{% endset %}{{ text }}",
    "{% set n = namespace(a='x') %}{% for i in range(40) %}{% set n.a = n.a ~ n.a %}{% endfor %}{{ n.a }}",
    "{{ 'x' * 2000000000 }}",  # one operation in C, as the next ones: no line of Python comes in between
    "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
    "{{ 9 ** (9 ** 9) }}",
]


@pytest.mark.parametrize("template", TOO_MUCH)
def test_a_template_that_takes_too_much_is_ended(llm, monkeypatch, template):
    """Elsewhere: nothing of it is left in this process, and the next conversation is rendered."""
    monkeypatch.setattr(RENDERER, "seconds", 0.3)
    monkeypatch.setattr(RENDERER, "idle", [])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    user = [{"role": "user", "content": "hi"}]
    expect("the chat template takes more than 0.3 s of a processor or 128 MB", llm.chat, user, chat_template=template)
    if sys.platform == "linux":  # ru_maxrss is in KiB
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 50
    assert RENDERER.ask("{{ messages[0].content }}", user, {}) == "hi"
    for process in RENDERER.idle:
        end(process)
