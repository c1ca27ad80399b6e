"""Several threads, one LLM: each gets the answers it would get alone, and their requests share batches."""

import gc
import signal
import threading
import time

import pytest

from nanovllm import RequestOutput, SamplingParams
from nanovllm.checks.callers import is_within
from nanovllm.core.scheduler import Scheduler
from nanovllm.features.callers import fair_lock
from nanovllm.features.callers.fair_lock import FairLock

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def in_threads(functions):
    """What each returns; raises what one of them raised."""
    results, errors = {}, []

    def call(number, function):
        try:
            results[number] = function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(functions))]


def num_outputs():
    """Of all that are in memory."""
    gc.collect()
    return sum(type(thing) is RequestOutput for thing in gc.get_objects())


def test_threads_get_their_own_answers_and_share_steps(llm, monkeypatch):
    def generate(first):
        return [o.outputs[0].token_ids for o in llm.generate([[first, 6, 7], [first, 9, 8, 7]], PARAMS, use_tqdm=False)]

    def stream(first):
        return [list(llm.stream([first, 6, 7], PARAMS))[-1].outputs[0].token_ids]

    firsts = range(20, 32)
    num_before = num_outputs()
    expected = [generate(first) for first in firsts]
    together, schedule = [], Scheduler.schedule

    def slow_schedule(scheduler, drafts):
        together.append(len({seq.tokens[0] for seq in scheduler.seqs.values()}))
        time.sleep(0.002)  # so that the others come to ask for their turn
        return schedule(scheduler, drafts)

    monkeypatch.setattr(Scheduler, "schedule", slow_schedule)
    for _ in range(3):
        calls = [lambda first=first: generate(first) for first in firsts]
        calls += [lambda first=first: stream(first) for first in firsts]
        assert in_threads(calls) == expected + [answer[:1] for answer in expected]
    assert max(together) > 4, "no step served several threads"
    assert not llm.engine.requests
    assert num_outputs() == num_before, "an answer was kept for a caller who has it"


def test_turns_are_taken_in_the_order_of_asking():
    turns, order, threads = FairLock(), [], []

    def ask_while_one_has_the_turn():
        for name in "abcd":
            threads.append(threading.Thread(target=lambda name=name: turns.run(lambda: order.append(name))))
            threads[-1].start()
            while len(turns.queue) < len(threads) + 1:
                time.sleep(0.001)

    turns.run(ask_while_one_has_the_turn)
    for thread in threads:
        thread.join()
    assert order == list("abcd")


def test_a_stack_that_looks_ended_for_a_moment(monkeypatch):
    """So it may while it changes. Whoever has the turn keeps it."""
    turns, began, together = FairLock(), threading.Event(), []
    looks = iter([False])

    def hold():
        began.set()
        while len(turns.queue) < 2 and not together:
            time.sleep(0.001)
        time.sleep(0.1)
        together.append(len(turns.queue))

    monkeypatch.setattr(fair_lock, "is_within", lambda *args: next(looks, None) is not False and is_within(*args))
    holder = threading.Thread(target=lambda: turns.run(hold))
    holder.start()
    began.wait()
    turns.run(lambda: together.append("next"))
    holder.join()
    assert together == [2, "next"]


def test_one_who_gives_up_waiting_blocks_nobody():
    """A signal's handler raises in the main thread while it waits, as Ctrl-C does."""
    turns, held, release = FairLock(), threading.Event(), threading.Event()

    def hold():
        held.set()
        release.wait()

    def give_up(signum, frame):
        raise TimeoutError

    holder = threading.Thread(target=lambda: turns.run(hold))
    holder.start()
    held.wait()
    before = signal.signal(signal.SIGALRM, give_up)
    try:
        with pytest.raises(TimeoutError):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            turns.run(lambda: pytest.fail("the turn is taken"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        release.set()
    assert turns.run(lambda: "mine") == "mine"
    holder.join()
