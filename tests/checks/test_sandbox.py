"""Whom the engine trusts: a script's own grammars and adapters run in its process, and a stranger's in another."""

import json
import subprocess
import sys
import textwrap

import pytest

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.checks import sandbox
from nanovllm.checks.sandbox import Sandbox
from nanovllm.features.grammar.notations import _as_lark
from nanovllm.features.grammar.schemas import _compiled
from nanovllm.features.grammar.trial import LIMITS, SCRIPT, TRIAL
from nanovllm.features.lora.adapter import MATCHER
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.serving.http.options import ServeOptions
from tests.checkpoints import SMALL
from tests.errors import expect
from tests.features.lora.adapters import make_adapter
from tests.servers import serving

USER = [{"role": "user", "content": "two gulls"}]
NAMES = {"type": "object", "patternProperties": {"^(a|b)$": {"type": "integer"}}, "additionalProperties": False}
ASKED = {
    "json": dict(json=NAMES),
    "regex": dict(regex="[a-z]{3}"),
    "choice": dict(choice=["red", "blue"]),
    "grammar": dict(grammar='root ::= "a" | "b"'),
}


@pytest.fixture(scope="module")
def adapter(checkpoint, tmp_path_factory):
    folder, options = tmp_path_factory.mktemp("adapter"), dict(target_modules=["q_proj"], r=4)
    return make_adapter(folder, checkpoint(), rank_pattern={"q_proj": 2}, **options)


def ask(llm, adapter):
    """In every way that may take long."""
    for kinds in ASKED.values():
        params = SamplingParams(max_tokens=9, structured_outputs=StructuredOutputsParams(**kinds))
        llm.chat(USER, params, use_tqdm=False, lora_request=LoRARequest("x", 1, str(adapter)))


def test_a_script_starts_no_process(checkpoint, adapter, monkeypatch):
    llm = LLM(str(checkpoint()), enable_lora=True, **SMALL)
    started = []
    monkeypatch.setattr(sandbox, "_guards", False)
    monkeypatch.setattr(Sandbox, "_start", lambda *args: started.append(args) or 1 / 0)
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **options: started.append(args) or 1 / 0)
    ask(llm, adapter)
    assert not started
    text = "structured outputs: grammar cannot be used: "
    for broken in ("root ::= (", 'start: "a" b', "\ud800"):
        expect(text, llm.generate, ["a"], SamplingParams(structured_outputs=StructuredOutputsParams(grammar=broken)))


def test_a_server_tries_all_that_it_is_sent(checkpoint, adapter, monkeypatch):
    asked = []
    for remembered in (_as_lark, _compiled):
        remembered.cache_clear()
    whole = Sandbox.ask
    monkeypatch.setattr(Sandbox, "ask", lambda self, *given: asked.append((self, given[0])) or whole(self, *given))
    options = ServeOptions(allow_runtime_lora_updating=True)
    with serving(checkpoint(), options, enable_lora=True) as server:
        loaded = {"lora_name": "x", "lora_path": str(adapter)}
        assert server.send("/v1/load_lora_adapter", json.dumps(loaded).encode())[0] == 200
        limits = [{"structured_outputs": kinds} for kinds in ASKED.values()] + [
            {"response_format": {"type": "json_object"}}
        ]
        for given in limits:
            body = {"messages": USER, "max_tokens": 9} | given
            assert server.send("/v1/chat/completions", json.dumps(body).encode())[0] == 200
        for path in ("/v1/chat/completions", "/tokenize"):
            body = {"messages": USER, "chat_template": "{{ 'x' * 2000000000 }}"}
            status, answer = server.send(path, json.dumps(body).encode())
            assert status == 400 and b"a request may not bring one" in answer
    kinds = [kind for box, kind in asked if box is TRIAL]
    assert kinds.count("compile") == len(ASKED) + 1 and {"schema", "convert"} < set(kinds)
    assert [box for box, _ in asked if box is not TRIAL] == [MATCHER]


@pytest.mark.nightly
def test_a_script_beside_a_file_with_a_name_of_the_standard_librarys(checkpoint, tmp_path, processes):
    """Python has imported its own types.py before it runs a script; a second process would find the script's."""
    (tmp_path / "types.py").write_text("raise ImportError('beside the script')\n")
    (tmp_path / "script.py").write_text(
        textwrap.dedent("""
            import sys
            from nanovllm import LLM, SamplingParams
            from nanovllm.sampling_params import StructuredOutputsParams

            llm = LLM(sys.argv[1], max_model_len=64)
            params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="red"))
            [output] = llm.chat([{"role": "user", "content": "two gulls"}], params, use_tqdm=False)
            print(output.outputs[0].text)
        """)
    )
    assert processes.run(str(tmp_path / "script.py"), str(checkpoint()))[:2] == (0, "red\n")


def test_the_process_does_not_see_what_lies_beside_a_script(tmp_path, monkeypatch):
    for name in sys.stdlib_module_names:
        (tmp_path / f"{name}.py").write_text("raise ImportError('beside the script')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    mine = Sandbox(SCRIPT, seconds=2, max_mb=32, packages=("llguidance", "nanovllm"))
    mine.ask("compile", 'start: "a"', LIMITS)
    sandbox.end(mine.process)


def test_what_an_answer_prints_is_no_reply(tmp_path, monkeypatch):
    """The reply to one question must not become that to the next: it may be another client's."""
    (tmp_path / "printing.py").write_text(
        textwrap.dedent("""
            import os

            print("at import")

            def answer(question):
                print("hello")
                os.system("echo from another program")
                return {1} if question == "a set" else question
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    mine = Sandbox("printing", seconds=2, max_mb=200)
    assert [mine.ask(question) for question in (1, None, "three")] == [1, None, "three"]
    with pytest.raises(ValueError, match="set is not JSON serializable"):
        mine.ask("a set")
    assert mine.ask(5) == 5
    sandbox.end(mine.process)
