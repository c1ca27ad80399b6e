"""Grading itself: what is run, what is put back afterwards, and what is said of code that is wrong."""

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Collection
from contextlib import nullcontext
from enum import IntEnum
from fractions import Fraction
from functools import wraps
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from chapters.ch11_benchmarks.timing import Timing
from chapters.course import find_chapter
from chapters.expect import cases, differs, expect_form, read_again, unchanged
from chapters.grading import Bench, Task, Wrong, grade, what_compares_by_itself
from chapters.patching import replaced
from chapters.submission import RETURNS, NotLoaded, load_submission
from nanovllm import LLM, SamplingParams
from tests.course.course_text import CHAPTERS


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
    assert grade(make_task(check), lambda n: None, bench).problem == "one more\nexpected: 4\ngot:      None"
    crash = grade(make_task(check), lambda n: n / 0, bench).problem
    assert "ZeroDivisionError" in crash and f"{Path(__file__).name}, line" in crash
    for error in (SystemExit(0), KeyboardInterrupt(), GeneratorExit()):  # of the student's code
        [function] = [lambda n, error=error: exec("raise error", {"error": error})]
        assert type(error).__name__ in grade(make_task(check), function, bench).problem
    assert grade(make_task(check), lambda n: Odd(), bench).problem.endswith(
        "got:      <RuntimeError when it was made into text>"
    )
    assert Bench.num is None, "the engine is ours again"


class Answer(IntEnum):
    YES = 1


class Odd(str):
    def __str__(self):
        raise RuntimeError


def test_the_heading_to_read_again():
    """What is wrong may name one, else the check may, else it is the task's."""

    def check(section, bench):
        if section != "nothing is wrong":
            raise Wrong("no", section=section)

    def section_of(argument) -> str:
        task = Task("f", "the task's", lambda f: nullcontext(), (check,))
        return grade(task, argument, Bench()).section

    assert section_of("nothing is wrong") == ""
    assert section_of(None) == "the task's"
    read_again("the check's")(check)
    assert section_of(None) == "the check's" and section_of("its own") == "its own"


def test_checks_as_a_table():
    """Each row is asked about, with things of its own; a check has its title and its heading."""

    def ask(function, numbers, hint):
        with unchanged(hint, numbers):
            function(numbers)

    one, two = cases(ask, {"one": [([1], "not touched"), ([3], "changed")], ("two", "A heading"): iter([([], "no")])})
    assert one.__doc__ == "one" and not hasattr(one, "section") and two.section == "A heading"
    for _ in range(2):
        with pytest.raises(Wrong, match=r"^changed$"):
            one(lambda numbers: numbers.append(4) if numbers[0] == 3 else None, None)
        two(lambda numbers: None, None)


def test_tensors_that_are_changed_or_of_another_form():
    for change in (lambda x: x.add_(1), lambda x: x.resize_(2)):
        with pytest.raises(Wrong, match="changed"), unchanged("changed", x := torch.zeros(3)):
            change(x)
    expect_form(torch.zeros(3), torch.ones(3), "another form")
    for other in (torch.zeros(2), torch.zeros(3).half(), None):
        with pytest.raises(Wrong, match="another form"):
            expect_form(torch.zeros(3), other, "another form")


# -- values that an honest function may return ------------------------------------------------------------------------


def test_nothing_is_near_to_no_number():
    nan, inf = float("nan"), float("inf")
    for expected, got in ((1.0, nan), (nan, nan), (nan, 1.0), (inf, 1.0), (1.0, inf), (inf, -inf), (0.0, 0.2)):
        assert differs(expected, got, 0.1, 0.1) is True
        both = torch.tensor([expected, 1.0]), torch.tensor([got, 1.0])
        assert differs(*both, 0.1, 0.1).tolist() == [True, False]
    for expected, got in ((1.0, 1.1), (inf, inf), (-inf, -inf), (2, 2), (100.0, 109.0)):
        assert differs(expected, got, 0.1, 0.1) is False


def changed(value, change):
    """Each number in it."""
    if type(value) in (list, tuple):
        return type(value)(changed(each, change) for each in value)
    return change(value)


def to_nan(value):
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return torch.full_like(value, float("nan"))
    return float("nan") if type(value) is float else value


ODD = {
    "numpy's bools": lambda value: np.bool_(value) if type(value) is bool else value,
    "numpy's numbers": lambda value: np.float64(value) if type(value) is float else value,
    "fractions": lambda value: Fraction(value) if type(value) in (int, float) and value == value else value,
    "complex numbers": lambda value: complex(value) if type(value) in (int, float) else value,
    "arrays": lambda value: value.numpy() if isinstance(value, torch.Tensor) else value,
}
# Of these tasks, checks that look at something else than at what the function returns: what it leaves alone, what it
# takes up, which expert it chooses.
NO_COMPARISON = {("causal_attention", 7), ("attend", 6), ("assign_experts", 9)}
# By day, of a few chapters: those whose solutions return what is changed.
NAN_BY_DAY = (1, 12)
ODD_BY_DAY = {
    "numpy's bools": (),  # below, of a single task
    "numpy's numbers": (12,),
    "fractions": (1, 3, 12),
    "complex numbers": (1, 3, 12),
    "arrays": (1,),
}


def of_chapter(chapter, *more, by_day: Collection[int]):
    marks = () if chapter.number in by_day else pytest.mark.nightly
    return pytest.param(chapter, *more, id="-".join([f"ch{chapter.number:02}", *filter(None, more)]), marks=marks)


@pytest.mark.parametrize("chapter", [of_chapter(chapter, by_day=NAN_BY_DAY) for chapter in CHAPTERS])
def test_no_check_takes_nan_for_a_number(chapter, checkpoint):
    """Of our solution, with NaN in place of its numbers while one check runs: that check fails, in a sentence."""
    bench = Bench(str(checkpoint()))
    for task in chapter.module("checks").TASKS:
        function = getattr(chapter.module("solution"), task.name)
        now, spoilt_check, with_numbers = [-1], [-1], set[int]()

        @wraps(function)
        def spoilt(*args, function=function, now=now, spoilt_check=spoilt_check, seen=with_numbers, **kwargs):
            found = function(*args, **kwargs)
            other = changed(found, to_nan)
            if repr(other) != repr(found):
                seen.add(now[0])
            return other if now[0] == spoilt_check[0] else found

        def begins(check, now=now):
            now[0] = check

        assert grade(task, spoilt, bench, begins).passed
        for number in sorted(with_numbers):
            spoilt_check[0] = number
            result = grade(task, spoilt, bench, begins)
            if (task.name, number) not in NO_COMPARISON:
                assert result.num_passed == number and result.problem, (task.name, task.titles[number])


@pytest.mark.parametrize(
    ("chapter", "kind", "only"),
    [
        *(of_chapter(chapter, kind, "", by_day=ODD_BY_DAY[kind]) for chapter in CHAPTERS for kind in ODD),
        of_chapter(find_chapter(8), "numpy's bools", "keep_top_p", by_day=(8,)),
    ],
)
def test_a_value_that_a_check_cannot_take_is_named(chapter, kind, only, checkpoint):
    """Or it is taken as the number that it is. No traceback of ours is shown."""
    bench = Bench(str(checkpoint()))
    for task in [task for task in chapter.module("checks").TASKS if only in ("", task.name)]:
        function = getattr(chapter.module("solution"), task.name)

        @wraps(function)
        def odd(*args, function=function, **kwargs):
            found = function(*args, **kwargs)
            return found if hasattr(found, "__next__") else changed(found, ODD[kind])

        result = grade(task, odd, bench)
        if not result.passed:
            assert f"{task.name} returned " in result.problem, result.problem
            assert "the checks take Python's own numbers, texts and lists, and tensors" in result.problem
            assert "checks" not in re.findall(r"(\w+)\.py, line", result.problem)


def test_a_value_that_says_what_it_is_equal_to(checkpoint, monkeypatch):
    """Alone or within lists of any class: a check that asks whether it is != what is right would be told no."""
    monkeypatch.setattr(Bench, "num", None, raising=False)

    def check(function, bench):
        """counts"""
        if function(3) != 4:
            raise Wrong("one more")

    class Never(int):
        def __ne__(self, other):
            return False

    class Any:
        def __eq__(self, other):
            return True

    class Near(float):
        def __sub__(self, other):
            return 0.0

    class Own(list):
        pass

    class Other(list):
        def __iter__(self):
            return iter([4])

    class Pair(NamedTuple):
        count: int
        rest: int

    answers = [
        Never(7),
        [Never(7)],
        ([1, [Never(7)]], 4),
        Any(),
        {2: Any()},
        Counter(a=Never(7)),
        Near(4),
        Other(),
        Timing(Near(0), ()),
    ]
    for answer in [*answers, Own([Never(7)]), Pair(Never(7), 1), OrderedDict(a=Own([Any()]))]:
        problem = grade(make_task(check), lambda n, answer=answer: answer, Bench(str(checkpoint()))).problem
        assert "decides by itself how it compares" in problem
    honest = [Counter("a"), OrderedDict(a=1), torch.Size([1]), SamplingParams(), Timing(0.0, (1.0,))]
    honest += [Own([1]), Pair(1, 2), iter([1]), Answer.YES]
    assert [what_compares_by_itself(value) for value in honest] == [None] * len(honest)


def test_not_implemented(checkpoint, monkeypatch):
    """Only what a skeleton raises is not started, and it is named; PyTorch, too, raises such errors."""
    monkeypatch.setattr(Bench, "num", None, raising=False)

    def unwritten(n):
        raise NotImplementedError

    result = grade(make_task(lambda function, bench: function(3)), unwritten, Bench())
    assert result.not_started and re.search(r"unwritten\(\) in test_grading.py, line \d+", result.problem)
    without_a_device = lambda n: torch.empty(1, device="meta").item()  # noqa: E731
    result = grade(make_task(lambda function, bench: function(3)), without_a_device, Bench())
    assert not result.not_started and "meta tensors" in result.problem


def test_two_numbers_are_no_list():
    """The larger or smaller of two, for each entry, as guards against an overflow need it."""
    [task] = [task for task in find_chapter(8).module("checks").TASKS if task.name == "min_p_probs"]

    def min_p_probs(logits, temperature, min_p):
        largest = max(logits)
        weights = [math.exp(max((x - largest) / temperature, -700.0)) for x in logits]
        kept = [min(1.0, weight) if weight >= min_p else 0.0 for weight in weights]
        total = sum(kept)
        return [weight / total for weight in kept]

    result = grade(task, min_p_probs, Bench())
    assert result.num_passed > 3 and not result.problem


def test_a_list_that_is_gone_through_for_each_entry():
    """As an honest student writes it: max() in a comprehension, over the list that is given, or over one of its own."""
    [task] = [task for task in find_chapter(8).module("checks").TASKS if task.name == "min_p_probs"]

    def quadratic(logits, temperature, min_p):
        weights = [math.exp((x - max(logits)) / temperature) for x in logits]
        kept = [w if w >= min_p * max(weights) else 0.0 for w in weights]
        return [w / sum(kept) for w in kept]

    def of_its_own(logits, temperature, min_p):
        largest = max(logits)
        weights = [math.exp((x - largest) / temperature) for x in logits]
        kept = [w if w >= min_p * max(weights) else 0.0 for w in weights]
        total = sum(kept)
        return [w / total for w in kept]

    for function in (quadratic, of_its_own):
        result = grade(task, function, Bench())
        assert "max() stands inside a loop or a comprehension" in result.problem
        assert "Compute it once, before" in result.problem and result.problem.endswith("times for 30 tokens")


@pytest.mark.parametrize("off", [-1, 1])
def test_num_computed_tokens_off_by_one(off):
    chapter = find_chapter(13)
    [task] = [task for task in chapter.module("checks").TASKS if task.name == "accept_tokens"]
    ours = chapter.module("solution").accept_tokens

    def one_off(scheduler, chunk, token_ids):
        ours(scheduler, chunk, token_ids)
        chunk.seq.num_computed_tokens += off if chunk.draft_token_ids else 0

    result = grade(task, one_off, Bench())
    assert "num_computed_tokens: K and V are right for every token but the one sampled last" in result.problem
    assert result.problem.endswith(f"expected: 9\ngot:      {9 + off}")


# -- submissions ------------------------------------------------------------------------------------------------------

ERROR, NO_TEXT = "class E(Exception):\n", "when it was made into text>"
NOT_LOADED = {
    "def broken(:": "SyntaxError: invalid syntax\nada.py, line 1: def broken(:",
    "x = 1\ny = 1 / 0": "ZeroDivisionError: division by zero\nada.py, line 2: y = 1 / 0",
    "import sys\nsys.exit(0)": f"SystemExit: 0\n{RETURNS}\nada.py, line 2: sys.exit(0)",
    "raise KeyboardInterrupt": "KeyboardInterrupt\nada.py, line 1: raise KeyboardInterrupt",
    "x = '\ud800'": "surrogates not allowed",
    "x = '\0'": "null bytes",
    "(" * 10_000: "too many nested parentheses",
    "def f(): f()\nf()": "RecursionError: maximum recursion depth exceeded\nada.py, line 1: def f(): f()",
    "from . import ada": "no known parent package\nada.py, line 1",
    "x = 1\n# é".encode("latin-1"): "SyntaxError: it is not utf-8 text (byte 0xe9 in line 2); save the file as UTF-8",
    "x = 1".encode("utf-16"): "not utf-8 text (byte 0xff in line 1)",
    b"# coding: rot13\n": "'rot13' is not a text encoding",
    "raise SyntaxError('a', ())": "TypeError: function takes",
    # Errors whose own methods fail, lie or find no end.
    f"{ERROR}    def __str__(self): 1 / 0\nraise E": f"E: <ZeroDivisionError {NO_TEXT}\nada.py",
    f"{ERROR}    def __str__(self): return 5\nraise E": f"E: <TypeError {NO_TEXT}",
    f"{ERROR}    def __str__(self): return str(self)\nraise E": f"E: <RecursionError {NO_TEXT}",
    f"{ERROR}    def __str__(self): raise SystemExit(0)\nraise E": f"E: <SystemExit {NO_TEXT}",
    f"{ERROR}    __traceback__ = property(lambda self: 1 / 0)\nraise E": "an error that fails itself",
    f"{ERROR}    __class__ = property(lambda self: 1 / 0)\nraise E": "an error that fails itself",
    "class M(type):\n    __name__ = 5\nclass E(Exception, metaclass=M): 0\nraise E('so')": "E: so\nada.py, line 4",
    "raise ValueError('\\ud800\\x1b[2J\\t')": "ValueError: \\ud800\\x1b[2J\t\nada.py, line 1",
    "raise ValueError('x' * 10**7)": "xxx... (10,000,000 characters)\nada.py, line 1",
    "x = SyntaxError('so')\nx.filename = x.lineno = 'odd'\nraise x": "an error that fails itself",
}


@pytest.mark.parametrize("source", NOT_LOADED)
def test_not_loaded(source):
    with pytest.raises(NotLoaded) as error:
        load_submission(source, "some folder/ada.py")
    message = str(error.value)
    assert message.startswith("ada.py cannot be loaded: ") and NOT_LOADED[source] in message
    assert len(message) < 3000 and message.encode()


def test_loaded():
    """A newer text under the same name is quoted as it is now; a dataclass finds its module."""
    for source in ("# é\nx = 'é'", "# coding: latin-1\nx = 'é'".encode("latin-1"), b"\xef\xbb\xbfx = '\xc3\xa9'\r\n"):
        assert load_submission(source, "ada.py").x == "é"
    source = "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
    assert load_submission(source, "ada.py").A(5).x == 5
    for text in ("a = 1 / 0", "bcd = 1 / 0"):
        with pytest.raises(NotLoaded, match=f"line 1: {text}$"):
            load_submission(text, "ada.py")


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
        with pytest.raises(Wrong, match="with different tokens, from token 0 on") as wrong:
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
