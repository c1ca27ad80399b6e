"""What vLLM's server was recorded to answer (record_vllm.py), asked of this one; its flags; paths that are not here."""

import json
import re
from typing import Any

import pytest

import tests.compat.vllm_cases as cases
from nanovllm.compat.neutral import ANY, NEUTRAL
from nanovllm.tools.cli import SERVE, main
from nanovllm.tools.flags import flag_of
from tests.compat.recorded import RECORDED
from tests.marks import by_night
from tests.servers import serving


@pytest.fixture(scope="module")
def server(demo_in_float32):
    engine = dict(block_size=32, max_model_len=512, num_gpu_blocks_override=64, max_num_seqs=4)
    with serving(demo_in_float32, names=("demo",), **engine) as running:
        yield running


def ask(server, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    status, raw = server.send(path, json.dumps(body).encode())
    if not raw.startswith(b"data: "):
        return status, cases.slim(json.loads(raw)) if status == 200 else None
    chunks = [cases.slim(json.loads(line[6:])) for line in raw.splitlines() if line.startswith(b"data: {")]
    return status, cases.whole(chunks)


def comparable(answer: Any, body: dict[str, Any]) -> Any:
    """Without what is known to be another: see "Known differences" in examples/move_to_vllm.md."""
    if not isinstance(answer, dict):
        return answer
    if body.get("max_tokens") == 0:
        answer.pop("usage", None)  # vLLM counts the token that it does not show
    for choice in [answer, *answer.get("choices", ())]:
        for name, asked in (("prompt_logprobs", "prompt_logprobs"), ("prompt_token_ids", "return_token_ids")):
            if not body.get(asked):  # an echo makes vLLM show them, too
                choice.pop(name, None)
        if body.get("return_tokens_as_token_ids"):
            choice.get("logprobs", {}).pop("text_offset", None)  # vLLM counts the characters of "token_id:17"
    return answer


def close(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[name], b[name]) for name in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(close, a, b))
    if isinstance(a, float) or isinstance(b, float):
        return a == pytest.approx(b, abs=2e-3)
    return a == b


STREAMED = [f"{name}, streamed" for name in ("echo, logprobs 2", "logprobs 2", "two prompts", "return_token_ids")]
BY_NIGHT = [name for name in cases.SERVER if name.endswith(", streamed") and name not in STREAMED]


@pytest.mark.parametrize("name", [by_night(name) if name in BY_NIGHT else name for name in cases.SERVER])
def test_answers(server, name):
    path, body = cases.SERVER[name]
    (status, expected), (found_status, found) = RECORDED["server"][name], ask(server, path, body)
    assert found_status == status
    if status == 200:
        found, expected = (comparable(answer, body) for answer in (found, expected))
        assert close(found, expected), f"{json.dumps(found)}\n{json.dumps(expected)}"


def neutral_flags() -> list[str]:
    """vLLM's flags that ask for nothing here, each at its neutral values."""
    given: list[str] = []
    for name, neutral in NEUTRAL[SERVE].items():
        flag = name.replace("_", "-")
        for value in neutral:
            if isinstance(value, bool):
                given.append(f"--{flag}" if value else f"--no-{flag}")
            elif value not in (None, ""):
                given += [f"--{flag}", "17" if value is ANY else value if isinstance(value, str) else json.dumps(value)]
    return given


def test_flags(capsys, tmp_path):
    """All of vLLM's are taken at values that change nothing; at others the one error says what was found."""
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    ours = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    for name in f"{RECORDED['names']['LLM']} {RECORDED['names'][SERVE]}".split():
        assert flag_of(name) in ours or name in NEUTRAL[SERVE] or name == "model", name
    missing = str(tmp_path / "no model")
    for words in (
        [missing, *neutral_flags()],
        [*neutral_flags(), "--disable-fastapi-docs", missing],
        ["-tp", "1", "-pp", "1", "-dp", "1", missing],
        ["--model", missing],
    ):
        assert main(["serve", *words]) == 2
        assert "no model" in capsys.readouterr().err, "all were taken, and then the model was looked for"
    for words, reason in (
        (["--skip_tokenizer_init"], "nanovllm serve takes 'skip_tokenizer_init' only as False (found True)"),
        (["--no-enable-mm-embeds", "--mm-encoder-only"], "takes 'mm_encoder_only' only as False (found True)"),
        (["--pipeline-parallel-size=2"], "(found 2); did you mean 'tensor_parallel_size'? examples/move_to_vllm.md"),
        (["-dp", "2"], "takes 'data_parallel_size' only as 1 (found 2)"),
        (["--middleware", "a.b", "c.d"], "takes 'middleware' only as [] (found ['a.b', 'c.d'])"),
        (["--chat-template-content-format", "xml"], "must be one of auto, string, openai"),
        (["--chat-template", "none.jinja"], "'none.jinja' is neither a template's file nor a template"),
        (["--chat-template", "{% if %}"], "'{% if %}' is no template: Expected an expression"),
    ):
        assert main(["serve", missing, *words]) == 2
        assert reason in capsys.readouterr().err


def test_a_path_that_is_not_here(server):
    for path, message in (
        ("/v1/embeddings", "there is no /v1/embeddings here; a server that was started with --runner pooling has it"),
        ("/tokenizer_info", "started with --enable-tokenizer-info-endpoint has it"),
        (
            "/v1/messages",
            "there is no '/v1/messages' here; did you mean /v1/responses? nanovllm/serving/README.md says",
        ),
        ("/sleep", "there is no '/sleep' here. nanovllm/serving/README.md says which paths there are"),
    ):
        status, raw = server.send(path, b"{}")
        assert status == 404 and message in json.loads(raw)["error"]["message"]
