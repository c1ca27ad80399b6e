"""What an exercise asks for, in the page's type: the docstrings of exercise.py as paragraphs, lists and code.

One task is open at a time. A browser that does not know `name` of <details> lets all of them be open.
"""

import ast
import re
from dataclasses import dataclass
from html import escape
from textwrap import dedent

from markdown_it import MarkdownIt

from chapters.course import Chapter
from chapters.site.sources import highlighted

# Written as code in a docstring: a.b, a_b, f(x), [T, n], "stop", x == y; no other word has these signs inside.
CODE = re.compile(
    r"`(?P<quoted>[^`]+)`|"
    r"python -m chapters \w+ \d+"
    r"|\w*[a-z]\w*(?:\.[a-z]\w+)+(?:\([^()]*\))?"
    r"|\w+_\w+(?:\([^()]*\)|\[[^\]]*\])?"
    r"|\b[a-z]\w*\([^()]*\)"
    r"|\b(?:True|False|None)\b"
)
TERM = re.compile(r"(?P<name>\S(?:\S| (?! ))*) {2,}(?P<said>\S.*)")
MARKDOWN = MarkdownIt("zero").enable(["list", "backticks"])  # asterisks, brackets and < are themselves


@dataclass
class Task:
    name: str
    head: str  # "def allocate(manager: BlockManager, seq: Sequence) -> bool"
    text: str  # its docstring


def introduction_of(chapter: Chapter) -> str:
    """The docstring of exercise.py as HTML, without its first line, which says what the file is."""
    text = (ast.get_docstring(tree_of(chapter)) or "").partition("\n\n")[2]
    return html_of(re.sub(r"^Edit this file, then\n\n +(.*)\n\n", r"\1 ", text))


def tasks_of(chapter: Chapter) -> list[Task]:
    """The functions and classes of exercise.py that say what they must do, in its order."""
    source, found = source_of(chapter).splitlines(), []
    for node in tree_of(chapter).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef) or not (text := ast.get_docstring(node)):
            continue
        head = "\n".join(source[node.lineno - 1 : node.body[0].lineno - 1]).rstrip(":")
        found.append(Task(node.name, head, text))
    return found


def source_of(chapter: Chapter) -> str:
    return (chapter.folder / "exercise.py").read_text("utf-8")


def tree_of(chapter: Chapter) -> ast.Module:
    return ast.parse(source_of(chapter))


def asked(task: Task) -> str:
    """The head of the function, and what it must do."""
    head = highlighted(task.head, "python")
    return f'<pre class="code head highlight" tabindex="0"><code>{head}</code></pre>{html_of(task.text)}'


def html_of(docstring: str) -> str:
    """Paragraphs, lists, names with what they mean, and indented blocks as code."""
    return "".join(map(block, re.split(r"\n\s*\n", docstring.strip("\n"))))


def block(text: str) -> str:
    text, is_indented = dedent(text), text.startswith(" ")
    if terms := terms_of(text):
        said = "".join(f"<dt><code>{escape(name)}</code></dt><dd>{marked(what)}</dd>" for name, what in terms)
        return f"<dl>{said}</dl>"
    if is_indented:
        return f'<pre class="code highlight" tabindex="0"><code>{escape(text)}</code></pre>'
    return MARKDOWN.render(with_backticks(text))


def terms_of(text: str) -> list[tuple[str, str]]:
    """Names, each with what is said of it after two spaces or more and in further lines. [] if it is anything else."""
    terms = list[tuple[str, str]]()
    for line in text.split("\n"):
        found = TERM.fullmatch(line)
        if found:
            terms.append((found["name"], found["said"]))
        elif terms and line.startswith("      "):
            terms[-1] = terms[-1][0], f"{terms[-1][1]} {line.strip()}"
        else:
            return []
    return terms


def marked(line: str) -> str:
    return MARKDOWN.renderInline(with_backticks(line))


def with_backticks(text: str) -> str:
    """Names of the code as Markdown has code."""
    return CODE.sub(lambda found: f"`{found['quoted'] or found[0]}`", text)
