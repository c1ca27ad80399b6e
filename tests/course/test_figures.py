"""The list of a chapter's figures beside what prints them."""

from dataclasses import dataclass
from pathlib import Path

from chapters.course import find_chapter
from chapters.teaching.figures import find_figures, main

TEXT = """# Chapter 3: A test

It needs chapters 1 and 2. Nothing is 7 here, and `x = 8` is code.

```text lab
 tokens │ 2,168
```

```text output
0.540
```

A text takes 2,168 tokens, or 2168. The cosine is 0.540. A paper says 41 ([arXiv:1234.56789](https://arxiv.org/abs/1234.56789)).

- A list has 41 and
  0.540.

## Where to read on

A book of 1,999 pages.
"""


@dataclass
class Folder:
    folder: Path


def test_what_prints_a_figure(tmp_path):
    (tmp_path / "README.md").write_text(TEXT, "utf-8")
    assert [found.sources for found in find_figures(Folder(tmp_path))] == [
        {"7": "?"},
        {"2,168": "lab", "2168": "lab"},
        {"0.540": "code"},
        {"41": "?"},
        {"41": "?", "0.540": "code"},
    ]


def test_a_chapter(capsys):
    sources = dict(find_figures(find_chapter(1)))
    [parameters] = [found for sentence, found in sources.items() if "134,515,008" in sentence]
    assert parameters == {"134,515,008": "lab"}
    assert main(["1"]) == 0
    assert "134,515,008 lab" in capsys.readouterr().out
    assert main(["1", "99"]) == 2 and "99" in capsys.readouterr().err
