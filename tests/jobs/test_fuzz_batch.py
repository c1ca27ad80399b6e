"""Lines that somebody might send: whatever they hold, each gets one record, and the job never fails."""

import json
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanovllm import LLM
from nanovllm.checks.names import neutral_options
from nanovllm.config import EngineConfig
from nanovllm.jobs import run_batch
from nanovllm.serving.openai import openai_request
from nanovllm.serving.openai.answer import CHAT, COMPLETIONS
from nanovllm.serving.openai.openai_request import KNOWN_BY_URL
from tests.jobs.lines import FOX, USER
from tests.marks import by_night

HUGE = [10**k for k in (18, 19, 25, 39, 400, 4299)]
NUMBERS = [0, 1, 2, 3, 7, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, *HUGE, 0.5, 1.0, 1e-50, 1e-300, 5e-324, 1e38, 1e308]
TEXTS = ["", " ", "a", FOX, "\ud800", "\0", "\u2028", "[/foo]", "é" * 50, " " * 5000, "<|eos|><|im_end|>", "POST", CHAT]
NAMES = sorted({*KNOWN_BY_URL[CHAT], *KNOWN_BY_URL[COMPLETIONS], *neutral_options("body"), "frobnicate"})

numbers = st.sampled_from([*NUMBERS, *(-x for x in NUMBERS), math.inf, -math.inf, math.nan]) | st.integers(0, 400)
scalars = st.none() | st.booleans() | numbers | st.sampled_from(TEXTS) | st.text(max_size=5)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from([*NAMES, "role", "content"]), inner),
    max_leaves=6,
)
ids = st.integers(0, 320)  # 320 is one too many
prompts = st.sampled_from(TEXTS) | st.lists(ids, max_size=70) | st.lists(st.lists(ids, max_size=9), max_size=4) | values
messages = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": scalars}))
# Values that are near the border of what is right, so that many lines come as far as the sampler.
parameters = st.fixed_dictionaries(
    {},
    optional={
        "n": st.sampled_from([1, 2, 5, 17]),
        "temperature": numbers | st.floats(0, 2),
        "top_p": st.floats(0, 1),
        "top_k": numbers | st.integers(-1, 400),
        "min_p": st.floats(0, 1),
        "seed": numbers | st.integers(0, 2**40),
        "min_tokens": st.integers(0, 9),
        "stop": st.lists(st.sampled_from(["e", "a", " ", "\ud800", ""]), max_size=3),
        "stop_token_ids": st.lists(ids, max_size=3),
        "ignore_eos": st.booleans(),
        "repetition_penalty": st.floats(0, 1e308) | st.just(1.1),
        "presence_penalty": st.floats(-2, 2),
        "cache_salt": st.sampled_from(["s", "\ud800"]),
    },
)


@st.composite
def requests(draw) -> bytes:
    """A line that is right, and then some of what it holds is exchanged."""
    if draw(st.booleans()):
        url, body = CHAT, {"messages": draw(st.just(USER) | messages | values), "logprobs": draw(st.booleans())}
    else:
        url, body = COMPLETIONS, {"prompt": draw(prompts), "logprobs": draw(st.none() | st.integers(0, 21))}
    body |= {"max_tokens": draw(st.integers(9, 12))} | draw(parameters)
    if draw(st.integers(0, 4)) == 0:
        body |= draw(st.dictionaries(st.sampled_from(NAMES), values, max_size=2))
    custom_id = draw(st.text(max_size=2)) if draw(st.integers(0, 9)) == 0 else str(draw(st.integers(0, 10**9)))
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    if draw(st.integers(0, 9)) == 0:
        line |= draw(st.dictionaries(st.sampled_from([*line, "more"]), values, max_size=2))
    raw = json.dumps(line, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 9)) == 0:  # damaged on its way
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=3)) + raw[at + draw(st.integers(0, 3)) :]
    return raw


garbage = st.binary(max_size=20) | st.sampled_from([b"[" * 9999, b"1" * 5000, b'{"a":' * 9999, b"\xff\xfe"])
raw_lines = st.integers(0, 7).flatmap(lambda kind: requests() if kind else garbage)
inputs = st.lists(raw_lines, max_size=9).map(b"\n".join)


@pytest.fixture(scope="module")
def answered(checkpoint, tmp_path_factory):
    """Run a job on an input; gives its records. One engine serves all jobs, as it would serve one endless job."""
    folder, model = tmp_path_factory.mktemp("fuzz"), str(checkpoint())
    options = dict(model=model, block_size=4, num_gpu_blocks_override=60, max_model_len=64, max_num_seqs=8)
    llm, source, target = LLM(**options), folder / "in", folder / "out"

    def run(content: bytes) -> list[dict]:
        source.write_bytes(content)
        target.unlink(missing_ok=True)
        try:
            status = run_batch.run_batch(source, target, EngineConfig(**options), ("tiny",))
        except ValueError as error:
            assert "convert it" in str(error) and b"\0" in content[:64], "only a file in another encoding is refused"
            return []
        llm.engine.scheduler.check_integrity()
        assert not llm.engine.has_unfinished_requests()
        records = [json.loads(raw, parse_constant=pytest.fail) for raw in target.read_text("ascii").splitlines()]
        numbers = sorted(int(record["id"].rsplit("_", 1)[1]) for record in records)
        assert numbers == [i for i, raw in enumerate(content.split(b"\n"), start=1) if raw.strip()], "one record a line"
        for record in records:
            assert (record["response"] is None) != (record["error"] is None)
        assert status == any(record["error"] for record in records)
        return records

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_batch, "LLM", lambda **_: llm)
        patch.setattr("os.fsync", lambda fd: None)
        patch.setattr(openai_request, "MAX_SAMPLES", 16)
        yield run


check = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("num_inputs", [40, by_night(400)])
def test_any_input(answered, num_inputs):
    """Not all of it is refused at the door."""
    found = []

    @settings(check, max_examples=num_inputs)
    @given(inputs)
    def ask(content):
        found.extend(record["error"] is None for record in answered(content))

    ask()
    assert sum(found) > len(found) / 20


@pytest.mark.soak
@settings(check, max_examples=30_000, derandomize=False)
@given(inputs)
def test_any_input_for_an_hour(answered, content):
    answered(content)
