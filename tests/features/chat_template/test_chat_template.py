"""The chat template: conversations become prompts."""

import json

import pytest

from nanovllm.features.chat_template import render
from nanovllm.features.chat_template.reads import reads_of
from tests.errors import expect
from tests.short_requests import sampled


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
    expect("parts of type text", llm.chat, [{"role": "user", "content": [{"type": "video_url", "video_url": {}}]}])
    expect("has its image under", llm.chat, [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    expect("message 0: a tool call must be of type 'function'", llm.chat, [{"role": "assistant", "tool_calls": ["f"]}])
    call = {"id": [], "type": "function", "function": {"name": "f"}}
    expect(
        "message 0: id must be a string or a whole number, found []",
        llm.chat,
        [{"role": "assistant", "tool_calls": [call]}],
    )
    result = {"role": "tool", "tool_call_id": {}, "content": "noon"}
    expect("message 1: tool_call_id must be a string or a whole number, found {}", llm.chat, [user, result])
    expect("tools must be a list of dicts", llm.chat, [user], tools={"name": "f"})
    expect("chat_template_kwargs must be a dict", llm.chat, [user], chat_template_kwargs=["thinking"])
    for name, value in (
        ("add_generation_prompt", False),
        ("continue_final_message", True),
        ("tools", [{"type": "function"}]),
        ("messages", [user]),
        ("tokenize", False),
        ("padding", True),
    ):
        kwargs = {"enable_thinking": False, name: value}
        expect(f"chat_template_kwargs cannot set {name}", llm.chat, [user], chat_template_kwargs=kwargs)
    as_done = {"add_generation_prompt": True, "continue_final_message": False, "tools": None, "padding": False}
    told, plain = (llm.chat([user], chat_template_kwargs=kwargs, use_tqdm=False)[0] for kwargs in (as_done, None))
    assert told.prompt == plain.prompt
    expect("chat_template must be a template's text", llm.chat, [user], chat_template=5)
    expect("it needs add_generation_prompt=False", llm.chat, [user], continue_final_message=True)
    expect("(found 'x'); did you mean 'chat_template'?", llm.chat, [user], chat_tempalte="x")
    expect("not empty", llm.chat, [])
    llm.get_tokenizer().chat_template = None
    expect("no chat template", llm.chat, [user])


# Templates that read a content as a list of parts, each in its own way.
OF_PARTS = {
    "a loop": "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}"
    "{{ part.text }}{% endif %}{% endfor %}|{% endfor %}",
    "an index": "{% for m in messages %}{{ m.role }}:{{ m.content[0].text }}|{% endfor %}",
    "a variable": "{% for m in messages %}{% set parts = m['content'] %}{{ m.role }}:{% for p in parts %}"
    "{{ p['text'] }}{% endfor %}|{% endfor %}",
    "a macro": "{% macro told(c) %}{% for p in c %}{{ p.get('text', '') if p is mapping }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ m.role }}:{{ told(m.content) }}|{% endfor %}",
    "a filter": "{% for m in messages %}{{ m.role }}:{{ m.content | selectattr('type', 'equalto', 'text') | "
    "map(attribute='text') | join }}|{% endfor %}",
}
OF_TEXTS = "{% for m in messages %}{{ m.role + ':' + m.content }}|{% endfor %}"
OF_BOTH = OF_TEXTS.replace("m.content }}", "(m.content if m.content is string else m.content[0].text + '+') }}")
USER, SYSTEM = {"role": "user", "content": "hi"}, {"role": "system", "content": "be kind"}
TWO_PARTS = [{"type": "text", "text": "two"}, {"type": "text", "text": "gulls"}]


def shown(llm, messages, template, **options) -> str:
    return llm.chat_prompt(messages, chat_template=template, **options)["prompt"]


@pytest.mark.parametrize("name", OF_PARTS)
def test_a_template_that_reads_parts(llm, name):
    """It gets parts, whatever the messages have: their words are in the prompt."""
    template = OF_PARTS[name]
    assert shown(llm, [SYSTEM, USER], template) == "system:be kind|user:hi|"
    assert shown(llm, [{"role": "user", "content": TWO_PARTS[:1]}], template) == "user:two|"
    both = "two\ngulls" if name == "an index" else "twogulls"
    assert shown(llm, [{"role": "user", "content": TWO_PARTS}], template) == f"user:{both}|"
    [output] = llm.chat([USER], sampled(), chat_template=template)
    assert output.prompt == "user:hi|"


def test_a_template_that_reads_texts(llm):
    """Parts are joined as vLLM joins them."""
    parts = [{"role": "user", "content": TWO_PARTS}]
    assert shown(llm, parts, OF_TEXTS) == "user:two\ngulls|"
    # Python's own writing of a list would be in the prompt, and the words, too.
    assert shown(llm, parts, OF_TEXTS.replace("m.role + ':' + m.content", "m.role ~ ':' ~ m.content")) == (
        "user:two\ngulls|"
    )
    thought = [{"type": "thinking", "thinking": "two", "closed": True}, TWO_PARTS[1]]
    chat = [USER, {"role": "assistant", "content": thought}]
    assert shown(llm, chat, OF_TEXTS) == "user:hi|assistant:two\ngulls|"
    assert shown(llm, [*parts[:1], USER], OF_BOTH) == "user:two\ngulls|user:hi|", "it drops the second part"
    assert shown(llm, [{"role": "user", "content": TWO_PARTS[:1]}], OF_BOTH) == "user:two+|"


def test_the_form_of_content_can_be_said(llm):
    one, tell = {"role": "user", "content": TWO_PARTS[:1]}, "chat_template_content_format"
    assert shown(llm, [USER, one], OF_BOTH, **{tell: "string"}) == "user:hi|user:two|"
    assert shown(llm, [USER, one], OF_BOTH, **{tell: "openai"}) == "user:hi+|user:two+|"
    expect(
        "message 0 (role user): the chat template leaves the text out",
        shown,
        llm,
        [USER],
        OF_PARTS["a loop"],
        **{tell: "string"},
    )
    expect("chat_template_content_format must be one of auto, string, openai", shown, llm, [USER], OF_BOTH, **{tell: 1})


LAST_ONLY = "This template shows {{ messages[-1].content }}"
LOSES = {
    "a system message": (OF_TEXTS.replace("m in messages", "m in messages if m.role != 'system'"), [SYSTEM, USER], 0),
    "a short one": ("This shows {{ messages[-1].content }}", [USER, USER], 0),
    "all but the last": (LAST_ONLY, [USER, {"role": "assistant", "content": "yes"}, USER], 0),
    "the end of one": ("{{ messages[0].content[:12] }}", [{"role": "user", "content": "How many gulls are there?"}], 0),
    "the assistant's": (
        OF_TEXTS.replace("m in messages", "m in messages if m.role != 'assistant'"),
        [USER, {"role": "assistant", "content": "<think>no</think>yes"}, USER],
        1,
    ),
}


@pytest.mark.parametrize("name", LOSES)
def test_words_that_a_template_leaves_out(llm, name):
    """Never without a word: the conversation is refused, and the message is named."""
    template, messages, index = LOSES[name]
    role = messages[index]["role"]
    error = f"message {index} (role {role}): the chat template leaves the text out of the prompt"
    expect(error, llm.chat, messages, chat_template=template)


def test_words_that_a_template_may_change(llm):
    thought = {"role": "assistant", "content": "<think>\nno, two\n</think>\n\nyes"}
    past = OF_TEXTS.replace("m.content }}", "m.content.split('</think>')[-1].strip() }}")
    assert shown(llm, [USER, thought, USER], past) == "user:hi|assistant:yes|user:hi|"
    assert (
        shown(llm, [{"role": "user", "content": ' a\n"b" '}], "{{ messages[0].content | tojson }}") == '" a\\n\\"b\\" "'
    )
    switch = OF_TEXTS.replace("m.content }}", "m.content.replace('/no_think', '') }}")
    assert shown(llm, [{"role": "user", "content": "hi /no_think"}], switch) == "user:hi |"
    assert shown(llm, [{"role": "user", "content": ""}], OF_TEXTS) == "user:|"
    # What looks like a twin's mark is text. A part without a text is left out.
    marked = [{"type": "text", "text": "qzpartzq qz0zq"}, {"type": "text", "text": None}, {"type": "refusal"}]
    assert shown(llm, [{"role": "user", "content": marked}], OF_TEXTS) == "user:qzpartzq qz0zq|"
    assert shown(llm, [USER, {"role": "assistant", "content": None, "refusal": "No."}], OF_TEXTS) == (
        "user:hi|assistant:No.|"
    )


def test_long_texts(llm, monkeypatch):
    """Each is read a few times, not once for each of its words; and nobody waits for what cannot be a tag."""
    monkeypatch.setattr(render, "tokenize", lambda *_, **__: [0])
    tokenizer, template = llm.get_tokenizer(), "{{ messages[0].content | tojson }}"
    for text in ("\n".join(f'{{"row": {n}}}' for n in range(100_000)), "<" + "think" * 100_000):
        prompt = render.render_chat(tokenizer, [{"role": "user", "content": text}], chat_template=template)
        assert json.loads(prompt["prompt"]) == text
    lines = "\n\n".join(f"'{n}'" for n in range(100_000))
    told = template.replace("| tojson", "| replace('\n\n', '\n') | tojson")
    prompt = render.render_chat(tokenizer, [{"role": "user", "content": lines}], chat_template=told)
    assert json.loads(prompt["prompt"]) == lines.replace("\n\n", "\n")


CALLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} ARGUMENTS]{% endfor %}|{% endfor %}"
)
# How a template writes arguments -> what it makes of {"a": "é"} and of '{"a":"é"}'.
WAYS = {
    "{{ c.function.arguments }}": ('{"a": "é"}', '{"a":"é"}'),  # functionary's
    "{{ c.function.arguments | tojson }}": ('{"a": "é"}', '{"a": "é"}'),
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}": ("a=é", "a=é"),
    "{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}": (
        '{"a": "é"}',
        '{"a":"é"}',
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_arguments_as_the_template_needs_them(llm, way):
    template = CALLS.replace("ARGUMENTS", way)
    for arguments, told in zip(({"a": "é"}, '{"a":"é"}'), WAYS[way], strict=True):
        call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": "f", "arguments": arguments}}
        prompt = shown(llm, [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], template)
        assert prompt == f"user:hi|assistant:[f {told}]|"


TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + OF_TEXTS
DROPS_SYSTEM = LOSES["a system message"][0]


@pytest.mark.parametrize("template", [NO_SYSTEM, DROPS_SYSTEM])
def test_tools_without_a_system_message(llm, template, caplog):
    """They are told all the same, and the log says where; a system message of the user's is not theirs to take."""
    prompt = shown(llm, [USER], template, tools=[TOOL])
    assert prompt.startswith("user:You may call") and '"name": "now"' in prompt and prompt.endswith("\n\nhi|")
    assert "neither tools nor system messages" in caplog.text
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    prompt = shown(llm, chat, template, tools=[TOOL])
    assert '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt
    assert "user:<tool_response>\nnoon\n</tool_response>" in prompt
    problem = "no system" if template is NO_SYSTEM else "message 0 (role system)"
    expect(problem, shown, llm, [SYSTEM, USER], template, tools=[TOOL])


def test_calls_that_a_template_leaves_out(llm, caplog):
    """Its own tools stay as they are; calls that it does not show are text."""
    call = {"type": "function", "function": {"name": "now", "arguments": {"where": "here"}}}
    chat = [USER, {"role": "assistant", "content": "Wait.", "tool_calls": [call]}, {"role": "tool", "content": "noon"}]
    silent = CALLS.partition("{% for c in")[0] + "|{% endfor %}"
    prompt = shown(llm, chat, silent, tools=[TOOL])
    assert prompt.startswith("[{") and "tool:noon" in prompt
    assert 'assistant:Wait.\n<tool_call>\n{"name": "now", "arguments": {"where": "here"}}\n</tool_call>' in prompt
    assert "does not show all calls" in caplog.text
    # gpt-oss's shows the first call of a message.
    first = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]").replace(
        "ARGUMENTS", "{{ c.id }}{{ c.function.arguments | tojson }}"
    )
    calls = [{**call, "id": f"id{n}", "function": {"name": "now", "arguments": {"n": n}}} for n in range(2)]
    results = [{"role": "tool", "tool_call_id": f"id{n}", "content": f"noon{n}"} for n in (1, 0)]
    prompt = shown(llm, [USER, {"role": "assistant", "content": "Wait.", "tool_calls": calls}, *results, USER], first)
    assert prompt == (
        'user:hi|assistant:Wait.[now id0{"n": 0}]|tool:noon0|assistant:[now id1{"n": 1}]|tool:noon1|user:hi|'
    )
    # Llama 3's refuses a message with several.
    strict = "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one') }}"
    prompt = shown(
        llm,
        [USER, {"role": "assistant", "content": "Wait.", "tool_calls": calls}, *results, USER],
        strict + "{% endif %}{% endfor %}" + first,
    )
    assert prompt.endswith('[now id0{"n": 0}]|tool:noon0|assistant:[now id1{"n": 1}]|tool:noon1|user:hi|')
    # Llama 3's shows nothing but the call.
    mute = CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}").replace(
        "{{ m.content }}", "{{ m.content if not m.tool_calls }}"
    )
    prompt = shown(llm, chat, mute, tools=[TOOL])
    assert 'assistant:[now {"where": "here"}]' in prompt and "Wait." not in prompt
    assert "nothing of what an assistant's message says beside its calls" in caplog.text
    # A field of a client's own changes nothing; nor is anything said of a way that was not needed.
    caplog.clear()
    rules = {"role": "system", "content": "Be kind.", "is_answer": True}
    prompt = shown(llm, [rules, {"role": "tool", "content": "noon"}, USER], silent.replace("tool", "x"))
    assert prompt.startswith("system:Be kind.|user:<tool_response>\nnoon") and prompt.count("noon") == 1
    broken = {"type": "function", "function": {"name": "now", "arguments": "{"}}
    chat = [USER, {"role": "assistant", "content": "", "tool_calls": [broken]}, {"role": "tool", "content": "noon"}]
    assert "[now {]" in shown(llm, chat, CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}"), tools=[TOOL])
    assert "not a JSON object" not in caplog.text


def test_what_a_template_reads_can_be_told():
    told = reads_of(CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson }}"), {}, {}).describe()
    assert told["content"] == "user: text, system: text, assistant: text, tool: text"
    assert told["tools"] == told["results"] == "shown" and told["calls"] == "shown, arguments as object"
    told = reads_of(DROPS_SYSTEM, {}, {}).describe()
    assert "system: not shown" in told["content"] and told["tools"].startswith("not shown: they are described as text")
