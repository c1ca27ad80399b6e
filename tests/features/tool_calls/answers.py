"""Answers with calls, in each format, and what damages them."""

from hypothesis import strategies as st


def tool(name: str, **properties: dict) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}, metric={"type": "boolean"}),
    tool("write", path={"type": "string"}, text={"type": "string"}, tags={"type": "array"}, size={"type": "number"}),
    tool("now"),
    tool(
        "find",
        code={"anyOf": [{"type": "string"}, {"type": "null"}]},
        also={"type": ["string", "null"]},
        x={"enum": [1]},
    ),
]
OSLO, ROME = ("weather", {"city": "Oslo"}), ("weather", {"city": "Rome", "days": 2})
NOW = ("now", {})
HERMES_OSLO = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
HERMES_ROME = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'
LLAMA_OSLO, LLAMA_NOW = '{"name": "weather", "parameters": {"city": "Oslo"}}', '{"name": "now", "parameters": {}}'
XML_OSLO = "<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>"
XML_NOW = "<tool_call>\n<function=now>\n</function>\n</tool_call>"
CODE = 'def f(a):\n    return "<b>" if a else {}\n'
# format, text, content, calls
CASES = [
    ("hermes", "Two gulls.", "Two gulls.", []),
    ("hermes", "", "", []),
    ("hermes", " \n", " \n", []),
    ("hermes", HERMES_OSLO, None, [OSLO]),
    ("hermes", f"\n\n{HERMES_OSLO}\n{HERMES_ROME}\n", None, [OSLO, ROME]),
    ("hermes", f"I shall look. {HERMES_ROME}", "I shall look. ", [ROME]),
    ("hermes", f"{HERMES_ROME} Done.", " Done.", [ROME]),
    ("hermes", HERMES_OSLO.removesuffix("\n</tool_call>"), None, [OSLO]),
    ("hermes", '<tool_call>{"arguments": {"city": "Oslo"}, "name": "weather"}</tool_call>', None, [OSLO]),
    ("hermes", r'<tool_call>{"name": "weather", "arguments": "{\"city\": \"Oslo\"}"}</tool_call>', None, [OSLO]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "Oslo"}</tool_call>', None, [("weather", "Oslo")]),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>', None, [NOW]),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>', None, [NOW]),
    ("hermes", '<tool_call>{"id": 1, "name": "now", "arguments": {}, "type": "function"}</tool_call>', None, [NOW]),
    ("hermes", r'<tool_call>{"name": "f\"\u00e9}", "arguments": {"a": "}]\\\""}}', None, [('f"é}', {"a": '}]\\"'})]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": {"b": [[1.5e3, null], "</tool_call>"]}}}</tool_call>', None,
     [("f", {"a": {"b": [[1500, None], "</tool_call>"]}})]),
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo"}}]', None, [OSLO]),
    ("mistral", '[TOOL_CALLS] [{"arguments": {}, "name": "now"},{"name": "now"}]\nso', "\nso", [NOW] * 2),
    ("mistral", 'Hello[TOOL_CALLS]weather{"city": "Oslo"}[TOOL_CALLS]now{}', "Hello", [OSLO, NOW]),
    ("mistral", '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[CALL_ID]a1[ARGS]{"city": "Oslo"}', None, [NOW, OSLO]),
    ("mistral", "It is [TOOL", "It is [TOOL", []),
    ("llama3_json", LLAMA_OSLO, None, [OSLO]),
    ("llama3_json", f"<|python_tag|>{LLAMA_OSLO}; {LLAMA_NOW};\n{LLAMA_OSLO}", None, [OSLO, NOW, OSLO]),
    ("llama3_json", LLAMA_NOW.replace("parameters", "arguments"), None, [NOW]),
    ("llama3_json", f"Look: {LLAMA_NOW} {{so}}", "Look:  {so}", [NOW]),
    ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', None, [NOW]),
    ("llama3_json", '{"type": "function", "function": {"name": "now", "parameters": {}}}', None, [NOW]),
    ("llama3_json", f'[{{"id": "0", "function": {LLAMA_OSLO}, "type": "function"}}]; {LLAMA_NOW}', None, [OSLO, NOW]),
    ("llama3_json", '{"city": "Oslo", "days": 2}', '{"city": "Oslo", "days": 2}', []),
    ("llama3_json", '{"name": "Ada", "parameters": {}}', '{"name": "Ada", "parameters": {}}', []),  # no function
    ("jamba", '<tool_calls>[{"name": "now", "id": "0"}, {"name": "now"}]</tool_calls>', None, [NOW, NOW]),
    ("nemotron_json", '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>\n', None, [NOW]),
    ("pythonic", '[weather(city="Oslo"), now()]', None, [OSLO, NOW]),
    ("pythonic", "[write(path='it\\'s)', tags=['a', {'b': None}], size=-1.5, text=\"\")]", None,
     [("write", {"path": "it's)", "tags": ["a", {"b": None}], "size": -1.5, "text": ""})]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", None, [NOW]),
    ("pythonic", " [now()] So.", "So.", [NOW]),
    ("pythonic", "See [1] and now().", "See [1] and now().", []),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("qwen3_coder", f"<tool_call>\n{XML_OSLO}\n</tool_call>\n{XML_NOW}", None, [OSLO, NOW]),
    ("qwen3_coder", f"Yes. {XML_OSLO}", "Yes. ", [OSLO]),
    ("qwen3_coder", XML_OSLO.replace("</parameter>", "<parameter=days>\n2\n</parameter>\n<parameter=metric>True"), None,
     [("weather", {"city": "Oslo", "days": 2, "metric": True})]),
    ("qwen3_coder", f"<function=write><parameter=text>\n{CODE}\n</parameter><parameter=tags>['a', 1]</parameter>"
     "<parameter=size>big</parameter><parameter=more>7</parameter></function>", None,
     [("write", {"text": CODE, "tags": ["a", 1], "size": "big", "more": "7"})]),
    ("qwen3_coder", "<function=find><parameter=code>0123</parameter><parameter=also>\nnull\n</parameter>"
     "<parameter=x>1</parameter></function>", None, [("find", {"code": "0123", "also": None, "x": 1})]),
    ("hermes", f'<tool_call>{{"type": "function", "function": {LLAMA_OSLO}}}</tool_call>', None, [OSLO]),
    ("hermes", '<tool_call>{"why": ["x"], "name": "now", "arguments": {}, "so": 1}</tool_call>', None, [NOW]),
    ("json_list", '[{"name": "weather", "arguments": {"city": "Oslo"}}, {"name": "now", "parameters": {}}]', None,
     [OSLO, NOW]),
]  # fmt: skip
BROKEN = [  # all of it is content
    ("hermes", "<tool_call>weather in Oslo</tool_call>"),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "weather", "argum'),
    ("mistral", "[TOOL_CALLS] none of them"),
    ("llama3_json", '{"name": "now"}'),
    ("llama3_json", '{"function": "now", "parameters": {}}'),
    ("pythonic", "[weather('Oslo')]"),
    ("pythonic", "[unknown()]"),
    ("pythonic", "[weather(ci"),
    ("pythonic", '[weather(city=capital(of="Norway"), days=2)]'),
    ("pythonic", "[weather(city=cities[0])]"),
    ("pythonic", "[weather(days=-(2))]"),
    ("pythonic", "[weather(city=lambda: 5)]"),
    ("pythonic", "[weather(days=x<3)]"),
    ("qwen3_coder", "<tool_call>weather</tool_call>"),
    ("qwen3_coder", "<function=weather>Oslo</function>"),
    ("json_list", '[{"name": "now", "argum'),
    ("json_list", '{"answer": 42}'),
    ("json_list", '[{"name": "weather", "age": 3}, {"name": "Bob", "age": 5}]'),
    ("json_list", '[{"name": "Ann", "arguments": {}}]'),
]  # fmt: skip


def hermes(arguments: str, name: str = "write", end: str = "}</tool_call>") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}{end}'


def xml(name: str = "write", **parameters: str) -> str:
    shown = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in parameters.items())
    return f"<tool_call>\n<function={name}>\n{shown}</function>\n</tool_call>"


# As small models write: format, text, content, calls.
DAMAGED = [
    ("hermes", hermes('{"text": "a\n\tb\x01"}'), None, [("write", {"text": "a\n\tb\x01"})]),
    ("mistral", '[TOOL_CALLS]write{"text": "a\nb"}', None, [("write", {"text": "a\nb"})]),
    ("llama3_json", '{"name": "write", "parameters": {"text": "a\nb"}}', None, [("write", {"text": "a\nb"})]),
    ("pythonic", '[write(text="a\nb"), now()]', None, [("write", {"text": "a\nb"}), NOW]),
    ("hermes", hermes('{"a": NaN, "b": [Infinity, -Infinity, 1e999, -0.5e1], "c": nan}'), None,
     [("write", {"a": None, "b": [None, None, None, -5], "c": None})]),
    ("hermes", hermes('{"a": 1, "b": [1, 2, ], }'), None, [("write", {"a": 1, "b": [1, 2]})]),
    ("hermes", hermes("{'a': 'it\\'s', 'b': 'say \"so\"', 'c': True, 'd': None}"), None,
     [("write", {"a": "it's", "b": 'say "so"', "c": True, "d": None})]),
    ("hermes", hermes(r'{"a": "\d+\.\s", "b": "\n\u00e9\/", "c": "\u12"}'), None,
     [("write", {"a": r"\d+\.\s", "b": "\né/", "c": "\\u12"})]),
    ("hermes", hermes(r'{"a": "\ud83d", "b": "\ud83d\ude00", "c": "\ude00x", "d": "\ud83d\n"}'), None,
     [("write", {"a": "\ufffd", "b": "\U0001f600", "c": "\ufffdx", "d": "\ufffd\n"})]),
    ("hermes", hermes('{"a": "say "so" to him", "b": 1}'), None, [("write", {"a": 'say "so" to him', "b": 1})]),
    ("hermes", hermes('{city: Oslo, "days": +2, "more": 007}', "weather"), None,
     [("weather", {"city": "Oslo", "days": 2, "more": 7})]),
    ("hermes", hermes('{"a": {"b": 1}}', end="}}}\n</tool_call>"), None, [("write", {"a": {"b": 1}})]),
    ("hermes", hermes('{"a": {"b": 1}}', end="</tool_call> So."), " So.", [("write", {"a": {"b": 1}})]),
    ("hermes", hermes('{"a": {"b": [1, 2', end="</tool_call>\n") + HERMES_OSLO, None,
     [("write", {"a": {"b": [1, 2]}}), OSLO]),
    ("hermes", hermes('{"a": 1}', end="} so </tool_call> it is"), "so  it is", [("write", {"a": 1})]),
    ("hermes", hermes('{"a": 1}', end="}</tool_c"), None, [("write", {"a": 1})]),
    ("hermes", hermes('{"a": 1}', end="} so</tool_c"), "so", [("write", {"a": 1})]),
    ("hermes", hermes('{"a": 1]}'), None, [("write", {"a": 1})]),
    ("hermes", hermes('{"a": [1}'), None, [("write", {"a": [1]})]),
    ("hermes", hermes("[" * 999 + "]" * 999).replace('"arguments": ', '"arguments": {"a": '), None, None),
    ("llama3_json", LLAMA_OSLO + "}" + LLAMA_NOW, None, [OSLO, NOW]),
    ("llama3_json", LLAMA_OSLO[:-1] + " So.", "So.", [OSLO]),
    ("pythonic", "[f(a=true, b=[false, null]), g(c=1)]", None,
     [("f", {"a": True, "b": [False, None]}), ("g", {"c": 1})]),
    ("pythonic", r"""[f(a="\x41\u00e9\U0001F600\101\N{BULLET}\q\/", b=0o17, c=-0x1F, d=1_000, e=r"C:\new\"x")]""", None,
     [("f", {"a": "Aé😀A•\\q\\/", "b": 15, "c": -31, "d": 1000, "e": 'C:\\new\\"x'})]),
    ("pythonic", """[f(a={1, 2}, b=(1), c=(1,), d={}, e={"x", "y"}, f={(2): {"x"}}, g=f'{x}', h=Rb"\\d")]""", None,
     [("f", {"a": [1, 2], "b": 1, "c": [1], "d": {}, "e": ["x", "y"], "f": {"2": ["x"]}, "g": "{x}", "h": "\\d"})]),
    ("pythonic", r"""[f(a="\xg\N{no}\U00110000\Ud800", b="say "hi"", d='\U0000d800\a\
', c="the "a" ")]""", None,
     [("f", {"a": r"\xg\N{no}\U00110000\Ud800", "b": 'say "hi"', "c": 'the "a" ', "d": "\ufffd\a"})]),
    ("pythonic", """[f(a="grep "foo" "bar.txt"", b='SELECT 'x' 'y' FROM t', c="She's "one" 'two' three")]""", None,
     [("f", {"a": 'grep "foo" "bar.txt"', "b": "SELECT 'x' 'y' FROM t", "c": "She's \"one\" 'two' three"})]),
    ("pythonic", """[f(a="git commit -m "msg" "x" && ls", b="words "yes" 'no' and "so" on", c="x" "y", d=5)]""", None,
     [("f", {"a": 'git commit -m "msg" "x" && ls', "b": "words \"yes\" 'no' and \"so\" on", "c": 'x" "y', "d": 5})]),
    ("pythonic", """[f(a={"y", "x": 1}, b={x, 2, "y": {3}}, c={"k": 1, "y"}, d=({"y", "x": 1}), e=({1},))]""", None,
     [("f", {"a": {"x": 1}, "b": {"y": [3]}, "c": {"k": 1}, "d": {"x": 1}, "e": [[1]]})]),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"a": {10**350}, "b": 1_000, "c": +5}}}}</tool_call>', None,
     [("f", {"a": 10**350, "b": 1000, "c": 5})]),
    ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": "\x41", "b": 0x1F, "c": "a" "b"}}</tool_call>', None,
     [("f", {"a": r"\x41", "b": "0x1F", "c": 'a" "b'})]),
    ("pythonic", r"""[f(a={r"\d+": {u"x": "y"}, b'z': 2}, b=[{"r": r"a"}, {r"b": 1}], c={f"s", "t"}), g(c=1)]""", None,
     [("f", {"a": {"\\d+": {"x": "y"}, "z": 2}, "b": [{"r": "a"}, {"b": 1}], "c": ["s", "t"]}), ("g", {"c": 1})]),
    ("pythonic", "[f(a={'k': 1 'l': [2] 'm': {}}\nb=2)]", None, [("f", {"a": {"k": 1, "l": [2], "m": {}}, "b": 2})]),
    ("pythonic", "[weather(city='Oslo',\n  days=2\n), weather(city=rome())]", ", weather(city=rome())]",
     [("weather", {"city": "Oslo", "days": 2})]),
    ("llama3_json", f"[{LLAMA_OSLO}, {LLAMA_NOW}]", None, [OSLO, NOW]),
    ("pythonic", "[now()]\n[weather(city='Oslo')]", None, [NOW, OSLO]),
    ("pythonic", "[write(tags=(1, 'a', ()), text=\"\"\"a \"b\"\nc\"\"\"), now()", None,
     [("write", {"tags": [1, "a", []], "text": 'a "b"\nc'}), NOW]),
    ("pythonic", "[now()\nweather(city='Oslo')]", None, [NOW, OSLO]),
    ("hermes", '<tool_call>{"name": "now"}\n{"name": "now"}</tool_call> So.', " So.", [NOW, NOW]),
    ("hermes", '<tool_call>[{"name": "now"}, {"name": "now"}]</tool_call>\n' + HERMES_OSLO, None, [NOW, NOW, OSLO]),
    ("hermes", '<tool_call>{"name": "now"}\n{so}</tool_call>', "{so}", [NOW]),
    ("mistral", '[TOOL_CALLS][{"name": "now"}\n{"name": "now"}]', None, [NOW, NOW]),
    ("pythonic", "[weather(city='Oslo', 5, days=2)]", None, [("weather", {"city": "Oslo", "days": 2})]),
    ("qwen3_coder", xml(path='a "b"\t\\d\n', size="140.0", tags="['a', True,]"), None,
     [("write", {"path": 'a "b"\t\\d\n', "size": 140, "tags": ["a", True]})]),
    ("qwen3_coder", xml(text="a").replace("</parameter>", "</parameter> so"), None, [("write", {"text": "a"})]),
    ("qwen3_coder", xml(text="a").replace("</function>", "</functon>") + " So.", " So.", [("write", {"text": "a"})]),
    ("qwen3_coder", xml("now").replace("</tool_call>", "</tool_c"), None, [NOW]),
    ("qwen3_coder", xml(text="a").replace("</tool_call>", "so</tool_call>"), "so", [("write", {"text": "a"})]),
    ("qwen3_coder", f"<function=now>\n<parameter=\n>{XML_OSLO}", None, [NOW, OSLO]),
    ("qwen3_coder", xml(text="a").replace("</function>", "<parameter=text>b</parameter><parameter=size>1</function>"),
     None, [("write", {"text": "a", "size": 1})]),
]  # fmt: skip
CUT = [  # the answer ends within the call: format, text, content, arguments
    ("hermes", hermes('{"a": "b', end=""), None, '{"a": "b'),
    ("hermes", "So. " + hermes('{"a": 1', end=""), "So. ", '{"a": '),
    ("hermes", hermes('{"a": "\\u00', end=""), None, '{"a": "'),
    ("qwen3_coder", "<function=write>\n<parameter=text>\na\n</para", None, '{"text": "a'),
    ("qwen3_coder", "<function=write>\n<parameter=text>\na\n</parameter>\n", None, '{"text": "a"'),
    ("qwen3_coder", "<function=write>\n<parameter=text>\na\n</parameter>\n</func", None, '{"text": "a"'),
    ("qwen3_coder", "<function=write>\n<parameter=size>\n12", None, '{"size": '),
    ("qwen3_coder", "<tool_call>\n<function=write>\n", None, ""),
    ("pythonic", "[write(text='a', tags=[1, ", None, '{"text": "a", "tags": [1'),
    ("pythonic", "[write(text='a', size=len('abc'), path='b'), now()] So.", None, '{"text": "a"'),
    ("pythonic", "[write(tags=[1][0])]", None, '{"tags": [1]'),
    ("pythonic", "[write(tags=[1] + [2])]", None, '{"tags": [1]'),
    ("pythonic", "[write(size={'a': 1} | {'b': 2}, text='a')]", None, '{"size": {"a": 1}'),
    ("pythonic", "[write(text='a', path, size=1), now()] So.", None, '{"text": "a"'),
    ("mistral", '[TOOL_CALLS]write{"a', None, "{"),
]  # fmt: skip
PARTS = sorted(
    {
        part
        for _, text, *_ in [*CASES, *BROKEN, *DAMAGED, *CUT]
        for part in (text, text[: len(text) // 2])
        if len(text) < 999
    }
)
# What a damage puts in: signs that mean something in one of the formats.
SIGNS = ["", *"{}[]()\"'\\,:;=<>\n\t 0", "\\u", "\\ud83d", "NaN", "</", "<parameter=", "</function>", "</tool_call>"]
DAMAGES = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.sampled_from(SIGNS)), max_size=4)


def damaged(text: str, damages: list[tuple[int, int, str]]) -> str:
    for place, num_lost, sign in damages:
        place %= len(text) + 1
        text = text[:place] + sign + text[place + num_lost :]
    return text
