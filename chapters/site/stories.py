"""The labs that need a model, as the pages show them: what `lab N --plain` printed, recorded in the chapter's folder."""

import contextlib
import html
import io
import re

from chapters.course import Chapter
from chapters.site.text import marked
from chapters.story import WIDTH, Story

PART = re.compile(r"^(\d+\. .*?) ─+$")  # what Story.part prints

NOTE = """<p class="note">This is a recording of <code>python -m chapters lab {number} --plain</code>. Lines with a bar and the
word <span class="measured">(measured)</span> have the times of the machine on which it was recorded; yours will print
others. Everything else is the same wherever the lab runs.</p>"""

def record(chapter: Chapter) -> None:
    """Run the lab here, and keep what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        chapter.module("lab").tell(Story(plain=True))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    (chapter.folder / "story.txt").write_text("\n".join(lines).strip() + "\n", "utf-8")


def story_html(chapter: Chapter) -> str:
    """The recorded story: its parts as headings, what was said as paragraphs, what was drawn as it was printed."""
    lines = (chapter.folder / "story.txt").read_text("utf-8").splitlines()
    body, block = [NOTE.format(number=chapter.number)], []
    for line in [*lines, ""]:
        title = PART.match(line)
        if title:
            body.append(f"<h3>{html.escape(title[1])}</h3>")
        elif line:
            block.append(line)
        elif block:
            body.append(paragraph(block) if is_said(block) else drawn(block))
            block = []
    return "\n".join(body)


def is_said(block: list[str]) -> bool:
    """A paragraph: no picture in it, and each of its lines so full that the next word had no room."""
    text = "\n".join(block)
    if re.search(r"  |[─-◿]", text.strip()) or text.startswith(" "):
        return False
    pairs = zip(block, block[1:], strict=False)
    return all(len(line) + 1 + len(after.split(" ")[0]) > WIDTH for line, after in pairs)


def paragraph(block: list[str]) -> str:
    text = html.escape(" ".join(block))
    return f'<p class="measured">{text}</p>' if "(measured)" in text else f"<p>{text}</p>"


def drawn(block: list[str]) -> str:
    return f'<pre class="printed" tabindex="0">{marked(chr(10).join(block))}</pre>'
