"""The keys of an object: in which order they may come, how often, and in what spelling. jsonschema judges."""

import json
import random
from collections import Counter

import jsonschema
import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputsParams
from tests.checkpoints import make_checkpoint
from tests.errors import expect
from tests.marks import by_night

INT, TEXT = {"type": "integer"}, {"type": "string"}
PERSON = {"type": "object", "properties": {"name": TEXT, "age": INT, "city": TEXT}}
NODE = {"type": "object", "properties": {"id": INT, "next": {"$ref": "#/$defs/Node"}, "tag": TEXT}, "required": ["id"]}
MANY = {f"p{n}": INT for n in range(90)}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    model = make_checkpoint(tmp_path_factory.mktemp("keys") / "m", "llama", max_position_embeddings=2048)
    return LLM(str(model), dtype="float32", max_num_seqs=8)


def answered(llm: LLM, wish: str, otherwise: str = "", **kinds) -> tuple[str, str | None]:
    """What a model writes that wants to write this text, token by token; where it may not, one of the other signs."""
    tokenizer = llm.get_tokenizer()
    ids = [*tokenizer.encode(wish, add_special_tokens=False), 1]
    pushed = {tokenizer.encode(sign, add_special_tokens=False)[0]: 500 - 30 * n for n, sign in enumerate(otherwise)}

    def push(generated, row):
        for token, more in pushed.items():
            row[token] += more
        row[1] += 200
        if generated == ids[: len(generated)] and len(generated) < len(ids):
            row[ids[len(generated)]] += 1000
        return row

    asked = StructuredOutputsParams(disable_any_whitespace=True, **kinds)
    params = SamplingParams(temperature=0, max_tokens=1500, logits_processors=[push], structured_outputs=asked)
    [output] = llm.generate("x", params, use_tqdm=False)
    return output.outputs[0].text, output.outputs[0].finish_reason


def closed(schema):
    return schema | {"additionalProperties": False}


WISHES = {
    "all optional": (PERSON, '{"city":"Rome","age":41,"name":"Ada"}'),
    "one required": (PERSON | {"required": ["city"]}, '{"age":41,"city":"Rome","name":"Ada"}'),
    "closed": (closed(PERSON) | {"required": ["age"]}, '{"city":"Rome","age":41,"name":"Ada"}'),
    "others are numbers": (PERSON | {"additionalProperties": INT}, '{"city":"Rome","size":3,"name":"Ada","age":41}'),
    "patterns": (
        closed(PERSON) | {"patternProperties": {"^na_|^x$": INT}},
        '{"city":"Rome","na_me":3,"name":"Ada","x":4,"age":41}',
    ),
    "inside of others": (
        {"type": "object", "properties": {"a": closed(PERSON), "b": {"type": "array", "items": PERSON}}},
        '{"b":[{"city":"Rome","age":1},{"age":2,"name":"Ada"}],"a":{"age":3,"name":"Ada"}}',
    ),
    "$ref, of itself": (
        {"$defs": {"Node": closed(NODE)}, "$ref": "#/$defs/Node"},
        '{"tag":"t","id":1,"next":{"next":{"id":3,"tag":""},"tag":"u","id":2}}',
    ),
    "allOf": (
        {"allOf": [PERSON, {"type": "object", "properties": {"id": INT}, "required": ["id"]}]},
        '{"city":"Rome","id":7,"age":41,"name":"Ada"}',
    ),
    "beside a $ref": (
        {"$defs": {"P": PERSON}, "$ref": "#/$defs/P", "properties": {"id": INT}, "required": ["id", "name"]},
        '{"city":"Rome","name":"Ada","id":7,"age":41}',
    ),
    "anyOf": (
        {"anyOf": [closed(PERSON) | {"required": ["city"]}, closed(NODE | {"properties": {"id": INT, "age": TEXT}})]},
        '{"age":"old","id":7}',
    ),
    "names that begin alike": (
        closed({"type": "object", "properties": {"a": INT, "ab": INT, "abc": INT}}),
        '{"abc":1,"a":2,"ab":3}',
    ),
    "names with signs": (
        {"type": "object", "properties": {'q"t': INT, "back\\": INT, "new\nline": INT, "é/": INT}},
        '{"é/":1,"new\\nline":2,"back\\\\":3,"q\\"t":4}',
    ),
    "more than a rule can count": (
        closed({"type": "object", "properties": MANY, "required": ["p40", "p80"]}),
        json.dumps({f"p{n}": n for n in (*reversed(range(40)), 40, *range(89, 80, -1), *range(41, 81))}).replace(
            " ", ""
        ),
    ),
}


@pytest.mark.parametrize("schema, wish", WISHES.values(), ids=WISHES)
def test_keys_that_are_not_required_come_where_the_model_wants_them(llm, schema, wish):
    jsonschema.validate(json.loads(wish), schema)
    assert answered(llm, wish, json=schema) == (wish, "stop")


@pytest.mark.parametrize("more", [by_night({}), {"additionalProperties": False}, {"additionalProperties": INT}])
def test_required_keys_come_in_the_schemas_order(llm, more):
    """As OpenAI's API promises. None is lost, whatever the model wants, and none is imitated."""
    schema = PERSON | {"required": ["city", "name"]} | more
    for wish in ('{"city":"Rome","name":"Ada"}', '{"age":4,"city":"x"}', '{"names":1}', '{"age_2":5}', "{}"):
        text, end = answered(llm, wish, '":},7', json=schema)
        value = json.loads(text)
        jsonschema.validate(value, schema)
        assert end == "stop" and [key for key in value if key != "age"][:2] == ["name", "city"], (wish, text)
        assert not any(key.startswith(("name", "age", "city")) for key in value.keys() - PERSON["properties"].keys())


def test_a_key_that_has_come(llm):
    """Where others may come it may, too: it ends. Where none may, it cannot begin."""
    schema = {"type": "object", "properties": {"a": INT, "b": INT}, "required": ["b"]}
    for wish in ('{"b":1,"b":2}', '{"b":1,"a":2,"a":3}', '{"b":1,"ab":"x"}', '{"a":2,"a":2,"b":3}'):
        assert answered(llm, wish, json=schema) == (wish, "stop")
    for wish in ('{"b":1,"b":2}', '{"b":1,"a":2,"a":3}', '{"b":1,"ab":"x"}'):
        text, end = answered(llm, wish, '"a:},7', json=closed(schema))
        assert end == "stop" and json.loads(text).keys() == {"a", "b"} and text.count('"') == 4


@pytest.mark.parametrize("is_open", [True, False])
def test_any_object_in_any_order(llm, is_open):
    """Texts of random values of random schemas: taken if they fit, the required keys in their order; else not."""
    rng, num_taken = random.Random(7), 0
    compiler = llm.engine.grammars
    for _ in range(120):
        names = rng.sample(["a", "b", "c", "d", "ab", "x"], rng.randrange(1, 6))
        required = [name for name in names if rng.random() < 0.4]
        schema = {"type": "object", "properties": dict.fromkeys(names, INT), "required": required}
        schema |= {} if is_open else {"additionalProperties": False}
        grammar = compiler.compile(StructuredOutputsParams(json=schema))
        for _ in range(6):
            keys = rng.sample(names, rng.randrange(len(names) + 1)) + ["z"] * (rng.random() < 0.2)
            value = dict.fromkeys(keys, 1)
            text = json.dumps(value)
            token_ids = llm.get_tokenizer().encode(text, add_special_tokens=False)
            is_taken = grammar.possible([], token_ids) == token_ids and grammar.is_complete(token_ids)
            order = [key for key in keys if key in required]
            fits = jsonschema.Draft202012Validator(schema).is_valid(value) and order == required
            assert is_taken == fits, (text, schema)
            num_taken += is_taken
    assert num_taken > 80


ESCAPED = [
    (PERSON, r'{"n\u0061me":5}'),
    (PERSON | {"required": ["age"]}, r'{"age":1,"\u0061ge":"no"}'),
    (PERSON | {"additionalProperties": INT}, r'{"\u006eame":5}'),
    ({"type": "object", "properties": {"a/b": INT, "\t": INT}}, r'{"a\/b":"no"}'),
    ({"type": "object", "properties": {"a/b": INT, "\t": INT}}, r'{"\u0009":"no"}'),
    ({"type": "object", "properties": {"é": INT}}, r'{"\u00e9":"no"}'),
    ({"type": "object", "properties": {'"': INT}}, r'{"\u0022":"no"}'),
    ({"type": "object", "patternProperties": {"^x": INT}}, r'{"\u0078":"no"}'),
    ({"type": "array", "items": {"anyOf": [PERSON, INT]}}, r'[{"\u0061ge":"no"}]'),
]


@pytest.mark.parametrize("schema, wish", ESCAPED)
def test_no_key_is_another_in_disguise(llm, schema, wish):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(json.loads(wish), schema)
    text, end = answered(llm, wish, '"x:}],7', json=schema)
    assert end == "stop" and text != wish
    jsonschema.validate(json.loads(text), schema)


def test_any_key_of_an_object_without_a_schema(llm):
    for wish in (r'{"\"a\\\n":1}', '{"é":{"":[]}}'):
        for kinds in (
            dict(json_object=True),
            dict(json={}),
            dict(json={"additionalProperties": True, "type": "object"}),
        ):
            assert answered(llm, wish, **kinds) == (wish, "stop")


@pytest.mark.parametrize("is_closed", [True, False])
def test_counted_keys(llm, is_closed):
    """Random schemas with required, optional and undeclared keys, and bounds that leave room for some or for none."""
    rng, taken = random.Random(11), Counter[int]()
    compiler = llm.engine.grammars
    for _ in range(150):
        names = rng.sample("abcdef", rng.randrange(5))
        required = [name for name in names if not is_closed or rng.random() < 0.3]
        schema = {"type": "object", "properties": dict.fromkeys(names, INT), "required": required}
        schema |= {"additionalProperties": False if is_closed else INT}
        schema |= {"minProperties": rng.randrange(4), "maxProperties": rng.randrange(5)}
        bounds = max(schema["minProperties"], len(required)), schema["maxProperties"]
        asked = StructuredOutputsParams(json=schema)
        if bounds[0] > min(bounds[1], len(names) if is_closed else 9):
            expect("no finite text fits it", compiler.compile, asked)
            continue
        grammar = compiler.compile(asked)
        for _ in range(8):
            optional = [name for name in names if name not in required and rng.random() < 0.5]
            rng.shuffle(optional)
            undeclared = ["y", "z"][: rng.randrange(3)] if not is_closed else []
            value = dict.fromkeys([*optional, *required, *undeclared], 1)
            token_ids = llm.get_tokenizer().encode(json.dumps(value), add_special_tokens=False)
            is_taken = grammar.possible([], token_ids) == token_ids and grammar.is_complete(token_ids)
            assert is_taken == jsonschema.Draft202012Validator(schema).is_valid(value), (value, schema)
            taken[len(value)] += is_taken
    assert all(taken[num] for num in range(5))


def test_numbers_of_keys_that_are_refused(llm):
    for more, text in (
        ({"minProperties": 1}, "beside optional properties need additionalProperties: false"),
        ({"maxProperties": "2"}, "maxProperties must be a whole number from 0, found '2'"),
        ({"minProperties": 0.5}, "minProperties must be a whole number from 0, found 0.5"),
        (closed({"maxProperties": 9, "properties": MANY}), "may have 64 optional properties"),
    ):
        asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=PERSON | more))
        expect(text, llm.generate, "x", asked)


@pytest.mark.nightly
def test_a_model_keeps_its_own_order(demo_checkpoint):
    demo = LLM(str(demo_checkpoint), max_model_len=512)
    question = 'Give me JSON like {"city": "Paris", "name": "Jean", "age": 30} for Tom, 12, from Rome.'
    for more in ({}, {"required": ["city"]}, {"additionalProperties": False}, {"additionalProperties": TEXT}):
        params = SamplingParams(
            temperature=0, max_tokens=80, structured_outputs=StructuredOutputsParams(json=PERSON | more)
        )
        [output] = demo.chat([{"role": "user", "content": question}], params, use_tqdm=False)
        assert [*json.loads(output.outputs[0].text)][:3] == ["city", "name", "age"], more


def test_references(llm):
    definitions = {"A": {"$anchor": "here", "type": "integer"}, "b c": {"$ref": "#here"}, "~/": {"type": "null"}}
    for name in ("#/$defs/A", "#here", "#/$defs/b%20c", "http://x.org/s#/$defs/A", "s#here", "#/properties/v"):
        schema = {"$id": "http://x.org/s", "$defs": definitions, "properties": {"v": INT}}
        found = answered(llm, '{"a":5,"v":6}', json=schema | {"properties": {"a": {"$ref": name}, "v": INT}})
        assert found == ('{"a":5,"v":6}', "stop"), name
    for name in ("#/$defs/nothing", "http://x.org/other", "#nowhere", "#/$defs/~0~1/type"):
        schema = {"$defs": definitions, "properties": {"a": {"$ref": name}}}
        asked = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
        expect("structured outputs: json cannot be used", llm.generate, "x", asked)
