"""The chapters there are, and what a student has done of them."""

import importlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from chapters.submission import NotLoaded, file_of, load_submission

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
    15: "Which weights does a token meet?",
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
    """What has been read, answered and solved, in the user's data folder."""

    def __init__(self) -> None:
        data_folder = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
        self.path = data_folder / "nanovllm" / "course.json"
        self._chapters: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError):  # none yet, or spoiled: begin anew
            self._chapters = dict(json.loads(self.path.read_text("utf-8")))

    def get(self, chapter: Chapter) -> dict[str, Any]:
        """read (bool), quiz ([right, of]) and solved (names of exercises); each may be missing."""
        return self._chapters.get(str(chapter.number), {})

    def note(self, chapter: Chapter, **what: Any) -> None:
        """Remember; written to another file first, so that no moment has half a file."""
        self._chapters[str(chapter.number)] = self.get(chapter) | what
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps(self._chapters, indent=1), "utf-8")
        temporary.replace(self.path)
