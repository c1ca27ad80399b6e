"""Write your own nano engine: the skeleton, our solution, and wrong solutions that the checks must catch."""

import ast
import inspect
import re
import shlex
from types import ModuleType, SimpleNamespace

import pytest

from chapters.__main__ import main
from chapters.course import Progress
from chapters.grading import Result, grade
from chapters.nano_engine import bench as bench_module
from chapters.nano_engine import engine, solution
from chapters.nano_engine.checks import TASKS, NanoBench
from chapters.nano_engine.given import make_tiny_llama, read_checkpoint
from chapters.nano_engine.steps import ENGINE, FOLDER, NANO, SOLUTION, STEPS, begun_at, heading
from chapters.submission import load_submission
from tests.checkpoints import edit
from tests.course.wrong_solutions.nano import WRONG
from tests.published_files import FORMATS

README = (FOLDER / "README.md").read_text("utf-8")
SOURCE = SOLUTION.read_text("utf-8")


@pytest.fixture(scope="module")
def bench():
    return NanoBench(None)


def graded(number: int, module: ModuleType, bench: NanoBench, file: str | None = None) -> Result:
    return grade(TASKS[number], module, bench, file=file)


@pytest.mark.parametrize("task", TASKS, ids=list(STEPS))
def test_a_step_is_not_started_then_solved(task, bench):
    assert grade(task, engine, bench).not_started
    result = grade(task, solution, bench)
    assert result.passed, f"{task.titles[result.num_passed]}: {result.problem}"


@pytest.mark.nightly
def test_our_engine_gives_the_demo_models_tokens(demo_checkpoint):
    result = grade(TASKS[-1], solution, NanoBench(str(demo_checkpoint)))
    assert result.passed, result.problem


@pytest.mark.parametrize(
    ("task", "wrong"),
    [pytest.param(task, wrong, id=f"{task.name}-{wrong.name}") for task in TASKS for wrong in WRONG[task.name]],
)
def test_a_wrong_solution_is_caught(task, wrong, bench, tmp_path):
    file = tmp_path / f"{wrong.name}.py"
    file.write_text(wrong.apply(SOURCE, task.name), "utf-8")
    result = grade(task, NANO.submission(file), bench, file=str(file))
    assert not result.passed and not result.not_started
    assert wrong.hint in result.problem, result.problem


def test_each_step_has_wrong_solutions_and_a_place_in_the_text():
    assert list(WRONG) == list(STEPS) == [task.name for task in TASKS]
    for number, task in enumerate(TASKS, start=1):
        assert len(WRONG[task.name]) >= 2 and task.section == heading(number)
        assert f"\n## {heading(number)}\n" in README
        for source in (SOURCE, ENGINE.read_text("utf-8")):
            assert f"\n# -- {heading(number)} -" in source


def test_the_hours_of_the_steps_add_up():
    words = {"half an": 0.5, "an": 1, "two": 2, "three": 3, "eleven": 11, "thirteen": 13}
    number = "|".join(words)
    times = re.findall(rf"\b(?:({number}) to )?({number}) hours?\b(?= for all|\.)", README.lower())
    (all_steps, *each) = [(words[least or most], words[most]) for least, most in times]
    assert len(each) == len(STEPS) and all_steps == tuple(map(sum, zip(*each, strict=True)))


def contracts(path) -> dict[str, tuple[str, str | None]]:
    """Each class and function -> how it is called, and its docstring."""
    tree, found = ast.parse(path.read_text("utf-8")), {}
    for owner in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))):
        for node in owner.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                called = ast.unparse(node.args) if isinstance(node, ast.FunctionDef) else ""
                found[f"{getattr(owner, 'name', '')}.{node.name}"] = called, ast.get_docstring(node)
    return found


def test_the_skeleton_has_our_contracts():
    """And nothing of our solution that is not given."""
    ours, theirs = contracts(SOLUTION), contracts(ENGINE)
    assert theirs.items() <= ours.items()
    assert {name.split(".")[1] for name in ours.keys() - theirs.keys()} == {
        "hashes",
        "take_fresh",
        "take",
        "make_room",
        "make_sequence",
    }
    for name in STEPS:
        assert inspect.getsource(getattr(engine, name)) != inspect.getsource(getattr(solution, name))


@pytest.mark.parametrize("number", range(1, 9))
def test_to_begin_with_a_later_step(number, bench):
    """Steps before it pass, it is not started itself; step 9 would be our solution."""
    module = load_submission(begun_at(number), f"begun_at_{number}.py")
    for before in range(number - 1):
        if before in (1, 3, 4, number - 2):  # the others take longer, and are these files' text
            assert graded(before, module, bench, "begun.py").passed
    assert graded(number - 1, module, bench, "begun.py").not_started


def test_the_commands(tmp_path, monkeypatch, capsys):
    """A student's way: where am I, a step that passes and is remembered, one that fails, a file with our steps."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setattr("chapters.__main__.find_model", lambda name: (None, "there is no demo model"))
    mine = tmp_path / "engine.py"
    assert main(["nano", "start", "2", "--out", str(mine)]) == 0
    assert "Write step 2: the block manager, then:  python -m chapters nano check 2 --file" in capsys.readouterr().out
    assert main(["nano", "start", "2", "--out", str(mine)]) == 2 and "is there already" in capsys.readouterr().err
    apart = tmp_path / ("a long name " * 8) / "engine.py"
    apart.parent.mkdir()
    assert main(["nano", "start", "2", "--out", str(apart)]) == 0
    assert f"python -m chapters nano check 2 --file {shlex.quote(str(apart))}\n" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr("chapters.nano_engine.command.sys", SimpleNamespace(platform="win32"))
        apart = apart.with_name("other.py")
        assert main(["nano", "start", "2", "--out", str(apart)]) == 0
    assert f'--file "{apart}"\n' in capsys.readouterr().out
    for limit in ("-1", "nan", "inf"):
        with pytest.raises(SystemExit):
            main(["nano", "check", "--limit", limit])
        assert "is not a number of seconds" in capsys.readouterr().err
    monkeypatch.setattr("chapters.nano_engine.command.ENGINE", mine)
    assert main(["nano", "check"]) == 1
    out = capsys.readouterr().out
    assert "A tiny model with random weights stands for the demo model: there is no demo model" in out
    assert "Step 1, Sequence: passed, 4 of 4 checks" in out and "Step 2, BlockManager: not started" in out
    assert "Read again: Step 2: the block manager" in out and "Step 3" not in out
    assert Progress().get(NANO) == {"solved": ["Sequence"]}
    assert main(["nano", "check", "9"]) == 2 and "there are steps 1 to 8, found 9" in capsys.readouterr().err


def test_what_is_done_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    Progress().note(NANO, solved=dict.fromkeys(["Sequence", "Scheduler"], True))
    assert main(["nano"]) == 0
    out = capsys.readouterr().out
    assert out.count("yes") == 2 and "python -m chapters nano check 2" in out
    assert main([]) == 0 and "2 of 8 steps" in capsys.readouterr().out
    Progress().note(NANO, solved=dict.fromkeys(STEPS, True))
    assert main(["nano"]) == 0 and "python -m chapters nano bench" in capsys.readouterr().out


def test_bench_measures(monkeypatch):
    monkeypatch.setattr(bench_module, "NUM_REQUESTS", 2)
    monkeypatch.setattr(bench_module, "ANSWER_TOKENS", 4)
    measured = bench_module.measure(lambda *phase: None, str(SOLUTION), None)
    assert not measured["problem"] and "a tiny random model" in measured["what"]
    assert [row[0] for row in measured["rows"]] == [
        "yours, one by one",
        "yours, 2 together",
        "the course's, 2 together",
    ]


def test_bench_names_what_is_not_written():
    measured = bench_module.measure(lambda *phase: None, str(ENGINE), None)
    assert re.search(r"not finished \(.*__init__\(\) in engine.py, line \d+\)", measured["problem"])


EARLY = """
class LLM(LLM):
    def generate(self, prompts, params):
        return [{"text": "", "token_ids": [7] * 5} for _ in prompts]
"""


def test_bench_takes_only_whole_answers(monkeypatch, tmp_path):
    """An engine that ends early is no fast one."""
    monkeypatch.setattr(bench_module, "NUM_REQUESTS", 2)
    (tmp_path / "engine.py").write_text(SOURCE + EARLY, "utf-8")
    measured = bench_module.measure(lambda *phase: None, str(tmp_path / "engine.py"), None)
    assert measured["problem"] == "2 answers of 32 tokens were asked for (ignore_eos), found [5, 5]"


def test_a_quantized_llama_is_no_plain_one(tmp_path):
    make_tiny_llama(tmp_path)
    edit(tmp_path / "config.json", quantization_config=FORMATS["gptq"][1])
    with pytest.raises(ValueError, match="is_quantized"):
        read_checkpoint(tmp_path)
