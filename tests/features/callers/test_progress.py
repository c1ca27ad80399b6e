"""Ctrl-C while the engine works, and the progress bar."""

import os
import signal
import threading
import time

import pytest

from nanovllm.calls import Calls
from nanovllm.core.cache_stats import PrefixCacheStats
from nanovllm.core.sequence import SequenceStatus
from nanovllm.features.callers.progress import progress_bar
from nanovllm.stats import EngineStats
from tests.processes import LIMIT_S
from tests.short_requests import TEXT, sampled


def test_ctrl_c_takes_effect_between_steps(llm, monkeypatch):
    run, interrupted_seqs = llm.engine.model_runner.run, []

    def interrupted(*work):
        [seq] = llm.engine.scheduler.running
        if seq.num_generated_tokens == 4:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # a handler that raised would do so here
            interrupted_seqs.append(seq)
        return run(*work)

    monkeypatch.setattr(llm.engine.model_runner, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT], sampled())
    [seq] = interrupted_seqs
    assert seq.num_generated_tokens == 5, "the step was finished"
    assert seq.status is SequenceStatus.FINISHED and not llm.engine.has_unfinished_requests()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    monkeypatch.undo()
    assert len(llm.generate([TEXT], sampled())[0].outputs[0].token_ids) == 12


def test_ctrl_c_between_steps_in_a_cell_that_awaits(llm, monkeypatch):
    """A notebook's handler cancels such a cell, which would hear of it only after generate()."""
    heard = []

    def cancel(signum, frame):
        heard.append(signum)

    def step_and_interrupt(calls, request_ids):
        outputs = step(calls, request_ids)
        os.kill(os.getpid(), signal.SIGINT)
        return outputs

    cancel.__module__ = "ipykernel.ipkernel"
    step = Calls._step
    monkeypatch.setattr(Calls, "_step", step_and_interrupt)
    before = signal.signal(signal.SIGINT, cancel)
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate([TEXT], sampled())
        assert signal.getsignal(signal.SIGINT) is cancel and not heard
    finally:
        signal.signal(signal.SIGINT, before)
    assert not llm.engine.has_unfinished_requests()


def test_a_second_ctrl_c_interrupts_at_once(llm, monkeypatch):
    def stuck(*work):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        raise AssertionError("still here")

    monkeypatch.setattr(llm.engine.model_runner, "run", stuck)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([TEXT], sampled())
    assert not llm.engine.has_unfinished_requests()


def test_generate_in_another_thread(llm):
    results = []
    thread = threading.Thread(target=lambda: results.extend(llm.generate([TEXT], sampled())))
    thread.start()
    thread.join(LIMIT_S)
    assert len(results) == 1


def test_a_program_with_a_handler_of_its_own_is_left_alone(llm, monkeypatch):
    monkeypatch.setattr(llm.engine.model_runner, "run", lambda output: os.kill(os.getpid(), signal.SIGINT))
    received = []
    before = signal.signal(signal.SIGINT, lambda signum, frame: received.append(signum) or 1 / 0)
    try:
        with pytest.raises(ZeroDivisionError):
            llm.generate([TEXT], sampled())
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT] and not llm.engine.has_unfinished_requests()


def test_progress_bar(monkeypatch, capsys):
    """With a terminal: how many are done, tokens a second of the steps, and hits; all since it was drawn."""
    stats = EngineStats(num_prefill_tokens=1000, step_time_s=5.0)
    cache = PrefixCacheStats(queries=10, hits=0)
    with progress_bar(stats, cache, 4) as advance:
        advance(3)
    assert capsys.readouterr().err == "", "there is no terminal"
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with progress_bar(stats, cache, 4) as advance:
        stats.num_prefill_tokens, stats.num_decode_tokens, stats.step_time_s = 1600, 20, 7.0
        cache.record(4, 3, 0)
        advance(3)
    shown = capsys.readouterr().err
    assert "3/4" in shown and "prefill 300 tok/s, decode 10 tok/s, prefix hits 75%" in shown and "drafts" not in shown
    with progress_bar(stats, cache, 4) as advance:
        stats.num_draft_tokens, stats.num_accepted_tokens = 8, 6
        advance(3)
    assert "drafts 75% accepted" in capsys.readouterr().err
