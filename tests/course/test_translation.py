"""Translations: nothing is missing, and what is no prose is as in English."""

import io
import json
import re
import string

import pytest

from chapters import quiz
from chapters.__main__ import main
from chapters.recording import Recording
from chapters.sheet import Histogram
from chapters.words import ENGLISH, STRINGS, Captions, Words, languages, languages_of, pattern_of, title_of, words_of
from tests.course.course_text import CHAPTERS, FENCE, text_of

OTHERS = languages()[1:]
EDITIONS = [(chapter, language) for chapter in CHAPTERS for language in languages_of(chapter)[1:]]
NOT_GERMAN = next(chapter for chapter in CHAPTERS if "de" not in languages_of(chapter))
for_each_edition = pytest.mark.parametrize(
    ("chapter", "language"), EDITIONS, ids=[f"{chapter.folder.name[:4]}-{language}" for chapter, language in EDITIONS]
)
SAME = "page.tab_index page.tab_quiz quiz.title model.its_text progress.quiz".split()  # in German, too
UNTRANSLATED = re.compile(r"'.*|[\d.,]+ (ms|MB|GB)( \(measured\))?|\w+\.py|[A-Z][\w.]*-[\w.-]+|GFLOP|MLP|MB|q · k")


def names_in(text: str) -> list[str]:
    return sorted(name for _, name, _, _ in string.Formatter().parse(text) if name)


def leaves(said: dict, path: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in said.items():
        found |= leaves(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return found


def test_german_is_there():
    assert "de" in OTHERS and (1, "de") in [(chapter.number, language) for chapter, language in EDITIONS]


@pytest.mark.parametrize("language", OTHERS)
def test_fixed_words(language):
    """The same keys, and the same names in braces; nothing is left in English but what is the same word."""
    english, other = leaves(ENGLISH.said), leaves(words_of(language).said)
    assert list(other) == list(english), f"strings/{language}.json has other keys than en.json, or in another order"
    for key, text in english.items():
        assert names_in(other[key]) == names_in(text), f"{key} in strings/{language}.json has other names in braces"
        assert other[key] != text or key in SAME, f"{key} in strings/{language}.json is English"


def test_words_that_are_used_are_there():
    """Every key that the code names, and every key is named."""
    keys = set(leaves(ENGLISH.said)) - {"language"}
    code = "\n".join(path.read_text("utf-8") for path in STRINGS.parent.rglob("*.py"))
    scripts = "\n".join(path.read_text("utf-8") for path in (STRINGS.parent / "site").rglob("*.js"))
    said = set(re.findall(r"[\"'](\w+\.\w+)[\"']", code)) | {
        f"script.{name}" for name in re.findall(r"WORDS\.(\w+)", scripts)
    }
    said |= {f"page.tab_{name}" for name in ("index", "quiz", "lab", "exercises")}
    said |= {f"expect.{name}" for name in ("asks", "expect", "show")}
    said |= {f"progress.{name}" for name in ("chapter", "minutes", "read", "quiz", "exercises")}
    assert keys <= said, f"nobody says {sorted(keys - said)}"
    assert set(re.findall(r"WORDS\.(\w+)", scripts)) == {*ENGLISH.said["script"], "type_a_number", "score"}


def figures_of(text: str) -> list[str]:
    return sorted(re.findall(r"\d[\d.,]*\d|\d", text))


def pieces(text: str) -> dict[str, list]:
    """What a translation leaves as it is. Code in the prose is compared as a set: sentences are built otherwise."""
    prose = FENCE.sub("", text)
    fences = [(block["info"], block["text"]) for block in FENCE.finditer(text)]
    return {
        "headings": re.findall(r"^(#+) ", prose, re.MULTILINE),
        "blocks": [(info, code if info not in ("text", "mermaid") else code.count("\n")) for info, code in fences],
        "quoted symbols": re.findall(r"^\*\*\[`.*$", prose, re.MULTILINE),
        "links": re.findall(r"\]\((.*?)\)", prose),
        "list items": re.findall(r"^- ", prose, re.MULTILINE),
        "questions": re.findall(r"^> \*\*", prose, re.MULTILINE),
        "code in the prose": sorted({" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)}),
        "figures": figures_of(re.sub(r"\]\(.*?\)|`[^`]+`", "", prose)),
    }


@for_each_edition
def test_a_text_has_followed(chapter, language):
    english = pieces(text_of(chapter))
    other = pieces((chapter.folder / f"README.{language}.md").read_text("utf-8"))
    for kind, expected in english.items():
        found = other[kind]
        missing = [each for each in expected if each not in found or found.count(each) < expected.count(each)]
        extra = [each for each in found if each not in expected or found.count(each) > expected.count(each)]
        what = f"README.{language}.md of chapter {chapter.number} does not have the {kind} of README.md"
        assert found == expected, f"{what}: missing {missing[:3]}, extra {extra[:3]}"


def test_a_translation_that_has_not_followed_is_noticed():
    before = "# T\n\nA step takes 3 ms, see [x](y.py).\n\n```python\nx = 1\n```\n"
    for change in (("3 ms", "4 ms"), ("y.py", "z.py"), ("x = 1", "x = 2"), ("\n\nA", "\n\n## New\n\nA")):
        assert pieces(before) != pieces(before.replace(*change)), change
    assert pieces(before) == pieces(before.replace("A step takes", "Ein Schritt dauert"))


@for_each_edition
def test_a_quiz_has_followed(chapter, language):
    for english, other in zip(quiz.load(chapter), quiz.load(chapter, language), strict=True):
        assert english.keys() == other.keys() and english.get("answer") == other.get("answer")
        assert other["ask"] != english["ask"] and other["why"] != english["why"]
        assert figures_of(english["ask"]) == figures_of(other["ask"]), other["ask"]
        assert english.get("wrong", {}).keys() == other.get("wrong", {}).keys(), other["ask"]
        for option, text in zip(english.get("options", []), other.get("options", []), strict=True):
            assert option.keys() == text.keys() and option.get("right") == text.get("right"), text["text"]


@for_each_edition
def test_captions(chapter, language):
    """Everything that the lab has told has a translation, with the same figures."""
    captions = Captions(chapter.folder, language)
    entries = json.loads((chapter.folder / f"story.{language}.json").read_text("utf-8"))
    for entry in entries:
        assert set(names_in(entry["en"])) == set(names_in(entry[language])), entry["en"]
    told: list[str] = []
    for kind, what in Recording(chapter.folder).told:
        if kind == "table":
            told += [what["title"], *what["columns"], *(cell for row in what["rows"] for cell in row)]
        else:
            told.append(what if kind != "histogram" else Histogram(**what).title)
    for text in told:
        if re.search(r"[^\W\d_]{2}", text) and not UNTRANSLATED.fullmatch(text):
            same = any(entry["en"] == entry[language] == text for entry in entries)
            assert captions(text) != text or same, f"story.{language}.json of chapter {chapter.number} lacks {text!r}"
        assert figures_of(captions(text)) == figures_of(text), text
    unused = [entry["en"] for entry in entries if not any(map(pattern_of(entry["en"]).fullmatch, told))]
    assert not unused, f"the lab does not say this any more: {unused[:3]}"


def test_the_terminal(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", io.StringIO("49152\n" * 50))
    assert main(["quiz", "1", "--language", "de"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "Kapitel 1: Was ist LLM-Inferenz?, 9 Fragen" in said and "Richtig. Einen für jeden Eintrag" in said
    assert main(["read", "1", "--language", "de"]) == 0 and "Der Schreiber und das Handbuch" in capsys.readouterr().out
    assert main(["read", "1", "--short", "--language", "de"]) == 0
    said = capsys.readouterr().out
    assert "Nach diesem Kapitel" in said and "Der kurze Weg" in said and "Der lange Weg" not in said
    assert said.index("Welches der beiden") < said.rindex("Antworten  ") < said.index("Nach einem langen Prompt")
    monkeypatch.setenv("NANOVLLM_LANGUAGE", "de")
    assert main([]) == 0
    assert "Was ist LLM-Inferenz?" in (said := capsys.readouterr().out) and NOT_GERMAN.title in said
    assert main(["read", str(NOT_GERMAN.number)]) == 0
    assert f"Chapter {NOT_GERMAN.number}: {NOT_GERMAN.title}" in capsys.readouterr().out, "English, chapter by chapter"
    assert main(["read", str(NOT_GERMAN.number), "--short"]) == 0 and "Answers" in capsys.readouterr().out
    monkeypatch.setenv("NANOVLLM_LANGUAGE", "xx")
    assert main([]) == 2 and f"there is no language 'xx'; there are {', '.join(languages())}" in capsys.readouterr().err


@for_each_edition
def test_a_title_is_there(chapter, language):
    assert words_of(language).title(chapter)


def test_titles():
    """Whatever stands between the chapter's number and its title."""
    assert title_of("# Kapitel 2: Was: ist?\n\nText") == "Was: ist?"
    assert title_of("# 第 2 章：架构\n") == "架构"
    assert title_of("# 架构\n") == "架构"


def test_words_without_a_text_are_english():
    german = Words("de")
    assert german.title(CHAPTERS[0]) == "Was ist LLM-Inferenz?" and german.title(NOT_GERMAN) == NOT_GERMAN.title
    assert Captions(NOT_GERMAN.folder, "de")("Nothing is said.") == "Nothing is said."


@pytest.mark.parametrize("text", ["Kapitel {nummer}", "Kapitel {", "Kapitel {}"])
def test_a_wrong_name_in_braces_is_told(tmp_path, text):
    words = Words("de")
    words.said = {"page": {"chapter": text}}
    with pytest.raises(ValueError, match=r"page.chapter in strings/de.json: .* may be \{number\}"):
        words("page.chapter", number=1)
    (tmp_path / "story.json").write_text("[]")
    (tmp_path / "story.de.json").write_text(json.dumps([{"en": "chapter {number}", "de": text}]), "utf-8")
    with pytest.raises(ValueError, match=r"story.de.json: .* may be \{number\}"):
        Captions(tmp_path, "de")("chapter 1")
