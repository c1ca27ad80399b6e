"""What a stranger's grammar may cost: it is tried where it can be ended, and nobody without one waits for that."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.checks import sandbox
from nanovllm.checks.sandbox import Sandbox, TooMuch
from nanovllm.features.grammar import grammar as structured_outputs
from nanovllm.features.grammar import parts, schemas
from nanovllm.features.grammar.trial import LIMITS, SCRIPT, TRIAL
from nanovllm.sampling_params import StructuredOutputsParams
from nanovllm.serving.async_llm import NUM_PREPARING_THREADS, AsyncLLM
from tests.processes import LIMIT_S
from tests.servers import serving


def many_words(number: int) -> list[str]:
    return [f"word {i * 7919 % 1000003}" for i in range(number)]


GIANTS = {  # made when they are needed
    "json": lambda: {"type": "integer", "multipleOf": 20000003},
    "regex": lambda: "|".join(many_words(50_000)),
    "grammar": lambda: f"start: /{'|'.join(many_words(50_000))}/",
    "choice": lambda: many_words(100_000),
}


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(str(checkpoint()), dtype="float32", max_num_seqs=64)


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint()) as running:
        yield running


@pytest.fixture
def guards(monkeypatch):
    """As in a server."""
    monkeypatch.setattr(sandbox, "_guards", True)


@pytest.fixture
def mine():
    """A process that answers questions about grammars, and no other test's."""
    fresh = Sandbox(SCRIPT, seconds=2, max_mb=32, packages=("llguidance", "nanovllm"))
    yield fresh
    if fresh.process is not None:
        sandbox.end(fresh.process)


def asked(**kinds) -> SamplingParams:
    return SamplingParams(max_tokens=30, seed=1, structured_outputs=StructuredOutputsParams(**kinds))


def compile_there(source: str) -> None:
    TRIAL.ask("compile", source, LIMITS)


def memory_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.parametrize("kind", GIANTS)
def test_a_strangers_giant_is_refused(server, kind):
    giant = {kind: GIANTS[kind]()}
    compile_there('start: "a"')
    before, used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    given = dict(prompt="a", max_tokens=30, structured_outputs=giant)
    status, body = server.send("/v1/completions", json.dumps(given).encode())
    message = json.loads(body)["error"]["message"]
    limits = "to compile it takes more than 2 s of a processor or 32 MB"
    assert status == 400 and f"structured outputs: {kind} cannot be used: {limits}" in message
    assert time.process_time() - used < 2
    if sys.platform == "linux":  # ru_maxrss is in KiB
        assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 100
        assert memory_mb(TRIAL.process.pid) < 100, "it is as it was: a child of its own has paid"


@pytest.mark.parametrize("kind", ["structural_tag", "grammar"])
def test_many_schemas_have_the_bound_of_one(llm, guards, monkeypatch, kind):
    """Each of them is far below it."""
    asked_of: Counter[str] = Counter()
    answer, seconds = TRIAL.answer, 0.0

    def answered(*question: Any) -> tuple[str, float]:
        asked_of.update([question[1]])
        return answer(*question)[0], seconds

    monkeypatch.setattr(TRIAL, "answer", answered)

    def compiled(number: int) -> None:
        given = [{"type": "integer", "minimum": least, "maximum": 10**6 + number} for least in range(number)]
        formats = [{"type": "json_schema", "json_schema": schema} for schema in given]
        one_of = " | ".join(f"%json {json.dumps(schema)}" for schema in given)
        forms = {"structural_tag": {"format": {"type": "or", "elements": formats}}, "grammar": f"start: {one_of}"}
        llm.engine.grammars.compile(StructuredOutputsParams(**{kind: forms[kind]}))

    compiled(80)  # more than are remembered
    assert len(asked_of) > 80 and set(asked_of.values()) == {1}
    asked_of.clear()
    seconds = 0.15
    with pytest.raises(ValueError, match="to compile it takes more than 2 s of a processor"):
        compiled(81)
    assert len(asked_of) == 14


def test_references_do_not_multiply_the_work(monkeypatch):
    """Each of them means the whole schema."""
    asked_of: Counter[int] = Counter()
    children = parts.children
    for module in (parts, schemas):
        monkeypatch.setattr(module, "children", lambda part: asked_of.update([id(part)]) or children(part))
    properties = {f"p{n}": {"$ref": f"#/nothing/{n}"} for n in range(300)}
    assert schemas.checked_schema({"properties": properties}) == {"properties": properties}
    assert len(asked_of) == 302 and max(asked_of.values()) == 2


def test_a_big_choice(llm):
    """2,000 alternatives are llguidance's limit for rules; a lexeme may have more."""
    texts = [f"{i * 7919 % 1000003}." for i in range(10_000)]
    assert llm.generate([[5]], asked(choice=texts))[0].outputs[0].text in texts


def test_time_bounds_where_memory_does_not(monkeypatch):
    """As on macOS; and from outside, where the system ends nothing."""
    source = 'start: %json {"type": "integer", "multipleOf": 20000003}'
    for seconds, wait_s in ((0.2, 60.0), (60.0, 0.5)):
        monkeypatch.setattr(sandbox, "WAIT_S", wait_s)
        patient = Sandbox(SCRIPT, seconds=seconds, max_mb=1 << 20, packages=("llguidance", "nanovllm"))
        with pytest.raises(TooMuch, match=f"takes more than {seconds:g} s"):
            patient.ask("compile", source, LIMITS)
        if patient.process is not None:
            sandbox.end(patient.process)


def test_a_process_that_was_ended_is_started_again(llm, guards):
    compile_there('start: "a"')
    os.killpg(TRIAL.process.pid, signal.SIGKILL)
    TRIAL.process.wait()
    assert llm.generate([[5]], asked(choice=["green"]))[0].outputs[0].text == "green"


def test_a_process_that_does_not_start_is_no_giant(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "script.py").write_text("import no_such_package\n")
    with pytest.raises(RuntimeError, match=r"the process of script has ended by itself: 1"):
        Sandbox("script", seconds=2, max_mb=32).ask("?")


def test_what_interrupts_an_answer_leaves_none_behind(mine, monkeypatch):
    """Ctrl-C while a grammar is tried: the next one must not get the answer that was meant for it."""
    answer = sandbox._exchange

    def interrupted(*args):
        answer(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "_exchange", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mine.ask("compile", "broken", LIMITS)
    monkeypatch.setattr(sandbox, "_exchange", answer)
    mine.ask("compile", 'start: "a"', LIMITS)


def test_it_ends_with_its_parent():
    """Of a script that is read from stdin, without a __main__ guard. It has the script's stderr: run() waits for it."""
    script = """
import os, signal
from nanovllm.features.grammar.trial import LIMITS, TRIAL
TRIAL.ask("compile", 'start: "a"', LIMITS)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


def test_masks_that_take_long_end_their_own_answer(llm, monkeypatch, caplog):
    ordinary = SamplingParams(max_tokens=8, ignore_eos=True)
    monkeypatch.setattr(structured_outputs, "FREE_S", 0.0)
    monkeypatch.setattr(structured_outputs, "MASK_S", 0.0)
    slow, other = llm.generate([[5], [6]], [asked(regex="[a-z]{20}"), ordinary])
    assert slow.outputs[0].finish_reason == "error" and len(slow.outputs[0].token_ids) == 1
    assert len(other.outputs[0].token_ids) == 8
    assert "llguidance has given up: its masks have taken" in caplog.text


def test_a_lexer_that_is_exhausted_is_not_used_again(llm, monkeypatch):
    """Copies of a matcher share it, errors included: another request with the same grammar begins anew."""
    monkeypatch.setattr(structured_outputs, "LIMITS", {"max_lexer_states": 60})
    first, second = (llm.generate([[5]], asked(regex="[ab]*a[ab]{30}"))[0].outputs[0] for _ in range(2))
    assert first.finish_reason == second.finish_reason == "error"
    assert first.token_ids == second.token_ids and len(first.token_ids) > 2


def test_samples_share_the_work(llm, monkeypatch):
    calls, compile = [], llm.engine.grammars.compile
    monkeypatch.setattr(llm.engine.grammars, "compile", lambda params: calls.append(params) or compile(params))
    params = SamplingParams(n=5, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="[a-z]{9}"))
    [output] = llm.generate([[5]], params)
    assert len(calls) == 1 and all(len(sample.text) == 9 for sample in output.outputs)
    assert len({sample.text for sample in output.outputs}) > 1, "each has a state of its own"


def test_who_has_no_grammar_does_not_wait_for_any(checkpoint, monkeypatch):
    """More giants than threads that prepare are being compiled; whoever came after them is answered."""
    may_end, num_giants = threading.Event(), 2 * NUM_PREPARING_THREADS

    async def last(stream):
        return [output async for output in stream][-1]

    async def run(llm):
        compile = llm.engine.grammars.compile
        monkeypatch.setattr(llm.engine.grammars, "compile", lambda params: may_end.wait() and compile(params))
        giants = [asyncio.create_task(last(llm.generate([5], asked(choice=[str(i)])))) for i in range(num_giants)]
        given_up = asyncio.create_task(last(llm.generate([5], asked(choice=["x"]))))
        with pytest.raises(TimeoutError):
            await last(llm.generate([5], asked(choice=["too late"]), timeout_s=0.05))
        given_up.cancel()
        for _ in range(20):
            assert (await last(llm.generate([6], SamplingParams(max_tokens=4)))).finished
        assert not any(giant.done() for giant in giants)
        may_end.set()
        assert [(await giant).outputs[0].text for giant in giants] == [str(i) for i in range(num_giants)]

    with AsyncLLM(str(checkpoint()), max_model_len=64) as llm:
        try:
            asyncio.run(asyncio.wait_for(run(llm), 60))
        finally:
            may_end.set()


def test_an_answer_of_the_process_is_one_line():
    """Whatever a grammar contains, and whatever its error says."""
    for text in ('start: "\n"', "start: \u2028", "\ud800", 'start: /\\x/ | "\x00"', json.dumps({"grammars": []})):
        with pytest.raises(ValueError):
            compile_there(text)
    compile_there('start: "a"')
