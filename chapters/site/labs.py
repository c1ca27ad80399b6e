"""The labs and exercises that run the engine's own Python in the reader's browser."""

from pathlib import Path

from chapters.course import Chapter

SCRIPTS: tuple[str, ...] = ()
STYLES: tuple[str, ...] = ()


def lab_section(chapter: Chapter) -> str:
    """HTML of a lab that runs on the page; "" where the chapter has none."""
    return ""


def exercises_section(chapter: Chapter) -> str:
    """HTML of the exercises that are checked on the page; "" where the chapter has none."""
    return ""


def write_lab_files(folder: Path, offline: bool) -> None:
    """What the labs load: scripts, the engine's files and, offline, the runtime."""
