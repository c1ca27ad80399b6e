"""A request that makes steps fail, among others: it alone is answered by 500, and the others by what they asked for."""

import asyncio
import itertools
import json
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.serving.http.options import ServeOptions
from nanovllm.serving.suspects import MAX_FAILED_STEPS
from tests.checkpoints import SMALL
from tests.marks import by_night
from tests.servers import PATIENCE_S, Running, serving

COMPLETIONS = "/v1/completions"
POISON, OTHER_POISON = [77, 5], [78, 5]  # prompts
GOOD = [[5, 6, 7, 8], [40, 41, 42], list(range(20, 60)), [5, 6, 7, 9, 9, 9, 9, 9], [200, 201], [9], [30, 31, 32]]
Wrong = Callable[[list[Sequence]], bool]  # is it with the sequences of a step?


@pytest.fixture(scope="module")
def server(checkpoint):
    with serving(checkpoint(), ServeOptions(), max_num_batched_tokens=16, max_num_seqs=8) as running:
        yield running


@pytest.fixture(scope="module")
def expected(checkpoint) -> Callable[[list[int]], list[str]]:
    llm, params = LLM(str(checkpoint()), **SMALL), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return lambda prompt: [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].text]


def body(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | more).encode()


def texts_of(raw: bytes) -> list[str]:
    """Of a whole answer, or of a stream."""
    if not raw.startswith(b"data: "):
        return [choice["text"] for choice in json.loads(raw)["choices"]]
    chunks = [json.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    return ["".join(chunk["choices"][0]["text"] for chunk in chunks)]


def fail_if(server: Running, monkeypatch: pytest.MonkeyPatch, where: str, wrong: Wrong) -> list[int]:
    """Let steps fail. Returns a list, to which each that has failed adds how many chunks it had."""
    owner, name = (server.engine.model_runner, "run") if where == "run" else (server.engine, where)
    whole, failures = getattr(owner, name), list[int]()

    def failing(output: Any, *more: Any) -> Any:
        result = whole(output, *more)
        if wrong([chunk.seq for chunk in output.chunks]):
            failures.append(len(output.chunks))
            raise ArithmeticError("planted")
        return result

    monkeypatch.setattr(owner, name, failing)
    return failures


def ask_all(server: Running, bodies: list[bytes], begun: Callable[[], None] = lambda: None) -> list[tuple[int, bytes]]:
    """(status, answer) of each. All have come before the first step. begun: called when the first has an answer."""
    with ThreadPoolExecutor(len(bodies)) as pool:
        server.llm.thread.set_pace(0)
        answers: list[Future] = []
        for each in bodies:
            called = begun if each is bodies[0] else lambda: None
            answers.append(pool.submit(server.exchange, COMPLETIONS, each, begun=called))
            server.until(lambda: len({r.request_id.rpartition("-")[0] for r in waiting(server)}) == len(answers))
        server.llm.thread.set_pace()
        return [answer.result(PATIENCE_S)[:2] for answer in answers]


def waiting(server: Running) -> list[Any]:
    return list(server.engine.requests.values())


def has(prompt: list[int]) -> Wrong:
    return lambda seqs: any(seq.tokens[0] == prompt[0] for seq in seqs)


def with_fifth_token(seqs: list[Sequence]) -> bool:
    return any(seq.tokens[0] == POISON[0] and len(seq.tokens) >= len(POISON) + 5 for seq in seqs)


def within_prompt(seqs: list[Sequence]) -> bool:
    return any(seq.tokens[0] == POISON[0] and 16 < seq.num_computed_tokens < seq.num_prompt_tokens for seq in seqs)


WRONG: dict[str, tuple[list[int], Wrong]] = {
    "always": (POISON, has(POISON)),
    "with its fifth token": (POISON, with_fifth_token),
    "in the middle of a prompt": (POISON + list(range(60)), within_prompt),
}


CASES = list(itertools.product(WRONG, ["run", "update"]))
PLACES = [0, 3, len(GOOD)]  # where it is among the others
BY_DAY = {(*case, place) for case, place in zip(CASES, itertools.cycle(PLACES), strict=False)}


@pytest.mark.parametrize(
    ("name", "where", "place"),
    [
        each if each in BY_DAY else by_night(*each)
        for each in ((*case, place) for case, place in itertools.product(CASES, PLACES))
    ],
)
def test_a_poisoned_request(name, where, place, server, expected, monkeypatch):
    bad, wrong = WRONG[name]
    failures = fail_if(server, monkeypatch, where, wrong)
    good = [body(prompt, stream=number % 2 == 0) for number, prompt in enumerate(GOOD)]
    answers = ask_all(server, [*good[:place], body(bad), *good[place:], body(GOOD[0], cache_salt="x")])
    status, raw = answers.pop(place)
    assert status == 500 and json.loads(raw)["error"]["code"] == "step_failed" and b"planted" in raw
    for prompt, (status, raw) in zip([*GOOD, GOOD[0]], answers, strict=True):
        assert status == 200 and texts_of(raw) == expected(prompt)
    server.assert_at_rest()
    assert len(failures) <= 5


def test_a_request_that_fails_in_its_later_steps(server, expected, monkeypatch):
    """The step that computes its prompt anew passes, each time."""

    runner, failures = server.engine.model_runner, list[SchedulerOutput]()
    whole = runner.run

    def run(output: SchedulerOutput) -> Any:
        if any(chunk.seq.tokens[0] == POISON[0] and chunk.end - chunk.start == 1 for chunk in output.chunks):
            failures.append(output)
            raise ArithmeticError("planted")
        return whole(output)

    monkeypatch.setattr(runner, "run", run)
    (status, raw), *others = ask_all(server, [body(POISON, max_tokens=100), *map(body, GOOD)])
    assert status == 500 and b"planted" in raw and len(failures) <= 5
    assert [texts_of(raw) for _, raw in others] == [expected(prompt) for prompt in GOOD]


def test_a_stream_that_has_begun(server, expected, monkeypatch):
    """It ends with an error, and its neighbours' streams go on where they were."""
    begun = Event()
    fail_if(server, monkeypatch, "run", lambda seqs: with_fifth_token(seqs) and begun.wait(PATIENCE_S))
    bodies = [body(prompt, stream=True) for prompt in [POISON, *GOOD]]
    (status, raw), *others = ask_all(server, bodies, begun.set)
    assert status == 200 and b"planted" in raw and raw.endswith(b"data: [DONE]\n\n")
    assert [texts_of(raw) for _, raw in others] == [expected(prompt) for prompt in GOOD]


def test_several_culprits_samples_and_prompts(server, expected, monkeypatch):
    """A body with several prompts is one request of its client: it fails as a whole."""
    fail_if(server, monkeypatch, "run", lambda seqs: has(POISON)(seqs) or has(OTHER_POISON)(seqs))
    bad = [body(POISON, n=2), body([GOOD[0], OTHER_POISON])]
    answers = ask_all(server, [*map(body, GOOD[:3]), *bad, body(GOOD[3], n=2, temperature=0)])
    assert [status for status, _ in answers] == [200] * 3 + [500] * 2 + [200]
    assert [texts_of(raw) for _, raw in answers[:3]] == [expected(prompt) for prompt in GOOD[:3]]
    assert texts_of(answers[-1][1]) == expected(GOOD[3]) * 2


def test_two_that_cannot_run_together(server, expected, monkeypatch):
    """Neither fails alone: both get their answers by steps of their own. That does not go on for ever."""
    failures = fail_if(server, monkeypatch, "run", lambda seqs: has(POISON)(seqs) and has(OTHER_POISON)(seqs))
    pair = [POISON, OTHER_POISON]
    answers = ask_all(server, [body(prompt) for prompt in [*pair, *GOOD]])
    assert [texts_of(raw) for _, raw in answers] == [expected(prompt) for prompt in [*pair, *GOOD]]
    assert 0 < len(failures) <= 2 * 12
    failures.clear()
    answers = ask_all(server, [body(prompt, max_tokens=100) for prompt in pair])
    assert 500 in [status for status, _ in answers] and len(failures) == MAX_FAILED_STEPS + 1


def test_an_engine_that_fails_whatever_it_is_asked(server, expected, monkeypatch):
    """Everybody is told, soon. Once it is over, the server answers again."""
    with monkeypatch.context() as patch:
        failures = fail_if(server, patch, "run", lambda seqs: True)
        answers = ask_all(server, [body(prompt) for prompt in GOOD])
        assert [status for status, _ in answers] == [500] * len(GOOD) and len(failures) < 2 * len(GOOD)
    status, raw = server.send(COMPLETIONS, body(GOOD[0]))
    assert status == 200 and texts_of(raw) == expected(GOOD[0])


def test_who_comes_and_goes_meanwhile(server, expected, monkeypatch):
    """Suspects may be aborted while others are tried. A newcomer waits until the trials are over."""
    fail_if(server, monkeypatch, "run", has(POISON))
    with ThreadPoolExecutor(8) as pool:
        server.llm.thread.set_pace(0)
        four = [POISON, *GOOD[:2], GOOD[4]]  # in whatever order they come, one step has room for all
        answers = [pool.submit(server.send, COMPLETIONS, body(prompt)) for prompt in four]
        server.until(lambda: len(waiting(server)) == 4)
        server.llm.thread.set_pace(1)  # it fails
        server.until(lambda: server.llm.thread.suspects.groups)
        late = pool.submit(server.send, COMPLETIONS, body(GOOD[5]))
        server.until(lambda: len(waiting(server)) == 5)
        ids = [request.request_id for group in server.llm.thread.suspects.groups for request in group]
        server.llm.thread.set_pace(1)
        server.until(lambda: server.llm.thread.steps_left == 0)
        assert server.engine.scheduler.only is not None and late.running()
        asyncio.run_coroutine_threadsafe(server.llm.abort(ids), server.llm.thread.loop).result(PATIENCE_S)
        server.llm.thread.set_pace()
        assert texts_of(late.result(PATIENCE_S)[1]) == expected(GOOD[5])
        assert {answer.result(PATIENCE_S)[0] for answer in answers} <= {200, 500}
    assert server.engine.scheduler.only is None


def test_embeddings(checkpoint, monkeypatch):
    with serving(checkpoint(), ServeOptions(), runner="pooling") as server, ThreadPoolExecutor(8) as pool:

        def ask(prompt: list[int]) -> tuple[int, Any]:
            status, raw = server.send("/v1/embeddings", json.dumps({"input": prompt}).encode())
            return status, json.loads(raw).get("data")

        expected = [ask(prompt) for prompt in GOOD]
        fail_if(server, monkeypatch, "run", has(POISON))
        server.llm.thread.set_pace(0)
        answers = [pool.submit(ask, prompt) for prompt in [*GOOD, POISON]]
        server.until(lambda: len(waiting(server)) == len(answers))
        server.llm.thread.set_pace()
        assert [answer.result(PATIENCE_S) for answer in answers] == [*expected, (500, None)]
