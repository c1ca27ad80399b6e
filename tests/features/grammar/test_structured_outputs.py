"""Structured outputs: what is generated fits, and what can't fit is refused before any work. jsonschema judges."""

import json
import random
import string
import sys

import jsonschema
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.grammar.grammar import GrammarCompiler
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.worker.sampler import SamplingBatch, sample, uniform_noise
from tests.errors import expect
from tests.faults import plant, run_to_end
from tests.marks import by_night

EOS = [1]
COORDINATE = {"type": "integer", "minimum": -9999, "maximum": 9999}
POINT = {"type": "object", "properties": {"x": COORDINATE, "y": {"type": "boolean"}}, "required": ["x", "y"]}
POINT |= {"additionalProperties": False}


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint("llama")), dtype="float32", max_num_seqs=64)


def structured(max_tokens=64, *, seed=0, temperature=1.0, disable_any_whitespace=True, more=None, **kinds):
    outputs = StructuredOutputsParams(disable_any_whitespace=disable_any_whitespace, **kinds)
    given = dict(structured_outputs=outputs, max_tokens=max_tokens, seed=seed, temperature=temperature)
    return SamplingParams(**given | (more or {}))


def random_schema(rng: random.Random, depth: int = 0) -> dict:
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kinds += ["object", "array", "anyOf"] * (depth < 3)
    kind = rng.choice(kinds) if depth else rng.choice(["object", "array", "anyOf", "enum"])
    if kind == "string":
        return {"type": "string", "minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
    if kind in ("integer", "number"):
        low = rng.randrange(-50, 50)
        return {"type": kind, "minimum": low, "maximum": low + rng.randrange(200)}
    if kind == "enum":
        words = ["".join(rng.choices(string.ascii_letters + 'é"\\ \n😀', k=rng.randrange(6))) for _ in range(4)]
        return {"enum": [*dict.fromkeys(words), rng.randrange(100), None, True]}
    if kind == "const":
        return {"const": rng.choice([0, -1.5, "fixed", None, [1, 2], {"a": 1}])}
    if kind == "pattern":
        return {"type": "string", "pattern": rng.choice(["^[a-c]{2,4}$", r"^\d{3}-\d{2}$", "^(yes|no)$"])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randrange(1, 4))]}
    if kind == "array":
        num = rng.randrange(3)
        return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": num, "maxItems": num + 2}
    if kind == "object":
        names = rng.sample(["a", "name", "ö", "b c", 'd"e', "long_property_name"], rng.randrange(1, 5))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


def is_prefix_of_one_that_fits(compiler: GrammarCompiler, params: SamplingParams, token_ids: list[int], rng) -> bool:
    """Go on from these tokens, by chance but with a liking for what closes, until a text is complete; it must fit."""
    grammar, tokens = compiler.compile(params.structured_outputs), list(token_ids)
    bits = torch.zeros(10, dtype=torch.int32)
    closing = [compiler.tokenizer.convert_tokens_to_ids(c) for c in '"}],:0']
    while not grammar.is_complete(tokens) and len(tokens) < 2000:
        grammar.write_mask(tokens, bits.data_ptr(), bits.nbytes)
        words = bits.tolist()  # a number of a tensor costs microseconds
        allowed = [t for t in range(320) if words[t // 32] >> t % 32 & 1]
        if EOS[0] in allowed:
            break
        liked = [t for t in closing if t in allowed]
        tokens.append(rng.choice(liked if liked and rng.random() < 0.7 else allowed))
    jsonschema.validate(json.loads(compiler.tokenizer.decode(tokens)), params.structured_outputs.json)
    return True


@pytest.mark.parametrize("num_schemas", [90, by_night(500)])
def test_random_schemas(checkpoint, num_schemas):
    """Every answer that ends fits its schema, and one that is cut short is the beginning of one that does."""
    rng, num_finished, num_cut = random.Random(1), 0, 0
    for share, variant in enumerate(("llama", "qwen2", "qwen3")):
        llm = LLM(str(checkpoint(variant)), dtype="float32", max_num_seqs=64)
        schemas = [random_schema(rng) for _ in range(share, num_schemas, 3)]
        params = [
            structured(96, seed=i, temperature=rng.choice([0.0, 0.7, 3.0]), json=s) for i, s in enumerate(schemas)
        ]
        outputs = llm.generate([[rng.randrange(4, 300)] for _ in schemas], params, use_tqdm=False)
        for output, schema, asked in zip(outputs, schemas, params, strict=True):
            [completion] = output.outputs
            if completion.finish_reason == "stop":
                jsonschema.validate(json.loads(completion.text), schema)
                num_finished += 1
            else:
                assert is_prefix_of_one_that_fits(llm.engine.grammars, asked, completion.token_ids, rng)
                num_cut += 1
        llm.engine.scheduler.check_integrity()
    assert num_finished > 0.8 * num_schemas and num_cut >= num_schemas // 50


def test_every_kind(llm):
    def text(**kinds):
        disable = kinds.pop("disable_any_whitespace", True)
        [output] = llm.generate([[5]], structured(200, seed=4, disable_any_whitespace=disable, **kinds))
        assert output.outputs[0].finish_reason == "stop"
        return output.outputs[0].text

    assert text(choice=["red", "green", "é\n"]) in ("red", "green", "é\n")
    assert text(regex="[ab]{3}c").rstrip("c") in {a + b + c for a in "ab" for b in "ab" for c in "ab"}
    assert set(text(grammar='root ::= "x" | "x" root "y"')) <= {"x", "y"}
    assert set(text(grammar='start: "p" | "q"')) <= {"p", "q"}
    assert isinstance(json.loads(text(json_object=True, disable_any_whitespace=False)), dict)
    assert json.loads(text(json=json.dumps(POINT))).keys() == {"x", "y"}
    loose = {key: value for key, value in POINT.items() if key != "additionalProperties"}
    assert json.loads(text(json=loose, disable_additional_properties=True)).keys() == {"x", "y"}


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        ({}, "found none"),
        (dict(regex="a", choice=["a"]), "found regex and choice"),
        (dict(choice=[]), "choice must be a list of texts, none of them empty, found []"),
        (dict(choice=["a", 5]), "choice must be a list of texts"),
        (dict(regex=5), "regex must be a string, found 5"),
        (dict(jason={}), "StructuredOutputsParams has no argument 'jason' (found {}); did you mean 'json'?"),
        (dict(regex="a", structural_tag="x"), "found regex and structural_tag"),
        (dict(regex="a", reasoning=("", "")), "reasoning must be two texts"),
    ],
)
def test_bad_params(kinds, text):
    expect(text, StructuredOutputsParams, **kinds)


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (dict(json={"type": "objekt"}), "json cannot be used: Invalid type: objekt"),
        (dict(json="{"), "json cannot be used: it is not JSON"),
        (dict(json=5), "json cannot be used: a JSON schema is an object of at most 64 levels, found 5"),
        (dict(json={"type": "integer", "minimum": 3, "maximum": 2}), "json cannot be used: Unsatisfiable schema"),
        (dict(json={"type": "array", "uniqueItems": True}), 'json cannot be used: Unimplemented keys: ["uniqueItems"]'),
        (dict(regex="("), "regex cannot be used"),
        (dict(regex=r"[^\s\S]"), "regex cannot be used: no text fits it"),
        (dict(grammar="start: nope"), "grammar cannot be used"),
        (dict(grammar="(" * 100_000), "grammar cannot be used"),
    ],
)
def test_what_cannot_be_used_is_an_error_at_the_request(llm, kinds, text):
    expect(f"prompts[1]: structured outputs: {text}", llm.generate, [[5], [6]], [SamplingParams(), structured(**kinds)])
    assert not llm.engine.has_unfinished_requests() and llm.engine.scheduler.num_preemptions == 0


def test_a_schema_that_is_changed_after_its_first_use(llm):
    choice = ["red"]
    params = structured(choice=choice)
    assert llm.generate([[5]], params)[0].outputs[0].text == "red"
    choice[0] = "green"
    assert llm.generate([[5]], params)[0].outputs[0].text == "green"


def test_a_schema_too_deep(llm):
    schema: dict = {"type": "null"}
    for _ in range(100):
        schema = {"type": "array", "items": schema}
    expect("at most 64 levels", llm.generate, [[5]], structured(json=schema))


@pytest.mark.parametrize(
    ("kinds", "text"),
    [
        (dict(choice=["<|eos|>"]), "<|eos|>"),
        (dict(choice=["<|im_end|>x"]), "<|im_end|>x"),
        (dict(json={"const": "a<|im_end|>b"}), '"a<|im_end|>b"'),
        (dict(regex=r"<\|im_start\|>x"), "<|im_start|>x"),
        (dict(grammar='start: "<|bos|>"'), "<|bos|>"),
        (dict(choice=["\x7f"]), "\x7f"),
    ],
)
def test_texts_of_special_tokens_are_texts(llm, kinds, text):
    [output] = llm.generate([[5]], structured(60, **kinds))
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (text, "stop")


def test_only_schemas_are_closed(llm):
    data = {"properties": {"a": 1}}
    [output] = llm.generate([[5]], structured(60, json={"const": data}, disable_additional_properties=True))
    assert json.loads(output.outputs[0].text) == data


def test_a_grammar_that_is_given_up(llm, caplog):
    """Its answer is none, and says so; others go on."""
    params = [structured(300, regex="([ab]{1,1000}){1000}"), structured(40, regex="b")]
    given_up, other = llm.generate([[5], [6]], params)
    assert given_up.outputs[0].finish_reason == "error" and other.outputs[0].text == "b"
    assert "ends with an error: structured outputs: llguidance has given up: lexer error: too many" in caplog.text
    assert "grm_prefix" not in caplog.text, "llguidance's state says nothing to a reader"


FOREVER = [
    dict(grammar='start: A "a"\nA: /a*/'),
    dict(grammar='%llguidance {"no_forcing": false}\nstart: ("x" | "y") A "ab"\nA: /a+/'),
    dict(grammar='start: %json {"x-guidance": {"whitespace_pattern": "1*"}, "items": {"const": 1}, "minItems": 1}'),
    dict(grammar='root ::= head rule "-\\n"\nhead ::= "x" | "y"\nrule ::= "-"+ (head rule)?'),
    dict(json={"x-guidance": {"whitespace_pattern": "1*"}, "type": "array", "items": {"const": 1}, "minItems": 1}),
]
for part in ({"type": "regex", "pattern": "a*"}, {"type": "grammar", "grammar": "start: /a*/"}):
    form = {"type": "sequence", "elements": [part, {"type": "regex", "pattern": "a"}]}
    FOREVER.append(dict(structural_tag={"format": form}))


@pytest.mark.parametrize("kinds", FOREVER)
def test_a_lexeme_that_takes_what_has_to_follow(llm, kinds):
    """It cannot end; looking for what comes after it has an end, however long the text is."""
    [output] = llm.generate([[5]], structured(60, **kinds))
    assert output.outputs[0].finish_reason in ("length", "stop")


def test_without_llguidance(llm, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    expect('pip install "nanovllm[structured]"', llm.generate, [[5]], structured(regex="a"))


def test_probabilities_are_renormalised(llm):
    """The token chosen is the one that the same noise chooses from the allowed tokens' own softmax."""
    generator = torch.Generator().manual_seed(0)
    params = structured(regex="[a-z]{1,9}", temperature=0.8)
    grammar = llm.engine.grammars.compile(params.structured_outputs)
    bits = torch.zeros(10, dtype=torch.int32)
    grammar.write_mask([], bits.data_ptr(), bits.nbytes)
    allowed = torch.tensor([t for t in range(320) if int(bits[t // 32]) >> t % 32 & 1])
    assert 26 <= len(allowed) < 200
    for seed in range(200):
        logits = torch.randn(1, 320, generator=generator) * 3
        seq = Sequence([1], SamplingParams(temperature=0.8, seed=seed, logprobs=1))
        seq.parts["grammar"] = llm.engine.grammars.compile(params.structured_outputs)
        [token_id], [found] = sample(logits.clone(), SamplingBatch.from_sequences([seq]))
        shares = (logits[0, allowed].double() / 0.8).softmax(0).cumsum(0)
        assert token_id == allowed[int((shares <= uniform_noise(seq)).sum())]
        assert found.logprob == pytest.approx(float(logits[0, allowed].log_softmax(0)[allowed == token_id]), abs=1e-5)


def test_each_sample_has_its_own_state_and_preemption_changes_nothing(checkpoint):
    def texts(**options):
        llm = LLM(str(checkpoint("llama")), dtype="float32", **options)
        params = [structured(48, seed=i, json=POINT, more=dict(n=3)) for i in range(6)]
        params += [SamplingParams(max_tokens=40, ignore_eos=True, seed=9)] * 2  # rows without a grammar beside them
        outputs = llm.generate([[5 + i] for i in range(8)], params)
        return [[c.text for c in o.outputs] for o in outputs], llm

    expected, _ = texts()
    assert all(json.loads(text).keys() == {"x", "y"} for sample_texts in expected[:6] for text in sample_texts)
    assert len({text for sample_texts in expected[:6] for text in sample_texts}) > 6
    found, small = texts(max_model_len=64, num_gpu_blocks_override=16, block_size=8, max_num_batched_tokens=16)
    assert found == expected and small.engine.scheduler.num_preemptions > 0


def test_a_step_that_fails(llm, monkeypatch):
    """Its token is taken back, and so is the grammar's state, when the request goes on."""
    params = structured(48, seed=3, json=POINT)
    [expected] = llm.generate([[5]], params)
    fault = plant(monkeypatch, llm.engine, "update", [2, 5])
    llm.engine.add_request("x", [5], params)
    found = run_to_end(llm.engine, RuntimeError)["x"]
    assert found.outputs[0].text == expected.outputs[0].text and fault.num_calls > 6


def test_what_ends_an_answer(llm):
    def ended(more, **kinds):
        [output] = llm.generate([[5]], structured(more=more, **kinds))
        completion = output.outputs[0]
        return completion.text, completion.finish_reason, completion.stop_reason

    number = llm.get_tokenizer().convert_tokens_to_ids("7")
    assert ended({}, regex="77777") == ("77777", "stop", None)
    assert ended(dict(stop=["777"]), regex="77777") == ("", "stop", "777")
    assert ended(dict(stop=["777"], include_stop_str_in_output=True), regex="77777") == ("777", "stop", "777")
    assert ended(dict(stop=["777"], min_tokens=4), regex="77777") == ("77", "stop", "777")
    assert ended(dict(stop_token_ids=[number], min_tokens=2), regex="77777") == ("77", "stop", number)
    assert ended(dict(min_tokens=20), regex="77777") == ("77777", "stop", None), "a complete grammar ends before that"
    assert ended(dict(ignore_eos=True), regex="77777") == ("77777", "stop", None)
    assert ended(dict(max_tokens=3), regex="77777") == ("777", "length", None)
    # A grammar that could go on ends by EOS, and not before min_tokens.
    text, reason, _ = ended(dict(max_tokens=400, min_tokens=8), regex="7+")
    assert len(text) >= 8 and reason == "stop"
    assert ended(dict(bad_words=["77"]), regex="77777") == ("77777", "stop", None), "there is nothing else to choose"
