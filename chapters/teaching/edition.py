"""Edition: the course as a student gets it, written into a folder.

It is this repository without what LEFT_OUT and TEACHERS_TESTS name, our solutions among it, and with quizzes sealed
(chapters/sealed.py). What is read, played, asked and graded is the same: no lab, picture or check needs a solution.
"""

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from chapters.capstone import repair
from chapters.course import EXERCISES, ROOT, Chapter, all_chapters
from chapters.sealed import seal

REPOSITORY = ROOT.parent
PARTS = (
    "nanovllm",
    "examples",
    "chapters",
    "tests",
    ".github/workflows/pages.yml",
    ".gitignore",
    "*.md",
    "*.cff",
    "LICENSE*",
    "*.toml",
)
LEFT_OUT = (  # patterns, as Path.match() has them
    "__pycache__",
    "*.pyc",
    "*.bak",
    "*~",
    "chapters/teaching",
    "chapters/INSTRUCTOR.md",
    "chapters/*/*solution*",
    "chapters/*/quiz*.toml",
    "chapters/capstone/reference.py",
    "chapters/capstone/scale.py",
    "chapters/capstone/simple.py",
    "chapters/capstone/faults.py",
    "tests/course/wrong_solutions",
    "tests/journeys",
    "tests/test_other_systems.py",  # runs other_systems.py, which grades our solutions
    "tests/every_python.py",  # runs without_torch.py, which does, too
    "tests/oldest_torch.py",  # begins processes as every_python.py does
)
# Tests that name one of these are about what is left out.
TEACHERS_TESTS = re.compile(
    r"chapters\.teaching|solution\.py|\"solution\"|import .*\bsolution$|\bsolution import|--solution|wrong_solutions"
    r"|quiz\.toml|INSTRUCTOR|capstone\W+(import )?(reference|scale|simple|faults)",
    re.MULTILINE,
)
SECTIONS = {  # for teachers
    "chapters/README.md": ("For teachers", "Grading"),
    "chapters/capstone/README.md": ("For teachers",),
}
SENTENCES = re.compile(
    r"\s+Our own solution is\s+in\s+`solution\.py`\. [^.]*\.|\s+\[For\s+teachers\]\(chapters/INSTRUCTOR\.md\)[^.]*\."
)
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]+)[^)\s]*\)")


def write_edition(folder: Path, parts: Iterable[str] = PARTS, chapters: Iterable[Chapter] | None = None) -> None:
    """Write it into a new folder. parts: patterns of what lies in the repository.

    chapters: only these, and those that they import from (None: all). Raises ValueError if the folder is not new.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} has something in it; name a new folder")
    kept = {path.relative_to(REPOSITORY) for part in parts for path in REPOSITORY.glob(part)}
    kept = {path for each in sorted(kept) for path in _files(each)}
    if chapters is not None:
        wanted = _with_imported({chapter.folder.name for chapter in chapters})
        others = re.compile(r"chapters/(ch\d\d_|capstone/)")  # the closing project takes several chapters
        kept = {path for path in kept if not others.match(path.as_posix()) or path.parts[1] in wanted}
    there = kept | {parent for path in kept for parent in path.parents}
    for path in sorted(kept):
        target, source = folder / path, REPOSITORY / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(for_students(source.read_text("utf-8"), path, there), "utf-8")
        else:
            shutil.copyfile(source, target)
    for chapter in {path.parts[1] for path in kept if re.match(r"chapters/ch\d\d_", path.as_posix())}:
        for path in (ROOT / chapter).glob("quiz*.toml"):
            sealed = folder / "chapters" / chapter / path.with_suffix(".sealed").name
            sealed.write_text(seal(path.read_text("utf-8")), "utf-8")
    if any(path.parts[:2] == ("chapters", "capstone") for path in kept):
        _write_broken_engines(folder / "chapters" / "capstone" / "broken")


def check_exercises(chapters: Iterable[Chapter]) -> None:
    """check_skeleton() for the exercises of these chapters, and of those that they import from."""
    wanted = _with_imported({chapter.folder.name for chapter in chapters})
    for chapter in all_chapters():
        if chapter.folder.name in wanted:
            check_skeleton(chapter.folder / "exercise.py", EXERCISES[chapter.number])


def check_skeleton(path: Path, names: Iterable[str]) -> None:
    """Raises ValueError if one of these functions and classes has no `raise NotImplementedError` left.

    Nothing is said of a class with some methods solved, nor of what is written beside these.
    """
    unwritten = _unwritten_in(path)
    if written := [name for name in names if name not in unwritten]:
        file = path.relative_to(REPOSITORY)
        what = f"{file} has been written into ({', '.join(written)}), and must be what students get"
        raise ValueError(f"{what}: keep yours in another place, and put the skeleton back, git checkout {file}")


def _unwritten_in(path: Path) -> set[str]:
    """Names of its functions and classes in which a NotImplementedError is raised."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    nodes = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    raised = ((node.name, each) for node in nodes for each in ast.walk(node) if isinstance(each, ast.Raise))
    return {name for name, each in raised if "NotImplementedError" in ast.unparse(each)}


def _with_imported(folders: set[str]) -> set[str]:
    texts = (path.read_text("utf-8") for folder in folders for path in (ROOT / folder).glob("*.py"))
    found = folders.union(*(re.findall(r"\bchapters\.(ch\d\d_\w+)", text) for text in texts))
    return found if found == folders else _with_imported(found)


def _files(path: Path) -> Iterator[Path]:
    if is_left_out(path):
        return
    if (REPOSITORY / path).is_dir():
        for entry in sorted((REPOSITORY / path).iterdir()):
            yield from _files(entry.relative_to(REPOSITORY))
    else:
        yield path


def is_left_out(path: Path) -> bool:
    """path: in the repository."""
    if any(parent.match(pattern) for parent in (path, *path.parents) for pattern in LEFT_OUT):
        return True
    is_test = path.parts[0] == "tests" and path.suffix == ".py"
    return is_test and TEACHERS_TESTS.search((REPOSITORY / path).read_text("utf-8")) is not None


def _write_broken_engines(folder: Path) -> None:
    """The files to repair, whole, where repair.py looks for them when it does not know what is wrong."""
    folder.mkdir()
    for number in repair.FILES:
        (folder / f"{number}.py").write_text(repair.broken_source(number), "utf-8")
        (folder / f"{number}_other.py").write_text(repair.broken_source(number, decoy=True), "utf-8")


def for_students(text: str, path: Path, there: set[Path]) -> str:
    """A page without what is for teachers, and without links to files that are not there, in this edition."""

    def is_gone(link: re.Match[str]) -> bool:
        target = (REPOSITORY / path.parent / link[2]).resolve()
        is_ours = target.exists() and target.is_relative_to(REPOSITORY)
        return is_ours and target.relative_to(REPOSITORY) not in there

    for title in SECTIONS.get(path.as_posix(), ()):
        text = re.sub(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    return LINK.sub(lambda link: link[1] if is_gone(link) else link[0], SENTENCES.sub("", text))
