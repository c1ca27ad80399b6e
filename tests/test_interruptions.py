"""An exception out of any line of the control plane, and the next answers are those of a fresh engine.

The model is a stand-in: its K/V of a position is the tokens up to there, and what it samples depends on what it finds
in the slots of the block table. So a block that is found under a name, and was not computed for it, changes the answer.
"""

import random
import signal
import threading
from contextlib import closing, suppress
from dataclasses import replace
from itertools import product

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams
from nanovllm.features.logprobs.scores import TokenLogprobs
from nanovllm.request import Request
from nanovllm.sampling_params import RequestOutputKind
from nanovllm.worker.model_runner import ModelRunnerOutput
from tests.faults import Instants
from tests.marks import by_night

FOLDER = nanovllm.__path__[0]
# From a call's first line to its last: enqueuing, taking turns, steps, giving turns back, what is left of the call.
OF_CALLS = ("llm.py", "engine.py", "features/callers/", "checks/callers.py")
WHOLE_CALLS = {
    event: Instants(*(f"{FOLDER}/{name}" for name in OF_CALLS), event=event) for event in ("call", "line", "opcode")
}
LINES = Instants(*(f"{FOLDER}/{name}" for name in ("core/", "engine.py", "request.py", "detokenizer.py")))
# Without those of engine.py, each of which test_a_call_that_is_interrupted_anywhere meets by day.
FEWER_LINES = Instants(*(f"{FOLDER}/{name}" for name in ("core/", "request.py", "detokenizer.py")))
EXECUTIONS = (1, 2, 9)  # of a line
BLOCK_SIZE, NUM_BLOCKS = 4, 10
SHARED = [40 + i for i in range(13)]


class Interrupted(Exception):
    pass


class StandIn:
    """A model runner whose K/V of a position is a hash of all tokens up to it."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.slots = vocab_size, {}

    def run(self, output):
        result = ModelRunnerOutput()
        for chunk in output.chunks:
            seq = chunk.seq

            def slot(i, seq=seq):
                return seq.block_table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE

            for i in range(chunk.write_start, chunk.end):
                self.slots[slot(i)] = hash(tuple(seq.tokens[: i + 1]))
            found = tuple(self.slots.get(slot(i)) for i in range(chunk.end))
            token_id = 10 + hash((found, seq.sample_index)) % (self.vocab_size - 10)
            result.sampled_token_ids.append([token_id] * chunk.num_logits)
            result.logprobs.append([TokenLogprobs(-1.0, 1, [7], [-2.0])] * chunk.num_logits)
            result.pooled.append(None)
            result.prompt_logprobs.append([])
        return result


@pytest.fixture(scope="module")
def llm(checkpoint):
    llm = LLM(str(checkpoint()), block_size=BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS, max_model_len=40)
    llm.engine.model_runner = StandIn(llm.engine.model_config.vocab_size)
    return llm


# Shared prefixes, a pool that makes them preempt each other, two samples, logprobs, stop strings.
PROMPTS = [[*SHARED, 60], [*SHARED, 61, 62], SHARED[:8], [70 + i for i in range(11)]]
PARAMS = [
    SamplingParams(max_tokens=7, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=5, ignore_eos=True, n=2, stop=["\0"]),
    SamplingParams(max_tokens=9, ignore_eos=True),
    SamplingParams(max_tokens=9, ignore_eos=True),
]


def answers(llm):
    return [output.outputs for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def enqueued(llm):
    requests = [llm.engine.make_request(*pair, stream=True) for pair in zip(PROMPTS, PARAMS, strict=True)]
    llm.engine.enqueue(requests)
    return requests


def streamed(requests):
    """The text as it grew, token by token."""
    return [sample.detokenizer.text for request in requests for sample in request.samples]


def finish(engine):
    """Step until all is done; a step that raises is tried again."""
    while engine.requests:
        with suppress(Interrupted):
            engine.step()


def interrupt():
    raise Interrupted


def assert_as_fresh(llm, expected):
    assert answers(llm) == expected
    engine = llm.engine
    assert not engine.requests
    engine.scheduler.check_integrity()
    assert len(engine.block_manager.free_blocks) == NUM_BLOCKS, "a block was lost"


@pytest.fixture(scope="module")
def expected(llm):
    expected = answers(llm)
    assert llm.engine.scheduler.num_preemptions > 0 and llm.engine.block_manager.stats.hits > 0
    return expected


@pytest.mark.parametrize(("lines", "executions"), [(FEWER_LINES, EXECUTIONS[:1]), by_night(LINES, EXECUTIONS)])
def test_the_next_call_answers_as_a_fresh_engine(llm, expected, lines, executions):
    for line in lines.of(lambda: answers(llm), executions):
        with pytest.raises(Interrupted):
            lines.interrupt({line}, lambda: answers(llm), interrupt)
        assert_as_fresh(llm, expected)


@pytest.mark.nightly
def test_requests_that_live_on_are_answered_as_ever(llm, expected):
    clean = enqueued(llm)
    for line in LINES.of(lambda: finish(llm.engine), EXECUTIONS):
        requests = enqueued(llm)
        LINES.interrupt({line}, lambda: finish(llm.engine), interrupt)
        assert [request.output().outputs for request in requests] == expected, f"after an exception at line {line}"
        assert streamed(requests) == streamed(clean), f"after an exception at line {line}"
    assert_as_fresh(llm, expected)


def test_an_exception_while_the_first_is_dealt_with(llm, expected):
    rng, lines = random.Random(0), LINES.of(lambda: answers(llm), EXECUTIONS)
    for line in rng.sample(lines, 60):
        with pytest.raises(Interrupted):
            later = {line + rng.randint(1, 60), line + rng.randint(61, 200)}
            LINES.interrupt({line, *later}, lambda: answers(llm), interrupt)
        for request in list(llm.engine.requests.values()):  # a second exception may leave the call's requests behind
            llm.engine.abort_requests([request])
        assert_as_fresh(llm, expected)


@pytest.mark.parametrize("num_lines", [20, by_night(120)])
def test_a_signal_handler_that_aborts_at_any_line(llm, expected, num_lines):
    """It is answered in the middle of a step, and harms no other request; nor does it if the step then fails."""
    engine = llm.engine
    rng, lines = random.Random(1), LINES.of(lambda: finish(engine) if enqueued(llm) else None, EXECUTIONS)
    of_changes: dict[int, int] = {}  # {line of _change(): when it was executed for the first time}
    enqueued(llm)
    LINES.trace(
        lambda: finish(engine),
        lambda number, frame: frame.f_code.co_name == "_change" and of_changes.setdefault(frame.f_lineno, number),
    )
    assert len(of_changes) > 6
    for line in [*of_changes.values(), *rng.sample(lines, num_lines)]:
        for fails_later in (0, rng.randint(1, 40), rng.randint(41, 200)):
            requests = enqueued(llm)
            victim = requests[line % len(requests)]

            def at_line(number, frame, line=line, victim=victim, fails_later=fails_later):
                if number == line:
                    engine.abort_request(victim.request_id)
                if fails_later and number == line + fails_later:
                    raise Interrupted

            LINES.trace(lambda: finish(engine), at_line)
            assert not engine.requests and victim.finished
            for request, answer in zip(requests, expected, strict=True):
                if request is not victim:
                    assert request.output().outputs == answer, f"after an abort at line {line}"
    assert_as_fresh(llm, expected)


def enqueue_and_wait(llm):
    llm.enqueue(PROMPTS, PARAMS)
    return [output.outputs for output in llm.wait_for_completion(use_tqdm=False)]


def leave_a_stream(llm):
    with closing(llm.stream(PROMPTS[2], PARAMS[2])) as outputs:
        return next(outputs).outputs


CALLS = {
    "generate": answers,
    "stream": lambda llm: [output.outputs for output in llm.stream(PROMPTS[1], PARAMS[1])],
    "enqueue, wait_for_completion": enqueue_and_wait,
    "reset_prefix_cache": lambda llm: llm.reset_prefix_cache(reset_running_requests=True),
}
INTERRUPTIONS = {
    "an exception": interrupt,
    "a signal's handler": lambda: signal.raise_signal(signal.SIGALRM),
    "Ctrl-C": lambda: signal.raise_signal(signal.SIGINT),
}
# By day a handler that raises is one of the three at which one thread is interrupted; alone it is an exception.
HOW = ["an exception", by_night("a signal's handler"), "Ctrl-C"]


@pytest.fixture
def alarm():
    """A handler that raises, as that of a timeout does."""
    if not hasattr(signal, "SIGALRM"):
        pytest.skip("this system has no SIGALRM")
    before = signal.signal(signal.SIGALRM, lambda *news: interrupt())
    yield
    signal.signal(signal.SIGALRM, before)


def assert_usable(llm, call, expected):
    """The call answers as before, and nothing is left of one that was interrupted."""
    assert [output.outputs for output in llm.wait_for_completion(use_tqdm=False)] in ([], expected)
    assert call(llm) == expected
    assert not llm.engine.requests and not llm.turns.lock.queue and not llm.calls.enqueued
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.engine.scheduler.check_integrity()
    assert len(llm.engine.block_manager.free_blocks) == NUM_BLOCKS, "a block was lost"


# One handler of SIGINT serves all calls (shared_turns.py): by day one of them meets Ctrl-C at every line.
BY_DAY = [*((name, "an exception") for name in CALLS), ("generate", "Ctrl-C")]


@pytest.mark.parametrize(
    ("name", "how"), [each if each in BY_DAY else by_night(*each) for each in product(CALLS, INTERRUPTIONS)]
)
@pytest.mark.parametrize("event", ["line", by_night("opcode")])
def test_a_call_that_is_interrupted_anywhere(llm, alarm, event, name, how):
    call, instants = CALLS[name], WHOLE_CALLS[event]
    llm.reset_prefix_cache()
    expected = call(llm)
    for instant in instants.of(lambda: call(llm)):
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            instants.interrupt({instant}, lambda: call(llm), INTERRUPTIONS[how])
        assert_usable(llm, call, expected)


@pytest.mark.parametrize("how", HOW)
def test_leaving_a_stream_is_interrupted(llm, alarm, how):
    """Its request ends all the same, with the next step at the latest."""
    expected, instants = leave_a_stream(llm), WHOLE_CALLS["call"]
    for instant in instants.of(lambda: leave_a_stream(llm), executions=range(99)):
        with pytest.raises((Interrupted, KeyboardInterrupt)):
            instants.interrupt({instant}, lambda: leave_a_stream(llm), INTERRUPTIONS[how])
        assert_usable(llm, leave_a_stream, expected)


def test_one_thread_is_interrupted_and_the_others_go_on(llm, alarm, expected):
    is_over, found = threading.Event(), []

    def ask():
        while not is_over.is_set():
            found.append(answers(llm))

    rng, instants = random.Random(2), WHOLE_CALLS["opcode"]
    numbers = instants.of(lambda: answers(llm))
    others = [threading.Thread(target=ask) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for instant in rng.sample(numbers, 60):
            with suppress(Interrupted, KeyboardInterrupt):  # it may not come so far: others make steps for it
                instants.interrupt({instant}, lambda: answers(llm), rng.choice(list(INTERRUPTIONS.values())))
            assert answers(llm) == expected
    finally:
        is_over.set()
        for other in others:
            other.join()
    assert len(found) > 60 and all(answer == expected for answer in found)
    assert_usable(llm, answers, expected)


def test_a_request_that_a_callback_aborts_gives_one_output(llm):
    engine = llm.engine
    request = enqueued(llm)[0]
    engine.on_step = lambda output, progressed: engine.abort_request(request.request_id)
    try:
        found = [output for output in engine.step() if output.request_id == request.request_id]
    finally:
        engine.on_step = None
        finish(engine)
    assert [output.finished for output in found] == [True]
    assert found[0].outputs[0].finish_reason == "abort"


def test_an_aborted_request_gives_what_its_output_kind_says(llm):
    params = SamplingParams(max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    llm.engine.add_request("delta", PROMPTS[0], params)
    deltas = [output.outputs[0].token_ids for _ in range(3) for output in llm.engine.step()]
    last = llm.engine.abort_request("delta")
    assert all(len(ids) == 1 for ids in deltas) and last.finished and last.outputs[0].token_ids == []


def test_a_failed_step_loses_nothing_of_a_delta(llm):
    """Its outputs have been made of two requests, or of one, and nobody gets them: the next step's hold them."""
    engine, lines = llm.engine, Instants(f"{FOLDER}/features/callers/output_kind.py")

    def follow() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {"a": [], "b": []}
        while engine.requests:
            with suppress(Interrupted):
                for output in engine.step():
                    found[output.request_id] += output.outputs[0].token_ids
        return found

    def enqueue() -> None:
        engine.reset_prefix_cache()
        for name, prompt in zip("ab", PROMPTS, strict=False):
            engine.add_request(
                name, prompt, SamplingParams(max_tokens=5, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
            )

    enqueue()
    clean = follow()
    assert [len(token_ids) for token_ids in clean.values()] == [5, 5]
    enqueue()
    for line in lines.of(follow, range(1, 11)):
        enqueue()
        found: list[dict[str, list[int]]] = []
        lines.interrupt({line}, lambda found=found: found.append(follow()), interrupt)
        assert found == [clean], f"after an exception at {line}"


@pytest.mark.parametrize("where", ["run", "filtered"])
def test_a_failed_step_is_not_counted(llm, monkeypatch, where):
    """One that fails in the middle, and one that fails in the last thing that it does."""
    engine = llm.engine
    owner = {"run": engine.model_runner, "filtered": Request}[where]
    do = getattr(owner, where)

    def counts() -> tuple[int, int, int, int]:
        engine.reset_prefix_cache()
        before = replace(engine.stats)
        enqueued(llm)
        finish(engine)
        done = engine.stats - before
        return done.num_steps, done.num_prefill_tokens, done.num_decode_tokens, done.num_output_tokens

    clean, failures = counts(), iter([True, False, False])

    def fails(*args):
        if next(failures, False):
            interrupt()
        return do(*args)

    monkeypatch.setattr(owner, where, fails)
    assert counts() == clean
