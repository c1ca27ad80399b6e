"""What `lab N --plain` printed, recorded in the chapter's folder (story.txt): on a page, a lab that needs a model."""

import contextlib
import html
import io
import re
from itertools import pairwise

from chapters.course import Chapter
from chapters.site.scenes import PART, Scenes
from chapters.site.text import Text, marked
from chapters.story import WIDTH, Story

NOTE = """<p class="note">This is a recording of <code>python -m chapters lab {number} --plain</code>. The lines marked
<span class="measured">like this (measured)</span> have the numbers of the machine on which it was recorded; yours will
print others.</p>"""


def record(chapter: Chapter) -> None:
    """Run the lab here, and keep what it prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        chapter.module("lab").tell(Story(plain=True))
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    (chapter.folder / "story.txt").write_text("\n".join(lines).strip() + "\n", "utf-8")


def story_of(chapter: Chapter, scenes: Scenes) -> Text:
    """The recorded story: its parts as headings, what was said as paragraphs, what was drawn as it was printed."""
    text, block = Text(chapter.title), []
    body = [NOTE.format(number=chapter.number)]
    for line in [*(chapter.folder / "story.txt").read_text("utf-8").splitlines(), ""]:
        if title := PART.match(line):
            text.headings.append((f"part-{len(text.headings) + 1}", html.escape(title[1])))
            body.append('<h2 id="{}">{}</h2>'.format(*text.headings[-1]))
            body.append(scenes.back_from_part(len(text.headings)))
        elif line:
            block.append(line)
        elif block:
            body.append(paragraph(block) if is_said(block) else drawn(block))
            block = []
    text.body = "\n".join(body)
    return text


def is_said(block: list[str]) -> bool:
    """A paragraph: no picture in it, and each of its lines so full that the next word had no room."""
    text = "\n".join(block)
    if re.search(r"  |[─-◿]", text.strip()) or text.startswith(" "):
        return False
    return all(len(line) + 1 + len(after.split(" ")[0]) > WIDTH for line, after in pairwise(block))


def paragraph(block: list[str]) -> str:
    text = html.escape(" ".join(block))
    return f'<p class="measured">{text}</p>' if "(measured)" in text else f"<p>{text}</p>"


def drawn(block: list[str]) -> str:
    return f'<pre class="printed" tabindex="0">{marked(chr(10).join(block))}</pre>'
