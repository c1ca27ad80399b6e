"""What vLLM's behaviour is recorded for: calls, made by record_vllm.py on vLLM and by test_vllm.py on this engine.

The demo model in float32. Greedy unless a case says otherwise. No import but the standard library's: vLLM's environment
has none of ours.
"""

from typing import Any

FRANCE = "The capital of France is"  # continued by " Paris", ".", a line break, another one, "The", ...
EMOJI = "Smileys: 😀😀😀😀😀😀😀😀"  # a character of several tokens
LONG = "The lighthouse was built in 1871. Its keeper, Ada, kept a grey cat and a red boat. " * 4
HELLO = [{"role": "user", "content": "Say hello in one word."}]
LINE_BREAK, PARIS, IM_START, IM_END, END_OF_TEXT = 198, 7042, 1, 2, 0

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CALL = {"id": "call0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# What the templates of Qwen's models do, in short: known roles only, tools as JSON, a switch for thinking.
TEMPLATE = (
    "{%- if tools %}{{ '<tools>' }}{%- for tool in tools %}{{ tool | tojson }}{%- endfor %}{{ '</tools>' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role in ('system', 'user') %}"
    "{{ '<|im_start|>' + message.role + '|' + message.content + '<|im_end|>' }}"
    "{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant|' }}"
    "{%- if message.content %}{{ message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{ call.function.name }}"
    "{%- for key, value in call.function.arguments.items() %}{{ ' ' + key + '=' + (value | tojson) }}{%- endfor %}"
    "{%- endfor %}{{ '<|im_end|>' }}"
    "{%- elif message.role == 'tool' %}{{ '<|im_start|>tool|' + message.content + '<|im_end|>' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant|' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think></think>' }}{%- endif %}{%- endif %}"
)


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


# name -> (prompt, parameters). Each is one request of its own call.
GENERATE: dict[str, tuple[Any, dict[str, Any]]] = {
    **{f"min_tokens={n}, a stop token": (FRANCE, dict(min_tokens=n, stop_token_ids=[LINE_BREAK])) for n in range(6)},
    **{f"min_tokens={n}, a stop string": (FRANCE, dict(min_tokens=n, stop=["\n"])) for n in range(6)},
    "a stop token, included": (FRANCE, dict(stop_token_ids=[LINE_BREAK], include_stop_str_in_output=True)),
    "a stop string, included": (FRANCE, dict(stop=["is:", "answer i"], include_stop_str_in_output=True)),
    "a stop string inside a token, included": (FRANCE, dict(stop=["ari"], include_stop_str_in_output=True)),
    "a special stop token": (FRANCE, dict(logit_bias={IM_START: 100}, stop_token_ids=[IM_START])),
    "a special stop token, included and shown": (
        FRANCE,
        dict(
            logit_bias={IM_START: 100},
            stop_token_ids=[IM_START],
            include_stop_str_in_output=True,
            skip_special_tokens=False,
        ),
    ),
    "special tokens skipped": (FRANCE, dict(allowed_token_ids=[IM_START, END_OF_TEXT], ignore_eos=True, max_tokens=3)),
    "special tokens shown": (
        FRANCE,
        dict(allowed_token_ids=[IM_START, END_OF_TEXT], ignore_eos=True, max_tokens=3, skip_special_tokens=False),
    ),
    "special tokens shown without spaces": (
        FRANCE,
        dict(
            logit_bias={IM_START: 100},
            max_tokens=3,
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logprobs=1,
        ),
    ),
    "not detokenized": (FRANCE, dict(detokenize=False, logprobs=1, max_tokens=4)),
    **{f"cut after {n} tokens of emojis": (EMOJI, dict(max_tokens=n)) for n in range(1, 8)},
    "logprobs of pieces of characters": (EMOJI, dict(max_tokens=6, logprobs=3)),
    "logprobs=0": (FRANCE, dict(max_tokens=2, logprobs=0)),
    "bad_words": (FRANCE, dict(bad_words=["Paris"])),
    "bad_words of several tokens": (FRANCE, dict(bad_words=["The answer", "city of"])),
    "logit_bias": (FRANCE, dict(logit_bias={PARIS: -100.0, 42: 4.5}, logprobs=2)),
    "allowed_token_ids": (FRANCE, dict(allowed_token_ids=[PARIS, LINE_BREAK, 30, 504], logprobs=2)),
    "penalties over a bias and allowed tokens": (
        FRANCE,
        dict(
            allowed_token_ids=list(range(500, 900)),
            logit_bias={504: 6.0, 600: 3.0},
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.7,
            max_tokens=24,
        ),
    ),
    "min_tokens with ignore_eos": (FRANCE, dict(logit_bias={IM_END: 100}, min_tokens=3, max_tokens=5, ignore_eos=True)),
    "prompt_logprobs=0": (FRANCE, dict(prompt_logprobs=0, max_tokens=1)),
    "prompt_logprobs=2": ("Ada kept a grey cat 😀 and a boat.", dict(prompt_logprobs=2, logprobs=1, max_tokens=2)),
    "a long prompt": (LONG, dict(max_tokens=2)),
    "a long prompt again": (LONG, dict(max_tokens=2)),
    "a long prompt again, prompt_logprobs": (LONG, dict(max_tokens=2, prompt_logprobs=0)),
    "another end of it, three samples": (LONG + "And", dict(n=3, temperature=1.0, seed=7, max_tokens=2)),
    "three samples": ("Once upon a time. " * 12, dict(n=3, temperature=1.0, seed=7, max_tokens=2)),
    "choice": ("Is vLLM good or bad? Answer:", dict(structured_outputs=dict(choice=["Positive", "Negative"]))),
    "regex": (FRANCE, dict(structured_outputs=dict(regex=r" [A-Z][a-z]{2,8}!"), max_tokens=12)),
    "json": ("A person as JSON: ", dict(structured_outputs=dict(json=PERSON), max_tokens=40, logprobs=1)),
    "grammar": (
        "SQL: ",
        dict(structured_outputs=dict(grammar='root ::= "SELECT " col\ncol ::= "a" | "b" | "c1 " col'), max_tokens=20),
    ),
}

# name -> (messages, options of chat()). What is compared is the prompt.
CHAT: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "text": (HELLO, {}),
    "parts": ([user([{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}])], {}),
    "strings as parts": ([user(["One.", {"type": "text", "text": "Two."}, "Three."])], {}),
    "refusal as a part": ([user("Hi"), {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}], {}),
    "no parts": ([user([])], {}),
    "content None": ([user("Hi"), {"role": "assistant", "content": None}, user("Well?")], {}),
    "no content": ([user("Hi"), {"role": "assistant"}, user("Well?")], {}),
    "a name": ([user("Hi", name="Ada")], {}),
    "no generation prompt": (HELLO, dict(add_generation_prompt=False)),
    "continued": (
        [user("Count."), {"role": "assistant", "content": "One, two,"}],
        dict(continue_final_message=True, add_generation_prompt=False),
    ),
    "template": (HELLO, dict(chat_template=TEMPLATE)),
    "thinking off": (HELLO, dict(chat_template=TEMPLATE, chat_template_kwargs={"enable_thinking": False})),
    "thinking on": (HELLO, dict(chat_template=TEMPLATE, chat_template_kwargs={"enable_thinking": True})),
    "unknown template option": (HELLO, dict(chat_template=TEMPLATE, chat_template_kwargs={"enable_dreaming": True})),
    "tools": (HELLO, dict(chat_template=TEMPLATE, tools=[TOOL])),
    "a call's arguments are JSON text": (
        [user("Weather?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}],
        dict(chat_template=TEMPLATE),
    ),
    "a call's answer in parts": (
        [
            user("Weather?"),
            {"role": "assistant", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call0", "content": [{"type": "text", "text": "Rain"}, "Sun"]},
        ],
        dict(chat_template=TEMPLATE, tools=[TOOL]),
    ),
    "no calls": ([user("Hi"), {"role": "assistant", "content": "Yo", "tool_calls": []}], dict(chat_template=TEMPLATE)),
    **{
        f"arguments {arguments!r}": (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
                }
            ],
            dict(chat_template=TEMPLATE),
        )
        for arguments in ("", None, "[1]", "{broken", {"a": 1})
    },
    "developer": ([{"role": "developer", "content": "Be brief."}, user("Hi")], dict(chat_template=TEMPLATE)),
    "developer after system": (
        [{"role": "system", "content": "You know all."}, user("Hi"), {"role": "developer", "content": ["Be brief."]}],
        dict(chat_template=TEMPLATE),
    ),
    "developer in the template": (
        [{"role": "developer", "content": "Be brief."}, user("Hi")],
        dict(chat_template=TEMPLATE.replace("'system', 'user'", "'system', 'developer', 'user'")),
    ),
}
LENGTHS = ["1k", "1K", "25.6k", "2m", "512", " 512 ", "auto", "-1"]

# name -> (path, body) of a request to the server, whose model is called demo. Greedy, three tokens, unless it says so.
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
SHOWN: dict[str, dict[str, Any]] = {  # what is shown of FRANCE and its continuation
    "text": {},
    "echo": dict(echo=True),
    "echo, logprobs 0": dict(echo=True, logprobs=0),
    "echo, logprobs 2": dict(echo=True, logprobs=2),
    "only echo": dict(echo=True, max_tokens=0),
    "only echo, logprobs 1": dict(echo=True, max_tokens=0, logprobs=1),
    "echo of token ids": dict(echo=True, logprobs=1, prompt=[504, IM_START, 253]),
    "logprobs 2": dict(logprobs=2),
    "tokens as ids": dict(logprobs=1, return_tokens_as_token_ids=True),
    "logprob_token_ids": dict(logprobs=2, logprob_token_ids=[100, PARIS]),
    "return_token_ids": dict(return_token_ids=True),
    "two prompts": dict(prompt=[FRANCE, "One, two,"], logprobs=0, return_token_ids=True),
    "without special tokens": dict(prompt="<|im_start|>One", add_special_tokens=False, return_token_ids=True),
    "an unknown field": dict(frobnicate=1, store=True, user="me", service_tier="auto", priority=0),
}
NO_STREAM: dict[str, dict[str, Any]] = {
    "prompt_logprobs 0": dict(prompt_logprobs=0),
    "prompt_logprobs 2": dict(prompt_logprobs=2),
    "no tokens": dict(max_tokens=0),
    "prompt_logprobs of all words": dict(prompt_logprobs=-1),
    "too many logprobs": dict(logprobs=21),
    "logprob_token_ids without logprobs": dict(logprob_token_ids=[1]),
    "suffix": dict(suffix="x"),
    "no prompt": dict(prompt=""),
    "stream options without a stream": dict(stream_options=dict(include_usage=True)),
    "prompt_logprobs in a stream": dict(stream=True, prompt_logprobs=1),
}
OF_CHATS: dict[str, dict[str, Any]] = {
    "text": {},
    "top_logprobs 0 without logprobs": dict(top_logprobs=0),
    "logprobs": dict(logprobs=True),
    "top_logprobs 2": dict(logprobs=True, top_logprobs=2),
    "logprob_token_ids": dict(logprobs=True, top_logprobs=2, logprob_token_ids=[100, 200]),
    "return_token_ids": dict(return_token_ids=True),
    "echo of what goes on": dict(
        messages=[*HELLO, {"role": "assistant", "content": "Well, "}],
        echo=True,
        continue_final_message=True,
        add_generation_prompt=False,
        max_tokens=2,
    ),
    "stream options": dict(stream=True, stream_options=dict(include_usage=True, continuous_usage_stats=None)),
}
SERVER: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}": (TEXTS, dict(prompt=FRANCE) | more) for name, more in (SHOWN | NO_STREAM).items()},
    **{f"{name}, streamed": (TEXTS, dict(prompt=FRANCE) | more | dict(stream=True)) for name, more in SHOWN.items()},
    **{f"chat: {name}": (CHATS, dict(messages=HELLO) | more) for name, more in OF_CHATS.items()},
    "chat: prompt_logprobs": (CHATS, dict(messages=HELLO, prompt_logprobs=1)),
    "chat: top_logprobs without logprobs": (CHATS, dict(messages=HELLO, top_logprobs=2)),
    "chat: logprob_token_ids without logprobs": (CHATS, dict(messages=HELLO, logprob_token_ids=[1])),
    "tokenize": ("/tokenize", dict(prompt=FRANCE, return_token_strs=True)),
    "tokenize a chat": ("/tokenize", dict(messages=HELLO, model="demo")),
    "tokenize a chat without its end": ("/tokenize", dict(messages=HELLO, add_generation_prompt=False)),
    "tokenize nothing": ("/tokenize", dict(model="demo")),
    "tokenize for another model": ("/tokenize", dict(prompt=FRANCE, model="gpt-4o")),
    "detokenize": ("/detokenize", dict(tokens=[504, 253, IM_START])),
    "detokenize texts": ("/detokenize", dict(tokens=["x"])),
}
GENERATED = {"model": "demo", "temperature": 0, "max_tokens": 3}
SERVER = {name: (path, body if "token" in path else GENERATED | body) for name, (path, body) in SERVER.items()}


def slim(answer: Any) -> Any:
    """Without nulls, without what is another each time or a server's own, and with rounded numbers."""
    if isinstance(answer, dict):
        own = ("id", "created", "system_fingerprint", "object", "model", "prompt_tokens_details", "refusal")
        return {name: slim(value) for name, value in answer.items() if value is not None and name not in own}
    if isinstance(answer, list):
        return [slim(item) for item in answer]
    return round(answer, 4) if isinstance(answer, float) else answer


def whole(answer: Any) -> Any:
    """A stream's chunks as the answer that they make."""
    if not isinstance(answer, list):
        return answer
    choices: dict[int, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for chunk in answer:
        rest |= {name: value for name, value in chunk.items() if name != "choices"}
        for new in chunk["choices"]:
            choice = choices.setdefault(new["index"], {})
            for name, value in new.items():
                choice[name] = _joined(choice[name], value) if name in choice and name != "index" else value
    return rest | {"choices": [choices[index] for index in sorted(choices)]}


def _joined(a: Any, b: Any) -> Any:
    if isinstance(a, dict):
        return a | {name: _joined(a[name], value) if name in a else value for name, value in b.items()}
    return a + b
