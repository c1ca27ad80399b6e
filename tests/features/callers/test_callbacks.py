"""A caller's code inside a step: what it asks for is answered or refused in words, and what it raises harms nobody."""

import asyncio
import logging
import signal
import threading
import time

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.serving.async_llm import AsyncLLM
from tests.checkpoints import SMALL
from tests.errors import expect
from tests.faults import plant
from tests.processes import LIMIT_S

PROMPT = [5, 6, 7, 8, 9]
TELLS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}


def params(**options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **options)


@pytest.fixture(scope="module")
def shared(checkpoint):
    return LLM(str(checkpoint()), **SMALL, **TELLS)


@pytest.fixture
def llm(shared):
    yield shared
    shared.engine.on_step = shared.on_kv_events = None
    assert not shared.engine.requests
    shared.engine.scheduler.check_integrity()
    assert shared.reset_prefix_cache()


def in_time(function):
    """What it returns. A call that waits for itself fails the test, and does not hang it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it waits for itself"
    return found[0]


CALLS = {
    "stats": lambda llm: llm.stats()["num_running"],
    "get_metrics": lambda llm: llm.get_metrics(),
    "abort": lambda llm: llm.abort("no such request"),
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(),
    "generate": lambda llm: llm.generate([PROMPT], params(), use_tqdm=False),
    "stream": lambda llm: [*llm.stream(PROMPT, params())],
    "enqueue": lambda llm: llm.enqueue([PROMPT], params()),
    "engine.step": lambda llm: llm.engine.step(),
    "engine.add_request": lambda llm: llm.engine.add_request(None, PROMPT, params()),
    "engine.reset_prefix_cache": lambda llm: llm.engine.reset_prefix_cache(reset_running_requests=True),
}
ANSWERED = ("stats", "get_metrics", "abort")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("place", ["logits processor", "on_step", "on_kv_events"])
def test_what_a_callback_asks_for(llm, place, name, caplog):
    expected = llm.generate([PROMPT], params(), use_tqdm=False)[0].outputs[0].token_ids
    answers, errors = [], []

    def ask(*news):
        try:
            answers.append(CALLS[name](llm))
        except RuntimeError as error:
            errors.append(str(error))
            raise
        finally:
            llm.engine.on_step = llm.on_kv_events = None
        return news[-1]

    assert llm.reset_prefix_cache()
    options = {}
    if place == "logits processor":
        options["logits_processors"] = [lambda generated, row: ask(row) if len(generated) == 3 else row]
    elif place == "on_step":
        llm.engine.on_step = ask
    else:
        llm.on_kv_events = ask
    [output] = in_time(lambda: llm.generate([PROMPT], params(**options), use_tqdm=False))
    assert len(answers) == (name in ANSWERED) and len(errors) == (name not in ANSWERED)
    if errors:
        assert "in the middle of a step" in errors[0] and "stats() and abort()" in caplog.text
    if place != "logits processor" or answers:
        assert output.outputs[0].token_ids == expected
    else:
        assert output.outputs[0].finish_reason == "error"


@pytest.mark.parametrize("observers", [("on_step",), ("on_kv_events",), ("on_step", "on_kv_events")])
def test_what_an_observer_raises_takes_no_tokens_back(llm, observers, caplog):
    expected = llm.generate([PROMPT], params(n=2), use_tqdm=False)[0].outputs
    before = llm.stats()["num_steps"]
    assert llm.reset_prefix_cache()

    def fail(*news):
        raise ValueError("planted")

    for name in observers:
        setattr(llm.engine, name, fail)
    assert llm.generate([PROMPT], params(n=2), use_tqdm=False)[0].outputs == expected
    assert llm.stats()["num_steps"] - before == 8
    assert "planted" in caplog.text and "the step stays made" in caplog.text


def test_ctrl_c_in_an_observer_reaches_the_caller(llm):
    def interrupt(*news):
        llm.engine.on_step = None
        raise KeyboardInterrupt

    llm.engine.on_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], params(), use_tqdm=False)


def test_a_request_is_ended_from_within_its_step(llm):
    """By an observer that has seen enough; the others go on. Asked for twice, and for one that has just ended."""
    expected = [output.outputs[0].token_ids for output in llm.generate([PROMPT, [9] * 9], params(), use_tqdm=False)]

    def enough(output, progressed):
        for request in progressed:
            if request.samples[0].seq.num_generated_tokens == 3 and request.prompt_token_ids == PROMPT:
                llm.abort(request.request_id)
                llm.engine.abort_request([request.request_id])
            elif request.finished:
                llm.abort(request.request_id)

    llm.engine.on_step = enough
    first, second = llm.generate([PROMPT, [9] * 9], params(), use_tqdm=False)
    assert first.outputs[0].token_ids == expected[0][:3] and first.outputs[0].finish_reason == "abort"
    assert second.outputs[0].token_ids == expected[1] and second.outputs[0].finish_reason == "length"
    *_, last = llm.stream(PROMPT, params())
    assert last.finished and last.outputs[0].token_ids == expected[0][:3]


def test_an_abort_in_a_step_that_fails_is_not_lost(llm, monkeypatch):
    request_id = llm.engine.add_request(None, PROMPT, params())
    other = llm.engine.add_request(None, [9] * 9, params())
    llm.engine.on_step = lambda output, progressed: llm.abort(request_id)
    with monkeypatch.context() as patch:
        plant(patch, llm.engine.stats, "count_step", {1}, KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.engine.step()
    llm.engine.on_step = None
    assert llm.engine.step() and [*llm.engine.requests] == [other]
    llm.engine.abort_request(other)


def test_a_stream_that_is_collected_in_the_middle_of_a_step(llm):
    """Its request ends with the step: nobody waits, and nothing is half changed."""
    left = [llm.stream([1, 2, 3], params())]
    next(left[0])

    def collect(*news):
        left.clear()

    llm.engine.on_step = collect
    assert in_time(lambda: llm.generate([PROMPT], params(), use_tqdm=False))[0].finished
    assert not llm.engine.requests


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
def test_a_signal_handler_is_answered(llm):
    answers = []
    before = signal.signal(signal.SIGUSR1, lambda *args: answers.append(llm.stats()["num_running"]))
    try:
        llm.engine.on_step = lambda *news: signal.raise_signal(signal.SIGUSR1)
        llm.generate([PROMPT], params(), use_tqdm=False)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(answers) == 8 and answers[0] == 1


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no SIGUSR1")
def test_a_signal_handler_while_its_thread_waits_for_a_turn(llm):
    """It would wait for a turn that comes after its own thread's: an error, and no deadlock."""
    heard = []

    def ask(*args):
        try:
            heard.append(llm.stats())
        except RuntimeError as error:
            heard.append(str(error))

    before = signal.signal(signal.SIGUSR1, ask)
    main = threading.get_ident()
    waits = threading.Event()

    def step(*news):  # of another thread, which has the turn
        waits.set()
        while len(llm.turns.lock.queue) < 2:
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGUSR1)
        while not heard:
            time.sleep(0.001)
        llm.engine.on_step = None

    llm.engine.on_step = step
    other = threading.Thread(target=lambda: llm.generate([PROMPT], params(), use_tqdm=False))
    other.start()
    try:
        waits.wait()
        llm.generate([PROMPT], params(), use_tqdm=False)
    finally:
        other.join()
        signal.signal(signal.SIGUSR1, before)
    assert len(heard) == 1 and "in the middle of a step" in heard[0]


def test_code_that_logs_may_ask(llm):
    """A handler of Python's logging runs where we log."""
    answers = []

    class Asks(logging.Handler):
        def emit(self, record):
            answers.append(llm.stats()["num_running"])

    def fail(*news):
        raise ValueError("planted")

    handler = Asks()
    logging.getLogger("nanovllm").addHandler(handler)
    llm.engine.on_step = fail
    try:
        in_time(lambda: llm.generate([PROMPT], params(), use_tqdm=False))
    finally:
        logging.getLogger("nanovllm").removeHandler(handler)
    assert len(answers) == 8


def test_on_kv_events_is_told_of_a_reset_and_may_ask(llm):
    llm.generate([PROMPT], params(), use_tqdm=False)
    told = []

    def hear(batch):
        expect("in the middle of a step", llm.generate, [PROMPT], params(), error=RuntimeError)
        told.append((llm.stats()["prefix_cache"]["utilization"], llm.abort("x")))

    llm.on_kv_events = hear
    assert in_time(llm.reset_prefix_cache)
    assert told == [(0.0, None)]


def test_with_asyncio(checkpoint):
    """In the engine's thread: the reader of a request that an observer ends hears of it."""

    async def ask(llm: AsyncLLM) -> None:
        refused = []

        def observe(output, progressed):
            for request in progressed:
                if request.samples[0].seq.num_generated_tokens == 3:
                    llm.llm.abort(request.request_id)
            try:
                llm.llm.generate([PROMPT], params(), use_tqdm=False)
            except RuntimeError as error:
                refused.append(str(error))

        llm.engine.on_step = observe
        *_, last = [output async for output in llm.generate(PROMPT, params())]
        assert last.outputs[0].finish_reason == "abort" and len(last.outputs[0].token_ids) == 3
        assert len(refused) == 3 and not llm.engine.requests

    with AsyncLLM(str(checkpoint()), **SMALL) as llm:
        asyncio.run(asyncio.wait_for(ask(llm), LIMIT_S))
