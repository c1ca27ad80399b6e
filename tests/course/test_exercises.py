"""The exercises: skeletons, our solutions, and wrong solutions that grading must catch."""

import importlib
import inspect
import re

import pytest

from chapters.__main__ import main
from chapters.course import find_chapter
from chapters.grading import Bench, grade
from tests.course.course_text import CHAPTERS, for_each_chapter, text_of
from tests.course.wrong_solutions import Edit, edits


def headings(chapter) -> list[str]:
    """What a student can be told to read again."""
    return re.findall(r"^###? (.*)$", text_of(chapter), re.MULTILINE)


@for_each_chapter
def test_skeleton_is_not_started(chapter, checkpoint):
    bench, tasks = Bench(str(checkpoint())), chapter.module("checks").TASKS
    assert 2 <= len(tasks) <= 5
    for task in tasks:
        function = getattr(chapter.module("exercise"), task.name)
        assert len(function.__doc__) > 200, "the contract is in the docstring"
        assert grade(task, function, bench).not_started
        for check in task.checks:
            assert getattr(check, "section", task.section) in headings(chapter), check.__name__


@pytest.fixture(scope="module")
def bench(checkpoint):
    return Bench(str(checkpoint()))


@pytest.fixture(scope="module")
def real_bench(short_demo_in_float32):
    return Bench(str(short_demo_in_float32))


def assert_passes(chapter, bench) -> None:
    for task in chapter.module("checks").TASKS:
        result = grade(task, getattr(chapter.module("solution"), task.name), bench)
        assert result.passed, f"{task.name}, {task.titles[result.num_passed]}: {result.problem}"


@for_each_chapter
def test_solution_passes(chapter, bench):
    assert_passes(chapter, bench)


@pytest.mark.nightly
@for_each_chapter
def test_solution_passes_with_real_weights(chapter, real_bench):
    assert_passes(chapter, real_bench)


@pytest.mark.nightly
@for_each_chapter
def test_solution_passes_as_students_run_it(chapter, demo_checkpoint, capsys):
    """With the model as it is: in bfloat16, with the kernels' own layout of its cache."""
    assert main(["check", str(chapter.number), "--solution"]) == 0, capsys.readouterr().out


def wrong_solutions_of(chapter) -> dict:
    return importlib.import_module(f"tests.course.wrong_solutions.{chapter.folder.name[:4]}").WRONG


def wrong_solutions(of_task: str = ""):
    for chapter in CHAPTERS:
        for task in chapter.module("checks").TASKS:
            for wrong in wrong_solutions_of(chapter)[task.name] if of_task in ("", task.name) else ():
                yield pytest.param(chapter, task, wrong, id=f"{chapter.folder.name[:4]}-{wrong.name}")


def assert_is_caught(chapter, task, wrong, bench, folder) -> None:
    result = grade(task, wrong.function(chapter, task.name, folder), bench)
    assert not result.passed and not result.not_started
    assert wrong.hint in result.problem, result.problem
    assert result.section in headings(chapter)
    assert not wrong.section or result.section == wrong.section


@pytest.mark.parametrize(("chapter", "task", "wrong"), list(wrong_solutions()))
def test_wrong_solution_is_caught(chapter, task, wrong, bench, tmp_path):
    assert_is_caught(chapter, task, wrong, bench, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(("chapter", "task", "wrong"), list(wrong_solutions("stream_text")))
def test_wrong_stream_is_caught_with_real_tokens(chapter, task, wrong, real_bench, tmp_path):
    """With the students' tokenizer, which cuts the checks' texts at other places than the small checkpoint's."""
    assert_is_caught(chapter, task, wrong, real_bench, tmp_path)


RIGHT = {  # by chapter: edits that leave the solution right, each with what it shows instead of a hint
    2: """
engine_step
    runs_by_keyword: the engine's name
        ~ run(scheduled) => run(output=scheduled)
    adds_by_keyword: the engine's names
        ~ (chunk, logprobs, now) => (chunk=chunk, logprobs=logprobs, now=now)
""",
    7: """
allocate_with_prefix
    allocates_by_keyword: the engine's names
        - manager.snapshots.allocate(seq, len(found) * manager.block_size, manager.block_size)
        + num_tokens, size = len(found) * manager.block_size, manager.block_size
        + manager.snapshots.allocate(seq=seq, num_matched_tokens=num_tokens, block_size=size)
next_run
    asks_by_keyword: the engine's name
        ~ store.may_have, wanted => lambda block_hash: store.may_have(key=block_hash), wanted
""",
    9: """
row_parallel_forward
    adds_up_by_keyword: the engine's name
        ~ all_reduce( => all_reduce(x=
embed
    looks_up_as_the_text: the engine's own way to read the table
        ~ F.embedding( => decoder.lookup(
""",
    10: """
attend_in_parts
    neighbors_together: another way to share out
        - done = run([parts[worker::num_workers] for worker in range(num_workers)])
        + ends = [len(parts) * worker // num_workers for worker in range(num_workers + 1)]
        + done = run([parts[start:end] for start, end in zip(ends, ends[1:])])
""",
    12: """
group_dot
    multiplies_by_keyword: the docstring's names
        - total = dpbusd(total, codes[i : i + 4], activations[i : i + 4])
        + total = dpbusd(total, four_codes=codes[i : i + 4], four_activations=activations[i : i + 4])
""",
    14: """
admit
    half_of_the_deadline: a more cautious policy
        ~ SHARE_OF_DEADLINE * deadline_s => deadline_s / 2
""",
}


def right_solutions():
    for number, text in RIGHT.items():
        for task_name, of_task in edits(text).items():
            for edit in of_task:
                yield pytest.param(number, task_name, edit, id=f"ch{number:02}-{edit.name}")


@pytest.mark.parametrize(("number", "task_name", "edit"), list(right_solutions()))
def test_other_right_solution_passes(number, task_name, edit, bench, tmp_path):
    chapter = find_chapter(number)
    [task] = [task for task in chapter.module("checks").TASKS if task.name == task_name]
    result = grade(task, edit.function(chapter, task_name, tmp_path), bench)
    assert result.passed, result.problem


@for_each_chapter
def test_three_wrong_solutions_for_each_task(chapter):
    assert all(len(set(wrong_solutions_of(chapter)[task.name])) >= 3 for task in chapter.module("checks").TASKS)


def test_edit_of_a_solution():
    source = "def one(x):\n    if x:\n        return x\n    return 0\n\n\ndef two(x):\n    return x\n"
    edit = Edit("lines", "\nif x:\n    return x\n", "\nwhile x:\n    x -= 1\n", "")
    assert edit.apply(source, "one") == source.replace("if x:\n        return x", "while x:\n        x -= 1")
    edit = Edit("first line further in", "\n    return x\nreturn 0\n", "\n    return 1\nreturn 2\n", "")
    assert edit.apply(source, "one") == source.replace("return x\n    return 0", "return 1\n    return 2")
    assert Edit("part", "return 0", "x = 1\nreturn x", "").apply(source, "two").count("    x = 1\n    return x\n") == 1
    assert Edit("function first", "return x", "return 1", "").apply(source, "two") == source[:-2] + "1\n"
    for old, times in (("return y", 0), ("return", 2), ("\nif x:\n  return x\n", 0)):
        with pytest.raises(AssertionError, match=f"the old text of unclear occurs {times} times in one"):
            Edit("unclear", old, "", "").apply(source, "one")


@for_each_chapter
def test_signatures_agree(chapter):
    for task in chapter.module("checks").TASKS:
        ours, theirs = (getattr(chapter.module(name), task.name) for name in ("solution", "exercise"))
        assert inspect.signature(ours) == inspect.signature(theirs)


def test_edits_as_one_writes_them():
    text = "\none\n    name: a hint: yes\n        @ Heading\n        - old\n        +     new\n        = stays\n"
    assert edits(text) == {"one": [Edit("name", "old\nstays", "    new\nstays", "a hint: yes", "Heading")]}
    assert edits("one\n    n: h\n        ~ x =>\n") == {"one": [Edit("n", "x", "", "h")]}
    for unclear in ("one\n    no hint\n", "one\n    name: hint\n        * what\n"):
        with pytest.raises((ValueError, KeyError)):
            edits(unclear)
