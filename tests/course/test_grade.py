"""python -m chapters grade: a class whose submissions misbehave, and what is similar."""

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from chapters import wall
from chapters.__main__ import main
from chapters.course import find_chapter
from chapters.teaching.similar import similar_pairs
from chapters.teaching.submissions import find_submissions

CHAPTER = find_chapter(4)
SOLUTION = (CHAPTER.folder / "solution.py").read_text("utf-8")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="examine_here.py does without processes")

# As the last task's function: (body, what the student is told).
BODIES = {
    "right": ("", ""),
    "exits": ("import os; os._exit(0)", "exit code 0 before it was done"),
    "hangs": ("while True: pass", "it was not done after 1 s"),
    "prints": ("for _ in range(3): print('y' * 10**6)", "reference counts must be 0"),
    "deletes_its_folder": ("import shutil; shutil.rmtree('.')", "OSError"),
    "deletes_above": ("import shutil; shutil.rmtree('..', ignore_errors=True)", "reference counts must be 0"),
    "deletes_the_course": (
        "import chapters, shutil, pathlib\n"
        "    shutil.rmtree(pathlib.Path(chapters.__file__).parents[1], ignore_errors=True)",
        "reference counts must be 0",
    ),
    "forges": ("open('json.py', 'w').write('1 / 0'); import os; os._exit(0)", "exit code 0 before it was done"),
    "kills_all": ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
    "writes_above": ("open('../../../outside', 'w')", "PermissionError"),
    "=formula": ("raise ValueError('=1+1')", "ValueError"),
}


def rows_of(path: Path) -> dict[str, dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return {row["student"].lstrip("'"): row for row in csv.DictReader(file)}


@pytest.fixture
def no_model(monkeypatch):
    monkeypatch.setattr("chapters.__main__.find_model", lambda name: (None, "a test"))


@pytest.mark.ci
def test_a_class(tmp_path, no_model, monkeypatch, capsys):
    """A row each; nobody harms another, or what the system can protect; a second time, nothing is graded."""
    folder, path, pairs = tmp_path / "class", tmp_path / "class.csv", tmp_path / "pairs.csv"
    bodies = (
        BODIES if wall.landlock_version() else {name: of for name, of in BODIES.items() if "Permission" not in of[1]}
    )
    for name, (body, _) in bodies.items():
        (folder / name / "ch04").mkdir(parents=True)
        text = f"{SOLUTION}\n\ndef free(manager, seq):\n    {body}\n" if body else SOLUTION
        (folder / name / "ch04" / "exercise.py").write_text(text, "utf-8")
    (folder / "empty").mkdir()
    (folder / "no_python_ch04.py").write_text("def (", "utf-8")
    command = ["grade", str(folder), "--csv", str(path), "--chapters", "4", "--limit", "1", "--similar", str(pairs)]
    assert main(command) == 0
    rows = rows_of(path)
    assert sorted(rows) == sorted([*bodies, "empty", "no_python"])
    assert rows["empty"]["note"] == "there is no exercise.py" and "SyntaxError" in rows["no_python"]["message_1"]
    for name, (_, told) in bodies.items():
        row = rows[name]
        assert (row["chapter"], row["tasks"], row["task_3"], row["passed"]) == ("4", "3", "free", "no")
        if "not done" not in row["message_1"] + row["message_2"]:  # where others keep the machine busy
            assert row["checks_passed_1"] == "6" and row["message_1"] == "left open without a model: 2"
            assert told in row["message_3"], (name, row["message_3"])
    assert rows["right"]["message_3"] == "left open without a model: 2"
    assert "pairs. Short exercises have few right solutions" in capsys.readouterr().out
    assert "4,1.00,right: right/ch04/exercise.py,our solution.py" in pairs.read_text("utf-8")
    monkeypatch.setattr("chapters.examine.examine", None)
    shutil.rmtree(folder / "empty")
    assert main(command) == 0 and len(rows_of(path)) == len(rows) - 1, "nothing is graded; who has gone, goes"
    path.write_text("name,mark\n")
    assert main(command) == 2, "not ours: it is left as it is"


def test_whose_file_is_which(tmp_path):
    names = {
        "ada/exercise.py": ("ada", 5),
        "bob/ch04/exercise.py": ("bob", 4),
        "cid/course/chapters/ch07_prefix_caching/exercise.py": ("cid", 7),
        "cid/course/chapters/ch08_sampling/exercise.py": ("cid", 8),
        "dora_ch16.py": ("dora", 16),
        "Eva Lund_8251_assignsubmission_file_/exercise.py": ("Eva Lund", 5),
        "fuchsgabi_LATE_17_42_exercise-1.py": ("fuchsgabi", 5),
        "gus/mine.py": ("gus", 5),
    }
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    with pytest.raises(ValueError, match=r"of which chapter is Eva Lund_.*/exercise\.py\?"):
        find_submissions(tmp_path, [])
    found = find_submissions(tmp_path, [5])
    assert {(each.student, each.chapter) for each in found} == {who for who in names.values() if who[1] == 5}
    for name in ("ada", "Eva Lund_8251_assignsubmission_file_", "fuchsgabi_LATE_17_42_exercise-1.py", "gus"):
        path = tmp_path / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert {(each.student, each.chapter) for each in find_submissions(tmp_path, [])} == {
        who for who in names.values() if who[1] != 5
    }
    (tmp_path / "link.py").symlink_to("/etc/passwd")
    (tmp_path / "large.py").write_bytes(b"#" * (1 << 21))
    problems = {each.student: each.problem for each in find_submissions(tmp_path, [4])}
    assert problems["link"] == "it is not a file" and "2,097,152 bytes" in problems["large"]


def test_notebooks(tmp_path):
    """The cells that are exercise.py are graded: not a skeleton that lies beside them, and not other notebooks."""
    cells = [
        {"cell_type": "markdown", "source": ["# exercise.py is below"]},
        {"cell_type": "code", "source": ["# exercise.py: free\n", "first = 1\n"]},
        {"cell_type": "code", "source": ["print('a try')"]},
        {"cell_type": "code", "source": ["# exercise.py: free\n", "second = '\ud800'\n"]},
    ]
    kinds = {
        "ada/ch04/ch04.ipynb": {"cells": cells},
        "bob_ch04.ipynb": {"cells": cells},
        "cid/ch04/notes.ipynb": {"cells": cells[:1]},
        "notes_ch04.ipynb": ["no notebook"],
    }
    for name, content in kinds.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "torn_ch04.ipynb").write_text('{"cells": ' + "[" * 100_000)
    for student in ("ada", "cid"):
        skeleton = tmp_path / student / "ch04" / "chapters" / "ch04_paged_attention" / "exercise.py"
        skeleton.parent.mkdir(parents=True)
        skeleton.write_text("skeleton = 1")
    found = {each.student: each.source.decode() for each in find_submissions(tmp_path, [])}
    theirs = "# exercise.py: free\nsecond = '?'\n"
    assert found == {"ada": theirs, "bob": theirs, "cid": "skeleton = 1"}


def test_similar():
    """Other names, layout and comments change nothing; another algorithm does; what was given does not count."""
    given = (CHAPTER.folder / "exercise.py").read_bytes()
    renamed = re.sub(r"\bnum_needed\b", "n", SOLUTION).replace("block_id)", "block_id  # its id\n        )")
    renamed = re.sub(r"\b_take\b", "grab", re.sub(r"#.*", "", renamed))
    other = SOLUTION.replace("for block_id in reversed(seq.block_table)", "while seq.block_table")
    other = other.replace(
        "num_needed = -(-len(seq.tokens) // manager.block_size)", "num_needed = sum(1 for _ in range(0, 9))"
    )
    texts = {"ours": SOLUTION, "renamed": renamed, "other": other, "nothing": given.decode(), "broken": "def ("}
    found = {pair[1:]: pair[0] for pair in similar_pairs(((n, t.encode()) for n, t in texts.items()), given, 0.0)}
    assert found[("ours", "renamed")] == 1.0 > found[("ours", "other")]
    assert not any({"nothing", "broken"} & {*pair} for pair in found), "they have nothing of their own"
