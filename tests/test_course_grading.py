"""Grading itself: what is run, what is put back afterwards, and what is said of code that is wrong."""

from pathlib import Path

import pytest

from chapters.grading import Bench, Task, Wrong, grade
from chapters.patching import replaced
from nanovllm import LLM, SamplingParams


def make_task(check) -> Task:
    return Task("num_blocks_for", "The idea", lambda f: replaced(Bench, "num", f), (check,))


def test_grading(checkpoint, monkeypatch):
    monkeypatch.setattr(Bench, "num", None, raising=False)
    bench = Bench(str(checkpoint()))

    def check(function, bench):
        """counts"""
        if (got := function(3)) != 4:
            raise Wrong("one more", expected=4, got=got)

    assert grade(make_task(check), lambda n: n + 1, bench).passed
    assert grade(make_task(check), lambda n: n, bench).problem == "one more\nexpected: 4\ngot:      3"
    crash = grade(make_task(check), lambda n: n / 0, bench).problem
    assert "ZeroDivisionError" in crash and f"{Path(__file__).name}, line" in crash

    def endless(n):
        while True:
            pass

    assert "a loop that never ends" in grade(make_task(check), endless, bench).problem
    assert Bench.num is None, "the engine is ours again"


def test_replaced_puts_back_what_was_there():
    """A classmethod as a classmethod, what an object had from its class not as its own."""

    class Owner:
        @classmethod
        def name(cls) -> str:
            return cls.__name__

    class Heir(Owner):
        pass

    for owner in (Owner, Heir, Heir()):
        before = dict(vars(owner))
        with replaced(owner, "name", lambda *args: "other"):
            assert owner.name() == "other"
        assert dict(vars(owner)) == before and Heir.name() == "Heir"


def test_same_tokens_shows_the_difference(checkpoint, monkeypatch):
    bench = Bench(str(checkpoint()))
    _ = bench.expected_tokens
    with replaced(bench, "generate", lambda: [[1, *tokens[1:]] for tokens in bench.expected_tokens]):
        with pytest.raises(Wrong, match="with other tokens, from token 0 on") as wrong:
            bench.same_tokens()
        assert wrong.value.expected != wrong.value.got


def test_a_broken_engine_is_replaced(checkpoint):
    """A check that leaves requests behind does not spoil the next one."""
    bench = Bench(str(checkpoint()))

    def use(function):
        return replaced(LLM, "abort", function)

    def leaves_a_request(function, bench):
        """leaves"""
        bench.llm.engine.add_request(None, [5, 6], SamplingParams(), stream=False)
        raise Wrong("left")

    before = bench.llm
    assert not grade(Task("abort", "x", use, (leaves_a_request,)), None, bench).passed
    assert bench.llm is not before and not bench.llm.engine.has_unfinished_requests()
