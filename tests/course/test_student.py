"""The student's edition: nothing in it gives an answer away, and all of it works."""

import subprocess
import sys
from pathlib import Path

import pytest

from chapters import quiz
from chapters.teaching.edition import REPOSITORY, is_left_out, write_edition
from tests.course.course_text import CHAPTERS

WITHOUT_MODEL = "import sys, chapters.__main__ as m; m.find_model = lambda name: (None, ''); sys.exit(m.main())"


@pytest.fixture(scope="module")
def edition(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("edition") / "course"
    write_edition(folder)
    return folder


@pytest.fixture(scope="module")
def texts(edition) -> dict[Path, str]:
    files = (path for path in edition.rglob("*") if path.is_file())
    return {path.relative_to(edition): path.read_text("utf-8", "replace") for path in files}


def triples(text: str) -> set[tuple[str, ...]]:
    """Each line with the next two, without indentation."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return set(zip(lines, lines[1:], lines[2:], strict=False))


def test_no_solution_can_be_read(texts):
    """No three lines that follow each other and are our own: not the engine's, and not the skeleton's."""
    names = {path.name for path in texts}
    assert {"exercise.py", "checks.py", "solution_sealed.py", "quiz.sealed"} <= names
    assert not names & {"solution.py", "quiz.toml", "teaching", "wrong_solutions"}
    engine, shown = set[str](), set[tuple[str, ...]]()
    for path, text in texts.items():
        if path.parts[0] == "nanovllm":
            engine |= {line.strip() for line in text.splitlines()}
        else:
            shown |= triples(text)
    for chapter in CHAPTERS:
        ours, skeleton = ((chapter.folder / f"{name}.py").read_text("utf-8") for name in ("solution", "exercise"))
        own = {
            three for three in triples(ours) if not engine & {*three} and not any(line in skeleton for line in three)
        }
        assert len(own) > 1 and not own & shown, chapter.title


def test_no_answer_can_be_read(texts):
    """Neither what is right, nor why."""
    everything = "\n".join(
        text for path, text in texts.items() if path.parts[0] == "chapters" and path.suffix != ".json"
    )
    for question in (question for chapter in CHAPTERS for question in quiz.load(chapter)):
        said = [question["why"], *question.get("wrong", {}).values()]
        said += [text for option in question.get("options", ()) for text in (option["text"], option.get("why", ""))]
        for text in (text for text in said if len(text) > 25):
            assert text not in everything


def test_what_is_for_teachers_is_left_out(edition, texts):
    for name in ("chapters/teaching/edition.py", "tests/course/test_exercises.py", "tests/course/test_student.py"):
        assert is_left_out(Path(name)) and not (edition / name).exists()
    assert not is_left_out(Path("tests/course/test_quiz.py")), "a student's edition has tests, too"
    told = texts[Path("chapters/README.md")]
    assert (
        "## Alone" in told and "## Grading" not in told and "solution.py" not in told and "wrong_solutions" not in told
    )
    with pytest.raises(ValueError, match="has something in it"):
        write_edition(edition)


def run(edition: Path, *command: str, given: str = "") -> str:
    env = {"PYTHONPATH": str(edition), "XDG_DATA_HOME": str(edition.parent), "PATH": "", "HOME": str(edition.parent)}
    done = subprocess.run(
        [sys.executable, "-c", *command], input=given, capture_output=True, text=True, cwd=edition, env=env
    )
    assert not done.stderr.replace("Checks that need a model stay open: \n", ""), done.stderr
    return done.stdout


def test_its_commands(edition):
    """A quiz is answered; checks that compare with our solution have it; there are no commands for teachers."""
    [first, *_] = quiz.load(CHAPTERS[0])
    assert first["why"][:30] in " ".join(run(edition, WITHOUT_MODEL, "quiz", "1", given=f"{first['answer']}\n").split())
    ours = str(REPOSITORY / "chapters/ch12_fewer_bits/solution.py")
    assert run(edition, WITHOUT_MODEL, "check", "12", "--file", ours).count(": passed") == 4
    told = run(edition, WITHOUT_MODEL, "--help")
    assert " site " in told and not any(f" {name} " in told for name in ("student", "exam", "slides"))
