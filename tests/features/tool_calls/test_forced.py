"""Answers that must call: what a grammar lets a model write, in each format, is a call that fits its function."""

import itertools
import json
import random
from collections import Counter
from functools import partial

import jsonschema
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.features.grammar.grammar import GrammarCompiler
from nanovllm.features.grammar.oracle import Oracle
from nanovllm.features.tool_calls.forced import forced_format, may_call, must_call, not_held
from nanovllm.features.tool_calls.parse import parse_tool_calls
from nanovllm.sampling_params import StructuredOutputsParams
from tests.checkpoints import make_tokenizer
from tests.errors import expect
from tests.marks import by_night

NAME = {"type": "string", "maxLength": 3}
FUNCTIONS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "$defs": {"city": {"enum": ["Oslo", 'R"me']}},
    },
    'a "name" \\ with\ttricks, é': {"properties": {"names": {"type": "array", "items": NAME, "maxItems": 2}}},
    "now": None,
}
EOS = 1


@pytest.fixture(scope="module")
def compiler():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])  # as Qwen's have them: a token each, and not special
    tokenizer.add_tokens(["[TOOL_CALLS]"], special_tokens=True)
    return GrammarCompiler(tokenizer, len(tokenizer), {EOS})


def allowed(compiler, grammar, token_ids: list[int]) -> list[int]:
    bits = torch.zeros(-(-compiler.vocab_size // 32), dtype=torch.int32)
    grammar.write_mask(token_ids, bits.data_ptr(), bits.nbytes)
    words = bits.tolist()  # a number of a tensor costs microseconds
    return [t for t in range(compiler.vocab_size) if words[t // 32] >> t % 32 & 1]


def is_possible(tokenizer, grammar, text: str) -> bool:
    """May an answer begin with this text?"""
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return len(grammar.possible([], token_ids)) == len(token_ids)


def grammar_of(compiler, form):
    return compiler.compile(StructuredOutputsParams(structural_tag={"format": form}))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("format_name", ["hermes", "llama3_json", "mistral", "pythonic"])
def test_whatever_is_sampled_is_a_call(compiler, format_name, several):
    grammar, names = grammar_of(compiler, must_call(format_name, FUNCTIONS, several)), set()
    for seed in range(8):
        rng, token_ids = random.Random(seed), []
        while not grammar.is_complete(token_ids):
            found = allowed(compiler, grammar, token_ids)
            if EOS in found and (len(token_ids) > 60 or rng.random() < 0.5):
                break
            token_ids.append(rng.choice([t for t in found if t != EOS]))
            assert len(token_ids) < 2000
        text = compiler.tokenizer.decode(token_ids)
        tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in FUNCTIONS.items()]
        answer = parse_tool_calls(text, forced_format(format_name), tools)
        assert answer.content is None and len(answer.tool_calls) >= 1 and (several or len(answer.tool_calls) == 1), text
        for name, arguments in answer.tool_calls:
            names.add(name)
            check(name, json.loads(arguments))
    assert names == set(FUNCTIONS)
    first = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]"}.get(format_name)
    tokens = compiler.tokenizer.convert_ids_to_tokens(allowed(compiler, grammar, []))
    assert first is None or tokens == [first], "the model's own token, not its letters"


def check(name, arguments):
    if name == "weather":
        assert arguments["city"] in ("Oslo", 'R"me') and 1 <= arguments.get("days", 1) <= 9 and len(arguments) <= 2
    elif name == "now":
        assert arguments == {}
    else:
        assert arguments.keys() <= {"names"} and all(len(text) <= 3 for text in arguments.get("names", []))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("format_name, begin", [("hermes", "<tool_call>\n"), ("llama3_json", "")])
def test_strict_functions(compiler, format_name, begin, several):
    """Any text; but a call, once it has begun, fits. Without strict any object does."""
    form = may_call(format_name, FUNCTIONS | {"free": {"type": "object", "properties": {}}}, {*FUNCTIONS}, several)
    grammar, tokenizer = grammar_of(compiler, form), compiler.tokenizer
    key = {"hermes": "arguments", "llama3_json": "parameters"}[format_name]
    possible = partial(is_possible, tokenizer, grammar)
    assert possible("Two gulls <b> {}, and no call.\n") and EOS in allowed(compiler, grammar, [])
    assert possible(f'Sure. {begin}{{"name": "weather", "{key}": {{"city": "Oslo"')
    assert possible(f'{begin}{{"name": "free", "{key}": {{}}')
    assert not possible(f'Sure. {begin}{{"name": "weather", "{key}": {{"city": "Rome"')
    assert not possible(f'{begin}{{"name": "weather", "{key}": {{"town"')
    assert not possible(f'{begin}{{"name": "unknown"')
    end = "\n</tool_call>" if begin else ""
    call = f'{begin}{{"name": "now", "{key}": {{}}}}{end}'
    assert possible(f"{call}{call} so") == several
    assert may_call("pythonic", FUNCTIONS, {"now"}) is None


@pytest.mark.parametrize("several", [False, True])
def test_strict_functions_of_mistral(compiler, several):
    """A list behind the marker, or a call alone, with [ARGS], with an id, too, or without: each as some models do."""
    grammar = grammar_of(compiler, may_call("mistral", FUNCTIONS, {*FUNCTIONS}, several))
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in FUNCTIONS.items()]

    possible = partial(is_possible, compiler.tokenizer, grammar)

    oslo, rome = '{"city": "Oslo"}', '{"city": "Rome"}'
    frames = ('[{"name": "weather", "arguments": %s}]', ' [{"name": "weather", "arguments": %s}]')
    for frame in (*frames, "weather%s", "weather[ARGS]%s", "weather[CALL_ID]a1B2c3D4e[ARGS]%s"):
        call = "[TOOL_CALLS]" + frame % oslo
        assert possible(f"Sure. {call}") and not possible("Sure. [TOOL_CALLS]" + frame % rome), frame
        assert possible(call + call) == several
        assert parse_tool_calls(call, "mistral", tools).tool_calls == [("weather", oslo)]
    assert not possible("[TOOL_CALLS]unknown") and not possible("[TOOL_CALLS]so")
    assert not possible("[TOOL_CALLS]now[CALL_ID]a1[ARGS]") and not possible("[TOOL_CALLS]now[CALL_ID]a1B2c3D4e{")
    item = '{"name": "now", "arguments": {}}'
    assert possible(f"[TOOL_CALLS][{item}, {item}]") == several
    assert possible("Two gulls [b] {}, and no call.\n") and EOS in allowed(compiler, grammar, [])


WRITE = {
    "properties": {
        "path": {"type": "string"},
        "mode": {"enum": ["new", "append"]},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["path", "mode"],
    "$defs": {"line": {"type": "integer", "maximum": 9}},
}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("before, behind", [("<tool_call>\n", "\n</tool_call>"), ("", "")])
def test_strict_functions_of_qwen3_coder(compiler, before, behind, several):
    """Texts as they are, up to the tag behind them; other values as JSON; parameters in their order."""
    functions = {"write": WRITE, "now": None, "free": {"properties": {}}}
    grammar = grammar_of(compiler, may_call("qwen3_coder", functions, {"write", "now"}, several))
    tools = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in functions.items()]

    possible = partial(is_possible, compiler.tokenizer, grammar)

    def call(**parameters: str) -> str:
        shown = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in parameters.items())
        return f"{before}<function=write>\n{shown}</function>{behind}"

    texts = dict(path='a "b"\n</b>\nc', mode="new", lines="[1, 2]", note="x")
    assert possible("Sure. " + call(**texts)) and possible(call(path="", mode="append"))
    [(name, arguments)] = parse_tool_calls(call(**texts), "qwen3_coder", tools).tool_calls
    assert (name, json.loads(arguments)) == ("write", texts | {"lines": [1, 2]})
    assert possible(call(**texts) * 2) == several
    for wrong in (dict(path="x"), dict(mode="new", path="x"), dict(path="x", mode="old"), texts | {"lines": "[10]"}):
        assert not possible(call(**wrong)), wrong
    assert not possible(call(**texts, more="x")) and not possible(f"{before}<function=unknown>")
    assert possible(f"{before}<function=now>\n</function>{behind}")
    assert possible(f"{before}<function=free>\n<parameter=x>\n5\n</parameter>\n</function>{behind}")
    assert not possible(f"{before}<function=now>\n<parameter")
    for odd in ({"required": 5}, {"properties": {"x": True}, "required": "x"}, {"properties": []}):
        assert may_call("qwen3_coder", {"odd": odd}, {"odd"}, several), "what is wrong is said by the grammar"
    assert possible("Two gulls <b> {}, and no call.\n") and EOS in allowed(compiler, grammar, [])


TEXTS = {  # schema of a text, what fits, what does not
    "pattern": (
        {"type": "string", "pattern": "^[a-z]{2}-\\d+/$"},
        ["ab-1/", "zz-907/"],
        ["ab-/", "Ab-1/", "ab-1/x", "٣"],
    ),
    "inside": ({"pattern": "b+|[\\w/]c"}, ["abc", "a\nb\n", "/c"], ["a", "", ".c"]),
    "length": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb", "éé"], ["a", "abcd"]),
    "both": ({"allOf": [{"type": "string", "maxLength": 3}, {"pattern": "^a"}]}, ["a", "abc"], ["b", "abcd"]),
    "date": ({"type": "string", "format": "date"}, ["2026-11-30"], ["2026-13-30", "today"]),
    "uuid": ({"type": "string", "format": "uuid"}, ["0a" * 4 + "-0a0a" * 3 + "-" + "0a" * 6], ["0a"]),
    "optional": (
        {"anyOf": [{"enum": ["red", "null-ish"]}, {"type": "null"}]},
        ["red", "null", "null-ish"],
        ["blue", ""],
    ),
    "maybe": ({"anyOf": [{"type": "string", "pattern": "^a+$"}, {"type": "null"}]}, ["aa", "null"], ["b", "nul"]),
    "nullable": ({"type": "string", "maxLength": 2, "nullable": True}, ["", "ab", "null"], ["abc"]),
    "either": ({"anyOf": [{"type": "integer"}, {"const": "all"}]}, ["12", "all"], ["any", "1.5"]),
    "str": ({"type": "str"}, ["anything"], []),
    "reference": ({"$ref": "#/$defs/short"}, ["ab"], ["abc"]),
    "integer": ({"$ref": "#/$defs/int"}, ["12"], ["a", "1.5"]),
}


@pytest.mark.parametrize("schema, fitting, others", TEXTS.values(), ids=TEXTS)
def test_what_a_schema_says_of_a_text_holds_in_qwen3_coders_form(compiler, schema, fitting, others):
    definitions = {"short": {"type": "string", "maxLength": 2}, "int": {"type": "integer"}}
    function = {"properties": {"x": schema, "y": {"type": "boolean"}}, "required": ["x"], "$defs": definitions}
    grammar = grammar_of(compiler, may_call("qwen3_coder", {"f": function}, {"f"}))
    assert not_held("qwen3_coder", {"f": function}, {"f"}) == ()
    tools = [{"type": "function", "function": {"name": "f", "parameters": function}}]
    for text in [*fitting, *others]:
        for more in ("", "<parameter=y>\ntrue\n</parameter>\n"):
            call = f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n{more}</function>"
            token_ids = compiler.tokenizer.encode(call, add_special_tokens=False)
            assert (len(grammar.possible([], token_ids)) == len(token_ids)) is (text in fitting), text
        [found] = parse_tool_calls(call, "qwen3_coder", tools).tool_calls
        value = json.loads(found.arguments)["x"]
        assert value in (text, None if text == "null" else text) or json.dumps(value) == text


def test_what_does_not_hold_is_said(compiler):
    odd = {"a": {"type": "string", "pattern": "(^x|y$)"}, "b": {"type": "string", "format": "tree"}}
    odd |= {"c": {"pattern": "a$|b"}, "d": {"type": ["string", "null"], "maxLength": 10**9}}
    function = {"properties": odd}
    assert not_held("qwen3_coder", {"f": function, "g": function}, {"f"}) == (
        "'pattern' of 'f', 'a'",
        "'maxLength' of 'f', 'd'",
    )
    grammar_of(compiler, may_call("qwen3_coder", {"f": function}, {"f"}))
    assert not_held("hermes", {"f": function}, {"f"}) == () == not_held("qwen3_coder", {"f": function}, set())
    assert "strict" in not_held("pythonic", {"f": None}, {"f"})[0]


def test_what_does_not_hold_is_looked_for_within_bounds(monkeypatch):
    """A pattern is compiled once, for all names; some patterns and some alternatives are looked at."""
    compiled, matcher = [], Oracle.matcher
    monkeypatch.setattr(Oracle, "matcher", lambda oracle, grammar: compiled.append(grammar) or matcher(oracle, grammar))
    odd = {"type": "string", "pattern": "a$|(^b)"}
    for num_names, num_patterns, num_compiled, found in (
        (20, 5, 6, ()),
        (1, 300, 100, ("'pattern' of 'f', 'p0'",)),  # the others may be patterns of its name
    ):
        compiled.clear()
        names = {f"p{n}": {"type": "string"} for n in range(num_names)}
        patterns = {"(": odd} | {f"^q{n}_{num_names}": odd for n in range(num_patterns)}
        function = {"properties": names, "patternProperties": patterns}
        assert not_held("qwen3_coder", {"f": function}, {"f"}) == found
        assert len(compiled) <= 2 * num_compiled, "is it possible, and does it fit"
    either = {"anyOf": [{"properties": {f"p{n}": {"type": "string"}}} for n in range(400)]}
    assert "what else" in not_held("qwen3_coder", {"f": either}, {"f"})[0]


def written(format_name: str, arguments: dict) -> str:
    """A call of f."""
    if format_name == "qwen3_coder":
        values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
        shown = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in values.items())
        return f"<tool_call>\n<function=f>\n{shown}</function>\n</tool_call>"
    return {
        "hermes": '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>',
        "llama3_json": '{"name": "f", "parameters": %s}',
        "mistral": "[TOOL_CALLS]f[ARGS]%s",
    }[format_name] % json.dumps(arguments, ensure_ascii=False)


ID = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
NAMED = {"properties": {"name": NAME, "size": {"type": "number", "minimum": 0, "maximum": 99}}, "required": ["name"]}
SHAPES = {
    "optional": {"properties": {"a": {"type": "integer"}, "b": NAME, "c": {"type": "boolean"}}, "required": ["b"]},
    "inherited": {"$defs": {"Id": ID}, "allOf": [{"$ref": "#/$defs/Id"}], **NAMED},
    "inherited by $ref": {"$defs": {"Id": ID}, "$ref": "#/$defs/Id", **NAMED},
    "own names first": {**NAMED, "$defs": {"Id": ID}, "$ref": "#/$defs/Id"},
    "either": {"$defs": {"Id": ID}, "anyOf": [{"$ref": "#/$defs/Id"}, NAMED]},
    "a map of numbers": {"additionalProperties": {"type": "integer"}},
    "a map beside names": {**ID, "additionalProperties": {"type": ["boolean", "null"]}},
    "maps by their names": {
        "patternProperties": {"^n_": {"type": "integer"}, "^t_|^[0-9]_t$": NAME, "^o_": ID},
        "additionalProperties": False,
    },
    "a map of lists": {"additionalProperties": {"type": "array", "items": {"$ref": "#/$defs/n"}}, "$defs": {"n": ID}},
}
VALUES = [5, "5", True, None, [{"id": 5}], {"id": 5}, 1.5]


@pytest.mark.parametrize("schema", SHAPES.values(), ids=SHAPES)
def test_every_format_takes_the_same_calls(compiler, schema):
    """As Hermes' form: keys in the same orders, values of the same types, which are those that are read."""
    formats = ("qwen3_coder", "llama3_json", "mistral")
    known = {name: grammar_of(compiler, may_call(name, {"f": schema}, {"f"})) for name in ("hermes", *formats)}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]

    def is_taken(name: str, arguments: dict) -> bool:
        token_ids = compiler.tokenizer.encode(written(name, arguments), add_special_tokens=False)
        return len(known[name].possible([], token_ids)) == len(token_ids)

    names = ["a", "b", "c", "id", "name", "size", "n_1", "t_1", "1_t", "o_1", "n"]
    singles = [{name: value} for name in names for value in VALUES]
    fitting = [value for value in singles if jsonschema.Draft202012Validator(schema).is_valid(value)]
    pairs = [one | other for one in singles for other in singles if one.keys() != other.keys()]
    required = {"b": "x", "name": "x", "id": 5}
    few = random.Random(5).sample(pairs, 150) + [one | other for one in fitting[:9] for other in fitting[-9:]]
    few += [dict(pair) for pair in itertools.permutations(required.items(), 2)]
    few += [{"size": 1, "name": "x", "id": 5}, {"name": "x", "size": 1, "id": 5}, {"id": 5, "size": 2, "name": "x"}]
    num_taken = Counter[str]()
    for arguments in [*singles, *few]:
        in_hermes = is_taken("hermes", arguments)
        for format_name in formats:
            taken = is_taken(format_name, arguments)
            assert taken or not in_hermes, (format_name, arguments)
            if taken:
                [(_, said)] = parse_tool_calls(written(format_name, arguments), format_name, tools).tool_calls
                read = json.loads(said)
                jsonschema.validate(read, schema)
                assert [*read] == [*arguments] and is_taken("hermes", read), (format_name, arguments)
                # Where a text has no quotes, other values are texts, too.
                assert read == arguments or not in_hermes, (format_name, arguments)
                num_taken[format_name] += in_hermes
    assert all(num_taken[format_name] >= 2 for format_name in formats)


# Shapes that an engine writes by day: references, patterns and lists in maps, what may be left out.
BY_DAY = "optional", "inherited by $ref", "maps by their names", "a map of lists"


@pytest.mark.parametrize("shape", [name if name in BY_DAY else by_night(name) for name in SHAPES])
def test_what_an_engine_writes_as_parameters_fits(checkpoint, shape):
    """Sampled by LLM from a structural tag in XGrammar's words; read back as a call."""
    schema = SHAPES[shape]
    llm = LLM(str(checkpoint("llama")), dtype="float32", max_num_seqs=16)
    content = {"type": "qwen_xml_parameter", "json_schema": {"type": "object"} | schema}
    tag = {"type": "tag", "begin": "<function=f>\n", "content": content, "end": "</function>"}
    asked = StructuredOutputsParams(structural_tag={"format": tag}, disable_any_whitespace=True)
    params = [SamplingParams(max_tokens=240, seed=seed, structured_outputs=asked) for seed in range(16)]
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    num_whole = 0
    for output in llm.generate([[5]] * 16, params, use_tqdm=False):
        if output.outputs[0].finish_reason == "stop":
            found = parse_tool_calls(output.outputs[0].text, "qwen3_coder", tools)
            [(_, arguments)] = found.tool_calls
            jsonschema.validate(json.loads(arguments), schema)
            num_whole += 1
    assert num_whole > 0


NOT_HELD = {
    "if": {"properties": {"a": NAME, "b": NAME}, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {"properties": {"a": NAME}, "dependentRequired": {"a": ["b"]}},
    "not": {"properties": {"a": {"not": NAME}}},
    "uniqueItems": {"properties": {"a": {"type": "array", "uniqueItems": True}}},
    "propertyNames": {"propertyNames": {"maxLength": 3}},
    "look-around": {"properties": {"a": {"type": "string", "pattern": "a(?=x)"}}},
    "oneOf": {"oneOf": [{"properties": {"a": NAME}}, {"properties": {"b": NAME}}]},
    "nothing fits": {"properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"]},
    "no end": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "no reference": {"properties": {"a": {"$ref": "#/$defs/a"}}},
    "no schema": {"properties": [5]},
}


@pytest.mark.parametrize("schema", NOT_HELD.values(), ids=NOT_HELD)
def test_what_cannot_be_held_is_refused_alike(compiler, schema):
    said = set()
    for format_name in ("hermes", "llama3_json", "mistral", "qwen3_coder"):
        with pytest.raises(ValueError, match="structural_tag cannot be used: ") as caught:
            grammar_of(compiler, may_call(format_name, {"f": schema}, {"f"}))
        said.add(str(caught.value))
    assert len(said) == 1, said


@pytest.mark.parametrize("format_name", ["hermes", "qwen3_coder", "json_list"])
def test_types_as_people_write_them(compiler, format_name):
    """Grammars take what the reader of calls takes."""
    properties = {
        "a": {"type": "str", "maxLength": 2},
        "b": {"type": "list", "items": {"type": "Int", "nullable": True}},
    }
    function = {"type": "dict", "properties": properties, "required": ["a", "b"]}
    strict = format_name != "json_list"
    form = may_call(format_name, {"f": function}, {"f"}) if strict else must_call("pythonic", {"f": function})
    call = {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": "x", "b": [1, null]}}\n</tool_call>',
        "qwen3_coder": "<function=f>\n<parameter=a>\nx\n</parameter>\n"
        "<parameter=b>\n[1, null]\n</parameter>\n</function>",
        "json_list": '[{"name": "f", "arguments": {"a": "x", "b": [1, null]}}]',
    }[format_name]
    grammar = grammar_of(compiler, form)
    for text, is_possible in ((call, True), (call.replace("x", "xyz"), False), (call.replace("null", "1.5"), False)):
        token_ids = compiler.tokenizer.encode(text, add_special_tokens=False)
        assert (len(grammar.possible([], token_ids)) == len(token_ids)) is is_possible, text
    tools = [{"type": "function", "function": {"name": "f", "parameters": function}}]
    [(_, arguments)] = parse_tool_calls(call, format_name, tools).tool_calls
    assert json.loads(arguments) == {"a": "x", "b": [1, None]}


def test_forms_that_are_none(compiler):
    for form, text in (
        ({"type": "lists"}, "a format is an object with a type (const_string, json_schema"),
        ({"type": "sequence", "elements": []}, "elements must be a list of objects, not empty"),
        ({"type": "const_string", "value": 5}, "value must be a text"),
        ({"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ""}, "must say where it ends"),
        (
            {"type": "tag", "begin": "<", "content": {"type": "any_text", "fits": [5]}, "end": ">"},
            "fits must be a list of texts",
        ),
        (
            {"type": "triggered_tags", "tags": [{"begin": "<f>"}], "triggers": ["<g>"]},
            "must begin with one of the trig",
        ),
        ({"type": "triggered_tags", "tags": [{"begin": "<f>"}], "triggers": [""]}, "triggers must be a list of texts"),
        ({"type": "json_schema", "json_schema": {"x-guidance": 5}}, "x-guidance must be an object"),
        ({"type": "json_schema", "json_schema": 5}, "a JSON schema is an object"),
        (
            {"type": "or", "elements": [{"type": "const_string", "value": str(n)} for n in range(3000)]},
            "at most 2000 parts",
        ),
    ):
        expect(text, grammar_of, compiler, form)
    expect("it is not JSON", compiler.compile, StructuredOutputsParams(structural_tag="{"))


def test_the_older_form_of_structural_tags(compiler):
    """As vLLM's documents have it; also as text."""
    part = {"begin": "<f=now>", "schema": {"enum": [5, 6]}, "end": "</f>"}
    tag = {"type": "structural_tag", "structures": [part], "triggers": ["<f="]}
    grammar = compiler.compile(StructuredOutputsParams(structural_tag=json.dumps(tag)))
    for text, is_possible in (("a <f=now>5</f> b <f=now>6</f>", True), ("<f=then>", False), ("<f=now>7", False)):
        token_ids = compiler.tokenizer.encode(text, add_special_tokens=False)
        assert (len(grammar.possible([], token_ids)) == len(token_ids)) is is_possible, text
