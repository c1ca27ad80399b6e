"""Schemas as other people write them: inheritance, patterns of names, what has no end, blanks. jsonschema judges."""

import json
import random
import subprocess
import sys
from fractions import Fraction
from functools import cache

import jsonschema
import openai
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.features.grammar.grammar import GrammarCompiler
from nanovllm.features.grammar.schemas import lark_of_json, with_compiled_schemas
from nanovllm.features.tool_calls.forced import may_call, must_call, not_held
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.serving.http.options import ServeOptions
from tests.checkpoints import make_checkpoint, make_tokenizer
from tests.errors import expect
from tests.servers import serving

EOS = 1
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint("llama")), dtype="float32", max_num_seqs=64)


@pytest.fixture(scope="module")
def compiler():
    tokenizer = make_tokenizer()
    return GrammarCompiler(tokenizer, len(tokenizer), {EOS})


def takes(required=(), **properties):
    return {"type": "object", "properties": properties, "required": list(required)}


def walk(compiler: GrammarCompiler, params: StructuredOutputsParams, seed: int) -> str:
    """A text by chance, with a liking for what closes. No state is without a way on."""
    grammar, rng, tokens = compiler.compile(params), random.Random(seed), list[int]()
    bits = torch.zeros(-(-compiler.vocab_size // 32), dtype=torch.int32)
    closing = [compiler.tokenizer.convert_tokens_to_ids(c) for c in '"}],:0']
    while not grammar.is_complete(tokens):
        assert len(tokens) < 1500
        grammar.write_mask(tokens, bits.data_ptr(), bits.nbytes)
        words = bits.tolist()  # a number of a tensor costs microseconds
        allowed = [t for t in range(compiler.vocab_size) if words[t // 32] >> t % 32 & 1]
        if EOS in allowed and rng.random() < 0.5:
            break
        allowed = [t for t in allowed if t != EOS] or allowed
        liked = [t for t in closing if t in allowed]
        tokens.append(rng.choice(liked if liked and rng.random() < 0.7 else allowed))
    assert not grammar.error, grammar.error
    return compiler.tokenizer.decode(tokens)


def can_be(compiler: GrammarCompiler, text: str, **kinds) -> bool:
    """Does the grammar take all of this text, and may it end there?"""
    grammar = compiler.compile(StructuredOutputsParams(**kinds))
    tokens = compiler.tokenizer.encode(text, add_special_tokens=False)
    bits = torch.zeros(-(-compiler.vocab_size // 32), dtype=torch.int32)
    if grammar.possible([], tokens) != tokens:
        return False
    grammar.write_mask(tokens, bits.data_ptr(), bits.nbytes)
    return bool(bits[EOS // 32] >> EOS % 32 & 1)


ANIMAL = takes(["name"], name={"enum": ["Tom", "Rex"]}, age=DIGIT)
DEFINED = {"$defs": {"Animal": ANIMAL}}
REFERENCE = {"$ref": "#/$defs/Animal"}
INHERITING = {
    "allOf": {"allOf": [ANIMAL, takes(["lives"], lives=DIGIT)]},
    "allOf of optional properties": {"allOf": [takes(age=DIGIT), takes(lives=DIGIT)]},
    "OpenAPI": DEFINED | {"allOf": [REFERENCE, takes(["lives"], lives=DIGIT)]},
    "beside a $ref": DEFINED | REFERENCE | takes(["lives"], lives=DIGIT),
    "beside anyOf": takes(["name"], name={"enum": ["Tom"]})
    | {"anyOf": [takes(["lives"], lives=DIGIT), takes(["age"], age=DIGIT)]},
    "anyOf of what is required": takes(age=DIGIT, lives=DIGIT)
    | {"anyOf": [{"required": ["age"]}, {"required": ["lives"]}]},
    "two alternatives": {
        "allOf": [{"anyOf": [ANIMAL, takes(["id"], id=DIGIT)]}, {"oneOf": [takes(["lives"], lives=DIGIT)]}]
    },
    "alternatives behind a $ref": {"$defs": {"Any": {"anyOf": [ANIMAL, takes(["id"], id=DIGIT)]}}}
    | {"allOf": [{"$ref": "#/$defs/Any"}, takes(["lives"], lives=DIGIT)]},
    "in properties and items": takes(
        ["cats"], cats={"type": "array", "items": {"allOf": [ANIMAL, takes(lives=DIGIT)]}}
    ),
    "three levels": {
        "$defs": {
            "Animal": ANIMAL,
            "Tail": takes(tail=DIGIT),
            "Cat": {"allOf": [REFERENCE, takes(["lives"], lives=DIGIT)]},
        },
        "allOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Tail"}, {"required": ["tail"]}],
    },
    "of itself": {
        "$defs": DEFINED["$defs"]
        | {"Cat": {"allOf": [REFERENCE, takes(kittens={"type": "array", "items": {"$ref": "#/$defs/Cat"}})]}},
        "$ref": "#/$defs/Cat",
    },
    "patterns": {"allOf": [takes(["age"], age=DIGIT), {"type": "object", "patternProperties": {"^x-": DIGIT}}]},
}


@pytest.mark.parametrize("name", INHERITING)
def test_one_object_in_several_places(compiler, name):
    """It is closed as a whole: every answer fits, has no unnamed property, and any named one may come."""
    schema = INHERITING[name]
    params = StructuredOutputsParams(json=schema, disable_additional_properties=True, disable_any_whitespace=True)
    texts, named = [walk(compiler, params, seed) for seed in range(40)], set()
    for text in texts:
        value = json.loads(text)
        jsonschema.validate(value, schema)
        objects = [*value.get("cats", []), value]
        named |= {key for each in objects for key in each}
    expected = {
        key for key in ("name", "age", "lives", "id", "tail", "cats", "kittens") if f'"{key}"' in json.dumps(schema)
    }
    assert {key for key in named if not key.startswith("x-")} == expected
    assert any(key.startswith("x-") for key in named) == (name == "patterns")
    for text in texts:
        more = json.dumps(json.loads(text) | {"unnamed": 1}, ensure_ascii=False, separators=(",", ":"))
        assert not can_be(compiler, more, json=schema, disable_additional_properties=True)


def shut(schema):
    return schema | {"additionalProperties": False}


def test_parts_that_their_author_has_closed(compiler):
    """As OpenAI's client closes inheritance: nothing would fit by the letter. Otherwise the letter counts."""
    for schema in (
        {"allOf": [shut(ANIMAL), shut(takes(["lives"], lives=DIGIT))]},
        {"$defs": {"Animal": shut(ANIMAL)}, **REFERENCE, **shut(takes(["lives"], lives=DIGIT))},
    ):
        params = StructuredOutputsParams(json=schema, disable_additional_properties=True, disable_any_whitespace=True)
        found = [json.loads(walk(compiler, params, seed)).keys() for seed in range(8)]
        assert all({"name", "lives"} <= keys <= {"name", "lives", "age"} for keys in found)
    by_the_letter = {"allOf": [shut(takes(a=DIGIT)), shut(takes(a=DIGIT, b=DIGIT))]}
    params = StructuredOutputsParams(json=by_the_letter, disable_additional_properties=True)
    for seed in range(8):
        jsonschema.validate(json.loads(walk(compiler, params, seed)), by_the_letter)


def test_a_required_property_that_may_not_be(compiler):
    schema = takes(["a"], a=False)
    expect("required property 'a' is unsatisfiable", compiler.compile, StructuredOutputsParams(json=schema))


def test_what_says_that_it_is_open_stays_open(compiler):
    for schema in (
        {"allOf": [takes(a=DIGIT) | {"additionalProperties": True}, takes(b=DIGIT)]},
        takes(a=DIGIT) | {"additionalProperties": True, "anyOf": [takes(b=DIGIT), takes(c=DIGIT)]},
        {"$defs": {"A": takes(a=DIGIT)}, "additionalProperties": DIGIT, "anyOf": [{"$ref": "#/$defs/A"}]},
        {"type": "object"},
    ):
        assert can_be(compiler, '{"a":1,"z":1}', json=schema, disable_additional_properties=True)
    data = takes(a=DIGIT)
    assert can_be(compiler, json.dumps(data), json={"const": data}, disable_additional_properties=True)
    for text, is_possible in (("{}", True), ('{"z":1}', False)):
        nothing = {"type": "object", "properties": {}}
        assert can_be(compiler, text, json=nothing, disable_additional_properties=True) is is_possible


NAMES = st.sampled_from("abcdefgh")
OBJECTS = st.lists(NAMES, max_size=3, unique=True).map(lambda names: takes(names[:1], **dict.fromkeys(names, DIGIT)))
COMBINED = st.recursive(
    OBJECTS,
    lambda inner: st.builds(
        lambda own, kind, others, ref: own | {kind: others} | ({"$ref": f"#/$defs/{ref}"} if ref else {}),
        OBJECTS,
        st.sampled_from(["allOf", "anyOf"]),
        st.lists(inner, min_size=1, max_size=3),
        st.sampled_from(["", "", "A", "B"]),
    ),
    max_leaves=6,
)


def one_of_all(schema, definitions, rng) -> dict[str, int]:
    """An object that fits, with one of each anyOf; its keys in the order of the schema."""
    value = dict.fromkeys(schema.get("properties", {}), 1)
    for member in [*schema.get("allOf", ()), *([rng.choice(schema["anyOf"])] if "anyOf" in schema else [])]:
        value |= one_of_all(member, definitions, rng)
    if "$ref" in schema:
        value |= one_of_all(definitions[schema["$ref"][-1]], definitions, rng)
    return value


COMPILER = cache(lambda: GrammarCompiler(make_tokenizer(), len(make_tokenizer()), {EOS}))


@settings(max_examples=60, deadline=None)
@given(COMBINED, OBJECTS, COMBINED, st.randoms(use_true_random=False))
def test_closing_any_combination(schema, a, b, rng):
    """What one choice of the alternatives names is taken, and nothing else. B may refer to itself."""
    b = json.loads(json.dumps(b).replace("#/$defs/B", "#/$defs/A"))
    schema = schema | {"$defs": {"A": a, "B": b}}
    value = one_of_all(schema, schema["$defs"], rng)
    jsonschema.validate(value, schema)
    for more, is_possible in (({}, True), ({"unnamed": 1}, False)):
        text = json.dumps(value | more)
        assert can_be(COMPILER(), text, json=schema, disable_additional_properties=True) is is_possible, text


def test_a_forced_call_takes_what_it_inherits(compiler):
    """Not {} alone, and no error."""
    for parameters in (INHERITING["OpenAPI"], INHERITING["allOf of optional properties"], INHERITING["beside a $ref"]):
        form = must_call("hermes", {"pet": parameters})
        params = StructuredOutputsParams(structural_tag={"format": form})
        texts = [walk(compiler, params, seed) for seed in range(12)]
        assert any('"lives": ' in text for text in texts) and not any("unnamed" in text for text in texts)


PATTERNS = [
    {"^a$": DIGIT},
    {"^(a|b)$": DIGIT, "[^\\s\\S]": DIGIT},
    {"^x-[0-9]$": DIGIT},
    {'^é\\n"$': DIGIT},
    {"^[ab]{0,3}$": {"minimum": 3}},
]


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("patterns", PATTERNS, ids=lambda patterns: next(iter(patterns)))
def test_patterns_of_names_beside_names(compiler, patterns, is_closed):
    """A comma is written only where a name can follow."""
    for more in ({}, {"additionalProperties": False}, {"additionalProperties": DIGIT}):
        schema = takes(["a"], a=DIGIT, b=DIGIT) | {"patternProperties": patterns} | more
        params = StructuredOutputsParams(json=schema, disable_additional_properties=is_closed)
        for seed in range(6):
            jsonschema.validate(json.loads(walk(compiler, params, seed)), schema)


def test_patterns_say_what_a_value_is(compiler):
    """Also of a name that is declared; what fits no pattern has the schema of other names."""
    schema = takes(["x-a"], **{"x-a": {"minimum": 3}, "b": DIGIT}) | {"additionalProperties": {"enum": ["other"]}}
    schema |= {"patternProperties": {"^x-|^y$": {"type": "integer", "maximum": 5}, "^n[0-9]$": {"type": "boolean"}}}
    for text, is_possible in (
        ('{"x-a":4,"b":9,"x-b":-1,"y":5,"n7":true,"z":"other"}', True),
        ('{"b":9,"x-a":4,"y":6}', False),
        ('{"x-a":2}', False),
        ('{"x-a":6}', False),
        ('{"x-a":4,"n7":1}', False),
        ('{"x-a":4,"yy":5}', False),
        ('{"x-a":4,"yy":"other"}', True),
        ('{"x-a":4,"x-\\"":"other"}', False),
    ):
        assert can_be(compiler, text, json=schema) is is_possible, text
        assert jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)) is is_possible, text


NODE = takes(["next"], next={"$ref": "#/$defs/Node"})
ENDLESS = {
    "a node that must have a next": {"$defs": {"Node": NODE}, "$ref": "#/$defs/Node"},
    "items": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "tuples": {"type": "array", "prefixItems": [True, {"$ref": "#"}], "minItems": 2},
    "two of each other": {
        "$defs": {"A": takes(["b"], b={"$ref": "#/$defs/B"}), "B": takes(["a"], a={"$ref": "#/$defs/A"})},
        "anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
    },
    "required elsewhere": takes(next={"$ref": "#"}) | {"anyOf": [{"required": ["next"]}]},
    "a reference to itself": {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_without_a_finite_text(llm, name):
    asked = [SamplingParams(structured_outputs=StructuredOutputsParams(json=ENDLESS[name])), SamplingParams()]
    expect("json cannot be used: no finite text fits it", llm.generate, [[5], [6]], asked)


def test_a_way_that_has_no_end_is_not_taken(compiler):
    for schema in (
        {"$defs": {"Node": NODE}, "anyOf": [{"$ref": "#/$defs/Node"}, takes(["a"], a=DIGIT)]},
        {"$defs": {"Node": NODE}} | takes(["a"], a=DIGIT, node={"$ref": "#/$defs/Node"}),
        {"$defs": {"Node": NODE}, "type": "array", "items": {"$ref": "#/$defs/Node"}},
        {"$defs": {"Node": takes(["next"], next={"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]})}}
        | {"$ref": "#/$defs/Node"},
        takes(["a"], a=DIGIT, next={"$ref": "#"}),
    ):
        params = StructuredOutputsParams(json=schema, disable_additional_properties=True)
        for seed in range(6):
            jsonschema.validate(json.loads(walk(compiler, params, seed)), schema)


def test_a_long_chain_of_definitions(compiler):
    """Each is asked as often as needed, and no stack is filled."""
    num = 150
    for names in (range(num), range(num - 1, -1, -1)):
        definitions = {
            f"D{n}": {"allOf": [{"$ref": f"#/$defs/D{n + 1}"}, takes([f"p{n}"], **{f"p{n}": DIGIT})]} for n in names
        }
        last = {f"D{num}": takes(["end"], end=DIGIT)}
        schema = {"$defs": definitions | last, "$ref": "#/$defs/D0"}
        value = {"end": 1} | {f"p{n}": 1 for n in reversed(range(num))}
        assert can_be(compiler, json.dumps(value), json=schema, disable_additional_properties=True)


@pytest.mark.parametrize("num, text", [(200, ""), (450, "rules deep in each other")])
def test_values_deep_in_each_other(compiler, num, text):
    """A chain that is followed rule by rule: llguidance's stack holds more than is taken."""
    definitions = {f"D{n}": {"type": "array", "items": {"$ref": f"#/$defs/D{n + 1}"}} for n in range(num)}
    params = StructuredOutputsParams(json={"$defs": definitions | {f"D{num}": DIGIT}, "$ref": "#/$defs/D0"})
    if text:
        expect(text, compiler.compile, params)
    else:
        compiler.compile(params)


def test_what_names_properties_is_an_object(compiler):
    """And what has items is an array, where nothing else is said; data is data."""
    objects = {"properties": {"a": {"items": {"properties": {"b": DIGIT}}}}, "required": ["a"]}
    for seed in range(8):
        value = json.loads(
            walk(compiler, StructuredOutputsParams(json=objects, disable_additional_properties=True), seed)
        )
        assert isinstance(value["a"], list) and all(isinstance(each, dict) for each in value["a"])
    nullable = {"anyOf": [{"properties": {"a": DIGIT}}, {"type": "null"}]}
    for schema, texts, others in (
        ({"enum": [5], "properties": {}}, ["5"], ["{}"]),
        ({"type": ["object", "null"], "properties": {}}, ["null", "{}"], ["5"]),
        ({"const": objects}, [json.dumps(objects)], ['{"a":[]}']),
        (nullable, ["null", "{}", '{"a":1}'], ["5"]),
        ({"items": DIGIT, "properties": {}}, ["5", "[1]", "{}"], ["[10]"]),
    ):
        for text in [*texts, *others]:
            assert can_be(compiler, text, json=schema) is (text in texts), text


BIG = 2**53


def test_numbers_that_are_given_are_written_as_they_are(compiler):
    for word in (1234567890123456789, BIG + 1, -(10**30), 1e300, 0.1, 123456789.12345679, 1e-300, 0, 1.5):
        whole = Fraction(str(word))
        for schema in ({"const": word}, {"enum": ["a", word]}, {"type": "number", "enum": [word, 2]}):
            assert can_be(compiler, str(whole.numerator) if whole.denominator == 1 else json.dumps(word), json=schema)
    ids = [BIG + 1, BIG + 3, "a", True, {"id": [BIG + 5]}, 1.5, 7]
    texts = [walk(compiler, StructuredOutputsParams(json={"enum": ids}), seed) for seed in range(12)]
    assert all(json.loads(text) in ids for text in texts)
    for text, schema in (
        ("true", {"enum": [1]}),
        ("1", {"enum": [True]}),
        ("1.5", {"type": ["integer", "string"], "enum": [1.5, "a"]}),
        (f"{BIG + 1}", {"enum": [BIG + 1, 4], "maximum": 9}),
        (f"{BIG + 1}", {"allOf": [{"enum": [BIG + 1, 4]}, {"const": 4}]}),
        ("5", {"enum": [5, 6], "multipleOf": 2}),
    ):
        assert not can_be(compiler, text, json=schema), schema
    parameters = lark_of_json(takes(["id"], id={"enum": [BIG + 1]}), is_closed=True, form="parameters")
    assert can_be(compiler, f"<parameter=id>\n{BIG + 1}\n</parameter>\n", grammar=parameters)
    assert can_be(compiler, "5", json={"default": 10**20, "const": 5})


def test_numbers_that_are_given_are_compared_as_they_are(compiler):
    for word, other, limits, is_allowed in (
        (BIG + 1, 8, {"multipleOf": 2}, False),
        (BIG + 1, 8, {"maximum": BIG}, False),
        (BIG + 1, 8, {"exclusiveMinimum": BIG}, True),
        (BIG + 1, 7, {"multipleOf": 3}, True),
        (1234567890123456789, 10, {"multipleOf": 10}, False),
        (10**19 + 1, 5, {"minimum": 10**19}, True),
        (BIG - 1, BIG + 2, {"exclusiveMinimum": BIG}, False),
        (0.3, 1, {"multipleOf": 0.1}, True),
        (3, 4, {"exclusiveMaximum": 3}, False),
    ):
        if is_allowed:
            assert can_be(compiler, json.dumps(word), json={"enum": [word, other]} | limits), (word, limits)
        else:
            schema = {"anyOf": [{"enum": [word, other]} | limits, {"type": "null"}]}
            assert not can_be(compiler, json.dumps(word), json=schema), (word, limits)
    expect("minimum must be a number", compiler.compile, StructuredOutputsParams(json={"enum": [1], "minimum": "x"}))
    expect("no finite text", compiler.compile, StructuredOutputsParams(json={"enum": [1], "multipleOf": 0}))


def test_bounds_that_would_be_rounded_are_a_little_tighter(compiler):
    """Only numbers that no float is are lost; those that are floats, and the other types' numbers, stay exact."""
    for kind, bounds, allowed, refused in (
        ("integer", {"minimum": BIG + 1}, [BIG + 2], [BIG]),
        ("integer", {"exclusiveMinimum": BIG}, [BIG + 2], [BIG]),
        ("integer", {"exclusiveMaximum": -BIG}, [-BIG - 2], [-BIG]),
        ("integer", {"exclusiveMinimum": -BIG}, [1 - BIG], [-BIG]),
        ("integer", {"minimum": 10**17}, [10**17], [10**17 - 1]),
        ("integer", {"minimum": 0, "maximum": 10**16 - 1}, [0, 10**16 - 2], [10**16 - 1, 10**16]),
        ("integer", {"minimum": 0, "exclusiveMaximum": 10**18, "maximum": 10**18}, [10**18 - 128], [10**18]),
        ("integer", {"minimum": -BIG, "maximum": 2**63 - 1}, [2**63 - 1, -BIG], [2**63, -BIG - 1]),
        ("integer", {"exclusiveMaximum": 2**63}, [2**63 - 1], [2**63]),
        ("integer", {"minimum": 0, "maximum": 2**64 - 1}, [BIG], [-1]),
        ("integer", {"minimum": -(2**63), "maximum": 2**63 - 1}, [1024 - 2**63, 2**63 - 1], [2**63]),
        ("integer", {"minimum": -(2**63)}, [1024 - 2**63, BIG], []),
        ("integer", {"minimum": 10**18 - 1}, [10**18, 2**63 - 1], [10**18 - 2]),
        ("integer", {"maximum": -(10**18)}, [-(10**18), 1024 - 2**63], [1 - 10**18]),
        ("integer", {"minimum": 2**55, "exclusiveMinimum": True}, [2**55 + 8], [2**55]),
        ("number", {"maximum": 2**55, "exclusiveMaximum": True}, [2**55 - 4], [2**55]),
        ("integer", {"maximum": 2**55, "exclusiveMaximum": False, "exclusiveMinimum": True}, [2**55], [2**55 + 8]),
        ("integer", {"enum": [10, 11], "minimum": 10, "exclusiveMinimum": True}, [11], [10]),
        ("number", {"maximum": BIG + 3}, [BIG + 2], [BIG + 4]),
        ("number", {"exclusiveMaximum": BIG + 3}, [BIG + 2], [BIG + 4]),
        ("number", {"exclusiveMinimum": 0, "exclusiveMaximum": 1e18}, [0.1, 10**18 - 1], [0, 10**18]),
        ("number", {"exclusiveMinimum": BIG}, [BIG + 2], [BIG]),
    ):
        for number in (*allowed, *refused):
            schema = {"type": kind} | bounds
            assert can_be(compiler, str(number), json=schema) is (number in allowed), (number, schema)
    excluded = {"type": "integer", "minimum": 2**55, "exclusiveMinimum": True}  # where OpenAPI has its schemas
    schema = {"$ref": "#/components/schemas/Id", "components": {"schemas": {"Id": excluded}}}
    assert [can_be(compiler, str(number), json=schema) for number in (2**55, 2**55 + 8)] == [False, True]
    schema = {"type": "integer", "minimum": 10**19, "maximum": 10**19 + 5}
    expect("leaves no whole number that can be written here", compiler.compile, StructuredOutputsParams(json=schema))


LOWEST = -(2**63)
NEAR_LOWEST = [
    {"const": LOWEST + 1},
    {"type": "integer", "const": float(LOWEST)},
    {"enum": ["a", {"id": [LOWEST]}]},
    takes(["id"], id={"enum": [LOWEST + 512, None]}),
    {"type": "integer", "minimum": LOWEST, "maximum": LOWEST + 1},
    {"type": ["integer", "number"], "minimum": 2 * LOWEST, "maximum": LOWEST},
    {"minimum": 2 * LOWEST, "maximum": LOWEST},
    {"allOf": [{"type": "integer"}, {"minimum": LOWEST}, {"exclusiveMaximum": LOWEST + 9}]},
    {"elsewhere": {"type": "integer", "minimum": LOWEST, "maximum": LOWEST}, "$ref": "#/elsewhere"},
]


def test_the_lowest_numbers_of_64_bits_do_not_end_the_process():
    """llguidance's stack would overflow. Each schema is a grammar, or refused."""
    script = f"""from nanovllm.features.grammar.schemas import lark_of_json
for number, schema in enumerate({NEAR_LOWEST!r}):
    try:
        print(number, "is" if lark_of_json(schema) else "", "a grammar", flush=True)
    except ValueError:
        print(number, "is refused", flush=True)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    told = ran.stdout.splitlines()
    assert len(told) == len(NEAR_LOWEST), f"it ends at schema {len(told)}: {ran.stderr}"
    assert ran.returncode == 0 and all(line.endswith(("is a grammar", "is refused")) for line in told), told


@pytest.mark.parametrize("number", ["1e999", "NaN", "-Infinity", "1" + "0" * 400])
def test_a_number_that_no_float_holds_is_refused(number):
    expect("is not a number that a float holds", lark_of_json, f'{{"maximum": {number}}}')


def test_one_of_whose_members_overlap_says_what_would_work(compiler):
    schema = {"oneOf": [{"type": "integer", "multipleOf": 2}, {"type": "integer", "multipleOf": 3}]}
    hint = 'Put "x-guidance": {"coerce_one_of": true} at the top'
    expect(hint, compiler.compile, StructuredOutputsParams(json=schema))
    assert can_be(compiler, "9", json=schema | {"x-guidance": {"coerce_one_of": True}})


UNKNOWN = [
    "password",
    "path",
    "binary",
    "uri-reference",
    "regex",
    "json-pointer",
    "idn-email",
    "int32",
    "Date",
    "",
    "my own",
]


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_format_that_is_not_known_is_an_annotation(compiler, name):
    """JSON Schema Validation 2020-12, 7.2.1. Wherever a schema stands; data and names of properties stay."""
    text = {"type": "string", "format": name, "maxLength": 2}
    schema = {
        "$defs": {"T": text},
        **takes(["a", "format"], a={"$ref": "#/$defs/T"}, format={"const": {"format": name}}),
        "patternProperties": {"^p": {"items": text, "type": "array"}},
        "additionalProperties": {"anyOf": [{"allOf": [text]}, {"type": "integer", "format": name}]},
    }
    value = {"a": "xy", "format": {"format": name}, "p": ["x"], "b": 5, "c": "x"}
    jsonschema.validate(value, schema)
    assert can_be(compiler, json.dumps(value), json=schema)
    for other in (value | {"a": "abc"}, value | {"p": ["abc"]}, value | {"b": "abc"}, value | {"format": {}}):
        assert not can_be(compiler, json.dumps(other), json=schema)
    function = takes(["a", "b"], a=text, b={"type": "array", "items": text})
    for form in (must_call("hermes", {"f": function}), may_call("qwen3_coder", {"f": function}, {"f"})):
        compiler.compile(StructuredOutputsParams(structural_tag={"format": form}))
    assert not_held("qwen3_coder", {"f": function}, {"f"}) == ()


def test_a_format_that_is_known_is_obeyed(compiler):
    for name, texts, others in (
        ("date", ["2024-02-28"], ["2024-02-31", "today"]),
        ("ipv4", ["10.0.0.255"], ["10.0.0.256"]),
        ("uuid", ["0a" * 4 + "-0a0a" * 3 + "-" + "0a" * 6], ["0a"]),
        ("hostname", ["a-b.org"], ["-a", "a b"]),
        ("duration", ["P3W", "PT5M"], ["3 weeks"]),
        ("ipv6", [":".join(["1f"] * 8)], ["1f"]),
    ):
        schema = {"type": "string", "format": name}
        form = may_call("qwen3_coder", {"f": takes(["x"], x=schema)}, {"f"})
        for text in texts + others:
            assert can_be(compiler, json.dumps(text), json=schema) is (text in texts), text
            call = f"<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>"
            assert can_be(compiler, call, structural_tag={"format": form}) is (text in texts), text


A_DIGIT = takes(["a"], a=DIGIT) | {"additionalProperties": False}
TWO = takes(["a", "b"], a=DIGIT, b={"type": "array", "items": DIGIT, "minItems": 1, "maxItems": 2})
TWO |= {"additionalProperties": False}
TAG = {"begin": "<f>", "content": {"type": "json_schema", "json_schema": A_DIGIT}, "end": "</f>"}


@pytest.mark.parametrize(
    "kinds",
    [
        dict(json=TWO),
        dict(json_object=True),
        dict(json=A_DIGIT | {"x-guidance": {"whitespace_flexible": True}}),
        dict(structural_tag={"format": {"type": "tag"} | TAG}),
        dict(grammar=f"start: %json {json.dumps(A_DIGIT)}"),
    ],
    ids=lambda kinds: next(iter(kinds)),
)
def test_blanks_have_a_bound(llm, kinds):
    """Of a model that writes nothing else if it may."""
    tokenizer = llm.get_tokenizer()
    blanks = [t for t in range(320) if tokenizer.decode([t]) and not tokenizer.decode([t]).strip(" \t\r\n")]
    asked = SamplingParams(
        max_tokens=500,
        temperature=0,
        logit_bias=dict.fromkeys(blanks, 100.0),
        structured_outputs=StructuredOutputsParams(**kinds),
    )
    [output] = llm.generate([[5]], asked)
    [completion] = output.outputs
    assert completion.finish_reason == "stop" and any(c in completion.text for c in " \t\r\n")
    text = completion.text.removeprefix("<f>").removesuffix("</f>")
    assert json.loads(text).keys() >= ({"a"} if "json_object" not in kinds else set())


def test_a_schema_is_code():
    lark = 'start: "%json {" /a%json {1}\\/%json {/ // %json {"type": 1}\n# %json {}\n'
    assert with_compiled_schemas(lark) == lark
    quotes = 'start: "' + '\\"' * 200_000  # nobody has closed them
    assert with_compiled_schemas(quotes) == quotes
    made = with_compiled_schemas(f'{lark} x: %json {{"const": 1}} "y" %json {{"const": 2}} // %json {{}}')
    assert made.startswith(lark) and made.count("%lark {") == 2 and made.endswith("// %json {}")


def test_over_http(tmp_path):
    """A call that is required, of a function whose parameters inherit; a schema that no text fits is a 400."""
    model = make_checkpoint(tmp_path, "llama", max_position_embeddings=2048)
    with serving(model, ServeOptions(), block_size=16, max_model_len=2048, num_gpu_blocks_override=512) as server:
        client = server.client()
        given = dict(model="tiny", messages=[{"role": "user", "content": "a cat"}], max_tokens=300, temperature=0)
        cat = {"$defs": {"Pet": takes(["name"], name={"enum": ["Tom"]})}, "$ref": "#/$defs/Pet"} | takes(["b"], b=DIGIT)
        function = {"name": "pet", "parameters": cat}
        answer = client.chat.completions.create(
            tools=[{"type": "function", "function": function}],
            tool_choice="required",
            parallel_tool_calls=False,
            **given,
        )
        [call] = answer.choices[0].message.tool_calls
        assert json.loads(call.function.arguments).keys() == {"name", "b"}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": ENDLESS["items"], "strict": True}}
        with pytest.raises(openai.BadRequestError, match="no finite text fits it"):
            client.chat.completions.create(response_format=form, **given)
