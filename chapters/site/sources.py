"""The files of the repository: which of them are pages of the site, and where in them something is defined.

Texts are pages; a file or folder that a text links to becomes one as well, with an anchor #L12 for each line.
"""

import ast
import html
import posixpath
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name, get_lexer_for_filename
from pygments.util import ClassNotFound

from chapters.course import ROOT as CHAPTERS

ROOT = CHAPTERS.parent
# Texts of the course -> their names in the site, without .html
TEXTS = {"README.md": "readme", "chapters/README.md": "index"}
TEXTS |= {f"chapters/{name}.md": name for name in ("one_request", "from_nano_vllm", "add_a_wing")}
TEXTS |= {f"chapters/{name}/README.md": f"{name}/index" for name in ("nano_engine", "capstone")}
if (CHAPTERS / "INSTRUCTOR.md").exists():  # not in a student's edition
    TEXTS["chapters/INSTRUCTOR.md"] = "instructor"
TEXTS |= {  # README.de.md is the same chapter in German
    f"chapters/{text.parent.name}/{text.name}": f"{text.parent.name}/{text.stem.replace('README', 'index')}"
    for text in sorted(CHAPTERS.glob("ch[0-9][0-9]_*/README*.md"))
}
for folder in ("examples", "nanovllm", "tests"):
    for readme in sorted((ROOT / folder).rglob("README.md")):
        place = readme.parent.relative_to(ROOT).as_posix()
        TEXTS[f"{place}/README.md"] = f"{place}/index"


def highlighted(code: str, language: str = "", filename: str = "") -> str:
    """HTML of the code, a line for a line. Pygments ends every element at the end of its line."""
    try:
        lexer = get_lexer_for_filename(filename) if filename else get_lexer_by_name(language)
    except ClassNotFound:
        lexer = TextLexer()
    lexer.stripnl = False
    return highlight(code, lexer, HtmlFormatter(nowrap=True)).rstrip("\n")


def node_of(path: str, symbol: str) -> ast.stmt:
    """The definition of a class, function, method or module-level constant. Raises LookupError."""
    body: list = parsed((ROOT / path).read_text("utf-8")).body
    for name in symbol.split("."):
        for node in body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])  # of an assignment
            if name in [getattr(node, "name", None), *(getattr(target, "id", None) for target in targets)]:
                found, body = node, getattr(node, "body", [])
                break
        else:
            raise LookupError(f"{path} has no {symbol}")
    return found


@cache
def parsed(source: str) -> ast.Module:
    """Texts name hundreds of definitions, many of them of the same file."""
    return ast.parse(source)


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


def c_function(path: str, symbol: str) -> re.Match:
    """Raises LookupError."""
    function = re.search(rf"^\w[^\n]*\b{symbol}\(.*?^\}}", (ROOT / path).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    if function is None:
        raise LookupError(f"{path} has no {symbol}")
    return function


def line_of(path: str, symbol: str) -> int:
    if path.endswith(".py"):
        return first_line(node_of(path, symbol))
    function = c_function(path, symbol)
    return function.string.count("\n", 0, function.start()) + 1


def relative(target: str, page_path: str) -> str:
    """The way from one page of the site to another, or to a file of it."""
    return posixpath.relpath(target, posixpath.dirname(page_path) or ".")


class Sources:
    """Collects what is linked to; pages() makes a page of each file, and a list of each folder."""

    def __init__(self) -> None:
        self.wanted: set[str] = set()

    def place_of(self, path: str) -> str:
        """The site's path for a file or folder of the repository. Raises FileNotFoundError."""
        if path in TEXTS:
            return f"{TEXTS[path]}.html"
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"a text links to {path}, which is not there")
        self.wanted.add(path)
        return f"source/{path}/index.html" if (ROOT / path).is_dir() else f"source/{path}.html"

    def pages(self) -> Iterator[tuple[str, str, str]]:
        """The name, title and HTML of each. What a folder's list links to becomes a page, too."""
        done: set[str] = set()
        while todo := sorted(self.wanted - done):
            for path in todo:
                place = self.place_of(path)
                body = self.list_of(path, place) if (ROOT / path).is_dir() else source_body(path)
                yield place.removesuffix(".html"), path, f"<h1><code>{html.escape(path)}</code></h1>{body}"
            done.update(todo)

    def list_of(self, path: str, place: str) -> str:
        files = [file.relative_to(ROOT).as_posix() for file in sorted((ROOT / path).rglob("*")) if is_text(file)]
        items = [f'<li><a href="{relative(self.place_of(file), place)}">{file}</a></li>' for file in files]
        return f'<ul class="files">{"".join(items)}</ul>'


def is_text(file: Path) -> bool:
    return file.suffix in (".py", ".c", ".h", ".md", ".toml") and file.stat().st_size > 0


def source_body(path: str) -> str:
    lines = highlighted((ROOT / path).read_text("utf-8"), filename=path).split("\n")
    numbered = "\n".join(f'<span class="line" id="L{n}">{line}</span>' for n, line in enumerate(lines, start=1))
    return f'<div class="highlight"><pre class="numbered" tabindex="0"><code>{numbered}</code></pre></div>'
