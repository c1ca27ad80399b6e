"""The chapters there are, and what a student has done of them."""

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from chapters.submission import NotLoaded, file_of, load_submission
from nanovllm.files.hub import user_folder

ROOT = Path(__file__).parent
PART_TWO = 12  # its first chapter
TITLES = {
    1: "What is LLM inference?",
    2: "Architecture",
    3: "The KV cache",
    4: "PagedAttention",
    5: "The scheduler",
    6: "Prefill and decode",
    7: "Prefix caching",
    8: "Sampling",
    9: "Tensor parallelism",
    10: "The optimization stack",
    11: "Benchmarks",
    12: "Fewer bits",
    13: "Guess and check",
    14: "Many users",
    15: "Which weights does a request meet?",
    16: "Memory that does not grow",
    17: "Which experts does a token meet?",
}
EXERCISES = {  # names of the TASKS in each checks.py: to ask there takes torch
    1: "causal_attention greedy_loop".split(),
    2: "engine_step stream_text".split(),
    3: "pool_blocks window_slots write_kv".split(),
    4: "allocate append_slots free".split(),
    5: "finish_reason preempt_last schedule".split(),
    6: "step_cost pack token_budget".split(),
    7: "hash_block allocate_with_prefix register_prefix take_fresh next_run".split(),
    8: "keep_top_p min_p_probs draw allowed_tokens".split(),
    9: "row_parallel_forward embed read_share".split(),
    10: "fold attend attend_in_parts pad_decode".split(),
    11: "summarize audit serve".split(),
    12: "quantize restore group_dot quantized_linear unpack_words".split(),
    13: "guess accept_tokens share_guesses resume".split(),
    14: "abort admit route provision".split(),
    15: "add_adapters slot_for id_of_weights".split(),
    16: "delta_chunk plan_snapshots read_guesses".split(),
    17: "assign_experts meet_experts".split(),
}


@dataclass(frozen=True)
class Chapter:
    number: int
    folder: Path

    @property
    def title(self) -> str:
        return TITLES[self.number]

    def module(self, name: str) -> ModuleType:
        """lab, checks, exercise or solution."""
        return importlib.import_module(f"chapters.{self.folder.name}.{name}")

    def submission(self, path: Path) -> ModuleType:
        """A student's exercise.py from anywhere. Raises NotLoaded."""
        try:
            source = path.read_bytes()
        except OSError as error:
            raise NotLoaded(f"{file_of(path)} cannot be read: {error.strerror}") from error
        return load_submission(source, str(path), f"chapters.{self.folder.name}.submission")


def all_chapters() -> list[Chapter]:
    return [Chapter(int(folder.name[2:4]), folder) for folder in sorted(ROOT.glob("ch[0-9][0-9]_*"))]


def find_chapter(number: int) -> Chapter:
    """Raises ValueError."""
    chapters = {chapter.number: chapter for chapter in all_chapters()}
    if number not in chapters:
        raise ValueError(f"there is no chapter {number}; there are {', '.join(map(str, chapters))}")
    return chapters[number]


class Progress:
    """What has been read, answered and solved, in the user's data folder.

    problem: why it cannot be kept; empty while it can. The course goes on without, so nothing is raised.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._chapters: dict[str, dict[str, Any]] = {}
        try:
            self.path = user_folder("XDG_DATA_HOME", ".local/share") / "course.json"
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._chapters = read_progress(self.path)
        except OSError as error:
            self.problem = str(error)

    def get(self, chapter: Chapter) -> dict[str, Any]:
        """Each may be missing: read and short (bool: the text, and its short path), quiz ([right, of]), solved (names
        of exercises), machine (its speeds)."""
        return self._chapters.get(str(chapter.number), {})

    def note(self, chapter: Chapter, **what: Any) -> None:
        """Remember, beside what other terminals have noted meanwhile. Of quizzes the best is kept, at most all of the
        questions that there are now. solved: {exercise: is it solved?} of those with a verdict; others stay."""
        if self.problem:
            return
        try:
            with locked(self.path.with_suffix(".lock")):
                self._chapters = read_progress(self.path)
                before = self.get(chapter)
                if "quiz" in what and "quiz" in before:
                    num_right, num_questions = what["quiz"]
                    what["quiz"] = [min(max(num_right, before["quiz"][0]), num_questions), num_questions]
                if "solved" in what:
                    others = [name for name in before.get("solved", []) if name not in what["solved"]]
                    what["solved"] = others + [name for name, is_solved in what["solved"].items() if is_solved]
                self._chapters[str(chapter.number)] = before | what
                temporary = self.path.with_suffix(f".{os.getpid()}")  # so that no moment has half a file
                temporary.write_text(json.dumps(self._chapters, indent=1), "utf-8")
                temporary.replace(self.path)
        except OSError as error:
            self.problem = str(error)


def read_progress(path: Path) -> dict[str, dict[str, Any]]:
    """What of this file is as Progress writes it, entry by entry; the rest is as if it were not there."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {number: _known(entry) for number, entry in found.items() if isinstance(entry, dict)}


def _known(entry: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    quiz, solved = entry.get("quiz"), entry.get("solved")
    kept |= {name: entry[name] for name in ("read", "short") if isinstance(entry.get(name), bool)}
    if isinstance(quiz, list) and len(quiz) == 2 and all(type(n) is int and 0 <= n < 1000 for n in quiz):
        kept["quiz"] = quiz
    if isinstance(solved, list) and all(isinstance(name, str) for name in solved):
        kept["solved"] = solved
    machine = entry.get("machine")
    if isinstance(machine, dict) and machine and all(type(speed) is float and speed > 0 for speed in machine.values()):
        kept["machine"] = machine
    return kept


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process is in here. Where a file system has no locks, this waits for nobody."""
    with path.open("wb") as file:
        with suppress(ImportError, OSError):  # a browser's Python has none
            from nanovllm.files.system import lock_file

            lock_file(file.fileno())
        yield
