"""The five broken engines: what users complain about, the broken file to hand out, and the grade of a repaired one."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from chapters.capstone.case import read_case
from chapters.course import ROOT
from chapters.runner import Lost, Run
from chapters.submission import readable

LIMIT_S = 120.0
READY = Path(__file__).with_name("broken")  # in a student's edition, whose faults.py is left out
FILES = {
    1: "core/sequence.py",
    2: "core/block_manager.py",
    3: "core/scheduler.py",
    4: "core/scheduler.py",
    5: "worker/sampler.py",
}


MOST_LINES = {1: 6, 2: 6, 3: 5, 4: 5, 5: 2}  # of a case; ours have two or three fewer


class Checked(NamedTuple):
    """title: of the check. problem: empty if it passed."""

    title: str
    problem: str


def sound_source(number: int) -> str:
    return (ROOT.parent / "nanovllm" / FILES[number]).read_text("utf-8")


def broken_source(number: int, decoy: bool = False) -> str:
    """The engine's file, with the fault. Raises ValueError if there is no such engine.

    decoy: with another fault instead, which a case must not show.
    """
    if number not in FILES:
        raise ValueError(f"there are broken engines 1 to {len(FILES)}, found {number}")
    if (ready := READY / f"{number}{'_other' if decoy else ''}.py").exists():
        return ready.read_text("utf-8")
    from chapters.capstone.faults import DECOYS, FAULTS

    source, fault = sound_source(number), (DECOYS if decoy else FAULTS)[number]
    assert source.count(fault.old) == 1, f"fault {number}: its place in {FILES[number]} has changed"
    return source.replace(fault.old, fault.new)


def complain(number: int, console: Console) -> int:
    """Show what users of this engine see."""
    try:
        lines = returned_by("complain", number, broken_source(number), number=number)
    except Lost as lost:
        console.print(str(lost), markup=False, style="dim")
        return 1
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    command = f"python -m chapters capstone broken {number}"
    console.print(
        f"\nThe fault is in one file:  {command} --out FOLDER\nRepaired?  {command} --check FILE --case FILE",
        markup=False,
    )
    return 0


def write(number: int, folder: Path, console: Console) -> int:
    source = broken_source(number)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{number}_{Path(FILES[number]).name}"
    if file.exists():
        raise ValueError(f"{readable(file)} is there already; it may have somebody's work in it")
    file.write_text(source, "utf-8")
    console.print(f"{readable(file)} stands for nanovllm/{FILES[number]}", markup=False, soft_wrap=True)
    return 0


def check(number: int, file: Path, case: Path | None, console: Console) -> int:
    """Grade a repaired file, and the case that shows its fault. Both are needed: the engine's own file is a repair."""
    if case is None:
        found = [Checked("its case", "a repair can be copied; --case FILE shows that you know the cause (case.py)")]
    else:
        found = grade_case(number, text_in(case))
    results = [*grade(number, text_in(file)), *found]
    for title, problem in results:
        console.print(f"  {'x' if problem else '+'} {title}", style="red" if problem else "green", markup=False)
        if problem:
            console.print(f"    {readable(problem)}", markup=False, soft_wrap=True)
    return 1 if any(problem for _, problem in results) else 0


def text_in(path: Path) -> str:
    """Of a student's file, without the mark that some editors of Windows begin it with. Raises ValueError."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{readable(path)} is not UTF-8 text: save it as UTF-8") from None


def grade(number: int, source: str) -> list[Checked]:
    why, results = "some are missing", list[Checked]()
    try:
        results = [Checked(*each) for each in returned_by("check", number, source, number=number)]
    except Lost as lost:
        why = str(lost)
    if [found.title for found in results] != titles_of(number):
        results.append(Checked("the checks come to their end, each of them", why))
    return results


def titles_of(number: int) -> list[str | None]:
    from chapters.capstone.battery import BATTERIES

    return [check.__doc__ for check in BATTERIES[number]]


def grade_case(number: int, text: str) -> list[Checked]:
    """Does this case (case.py) show the fault, this one alone, and nothing that is not needed? No code of a student's
    runs here: the engines are the sound one, the broken one, and one with another fault."""
    lines = read_case(text)
    sources = sound_source(number), broken_source(number), broken_source(number, decoy=True)
    sound, broken, other = (seen_with(number, source, text) for source in sources)
    if isinstance(sound, str):
        return [Checked("the case can be read", sound)]
    differs = next((pair for pair in zip(sound, broken, strict=False) if pair[0] != pair[1]), None)
    same = "the sound engine and the broken one show the same"
    shows = "" if differs or len(sound) != len(broken) else same
    apart = "" if other == sound else "an engine with another fault fails it, too: which of the two have you found?"
    most = MOST_LINES[number]
    short = "" if len(lines) <= most else f"{most} lines are enough, found {len(lines)}"
    return [
        Checked("the case can be read", ""),
        Checked("the broken engine shows something else than the sound one", shows),
        Checked("an engine with another fault does not", apart),
        Checked("it is short", short),
    ]


def seen_with(number: int, source: str, text: str) -> list[str] | str:
    """What case.see() returns in this engine; or why the case cannot be read."""
    try:
        return returned_by("play", number, source, case=text)
    except Lost as lost:
        return str(lost)


def returned_by(what: str, engine: int, source: str, **arguments: Any) -> Any:
    """What this function of repaired.py returns, with this source in place of the engine's file. Raises Lost."""
    module = f"nanovllm.{FILES[engine].removesuffix('.py').replace('/', '.')}"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / Path(FILES[engine]).name
        file.write_text(source, "utf-8")
        run = Run(f"chapters.capstone.repaired:{what}", module=module, file=str(file), **arguments)
        try:
            return run.hear(LIMIT_S)
        except Lost as lost:
            raise Lost(f"{lost}\n{run.printed()}".strip()) from None
        finally:
            run.end()
