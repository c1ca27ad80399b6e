"""Words: the course's fixed words in a language, and which of its texts there are in it (TRANSLATING.md).

strings/en.json has the words of a chapter's pages and of the terminal; another language is a file beside it, with the
same keys. It is JSON because every Python reads that without a package, a page's script takes it as it is, and the
programs of translators know it. What is not translated is shown in English.
"""

import json
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from chapters.course import ROOT, TITLES, Chapter

STRINGS = ROOT / "strings"


class Words:
    """words("quiz.question", number=1, count=9)"""

    def __init__(self, language: str) -> None:
        self.language = language
        self.said: dict[str, Any] = json.loads((STRINGS / f"{language}.json").read_text("utf-8"))

    def __call__(self, key: str, **values: object) -> str:
        section, name = key.split(".")
        return filled(self.said[section][name], values, f"{key} in strings/{self.language}.json")

    def title(self, chapter: Chapter) -> str:
        """As its text has it: # Chapter 1: title"""
        text = translated(chapter.folder / "README.md", self.language)
        if text.name == "README.md":
            return TITLES[chapter.number]
        return title_of(text.read_text("utf-8"))


def filled(text: str, values: dict[str, Any], place: str) -> str:
    """A text of a translator with its values. Raises ValueError, which names the place, for other names in braces."""
    try:
        return text.format(**values)
    except (LookupError, ValueError) as error:
        names = ", ".join(f"{{{name}}}" for name in values) or "none"
        raise ValueError(f"{place}: {text!r} cannot be filled in ({error!r}); in braces there may be {names}") from None


def title_of(text: str) -> str:
    """Of a chapter's text, whatever colon its language has: # 第 1 章：标题"""
    return re.split(r"[:：]\s*", text.partition("\n")[0].lstrip("# "), maxsplit=1)[-1]


@cache
def words_of(language: str) -> Words:
    """Raises ValueError."""
    if language not in languages():
        raise ValueError(f"there is no language {language!r}; there are {', '.join(languages())}")
    return Words(language)


def languages() -> list[str]:
    """English first."""
    return ["en", *sorted(path.stem for path in STRINGS.glob("*.json") if path.stem != "en")]


ENGLISH = words_of("en")


def default_language() -> str:
    """What NANOVLLM_LANGUAGE names."""
    return os.environ.get("NANOVLLM_LANGUAGE") or "en"


def translated(path: Path, language: str) -> Path:
    """README.md -> README.de.md, if that is there."""
    other = path.with_suffix(f".{language}{path.suffix}")
    return other if other.exists() else path


def languages_of(chapter: Chapter) -> list[str]:
    """Those that its text is there in."""
    found = (name for name in languages()[1:] if (chapter.folder / f"README.{name}.md").exists())
    return ["en", *found]


def addressed(page: str, language: str) -> str:
    """index.html -> index.de.html"""
    return page if language == "en" else re.sub(r"\.html", f".{language}.html", page, count=1)


class Captions:
    """What a lab has told, in another language: story.de.json, a list of {"en": ..., "de": ...}.

    A name in braces stands for whatever the lab has put there: "{words} words" -> "{words} Wörter".
    """

    def __init__(self, folder: Path, language: str) -> None:
        path = self._path = translated(folder / "story.json", language)
        entries = json.loads(path.read_text("utf-8")) if path.name != "story.json" else []
        self._exact = {entry["en"]: entry[language] for entry in entries}
        self._patterns = [(pattern_of(en), other) for en, other in self._exact.items() if "{" in en]

    def __call__(self, text: str) -> str:
        """The text itself, if it has no translation."""
        if text in self._exact:
            return self._exact[text]
        for pattern, other in self._patterns:
            if found := pattern.fullmatch(text):
                return filled(other, found.groupdict(), f"{text!r} in {self._path}")
        return text


def pattern_of(text: str) -> re.Pattern:
    """A name that comes again stands for the same."""
    parts, names = re.split(r"\{(\w+)\}", text), set[str]()
    pattern = ""
    for at, part in enumerate(parts):
        if at % 2 == 0:
            pattern += re.escape(part)
        else:
            pattern += f"(?P={part})" if part in names else f"(?P<{part}>.+?)"
            names.add(part)
    return re.compile(pattern)
