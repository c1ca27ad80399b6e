"""Between a chapter's text and its lab: from a paragraph to the scene that shows it, and from the scene back.

A text names a scene of a lab that runs in the page, by its title: *In the lab: A notebook fills.* What a text quotes of
a recorded lab leads to the part of the recording that it is from.
"""

import html
import re
from dataclasses import dataclass, field
from itertools import pairwise

from markdown_it.token import Token

from chapters.course import Chapter
from chapters.recording import Recording, bare, lines_of
from chapters.site.runtime import CHAPTERS
from chapters.words import ENGLISH, Words, addressed

NAMES_A_SCENE = "In the lab: "


@dataclass
class Scenes:
    """Of one lab. links: title of a scene -> its place on lab.html; parts: of the recording, the words of each.

    While the text is rendered, `named` gets the id of the paragraph that names a scene, and `quoted` the ids and
    headings of the sections that quote a part (by its number, from 1 on).
    """

    links: dict[str, str] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)
    named: dict[str, str] = field(default_factory=dict)
    quoted: dict[int, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, chapter: Chapter) -> "Scenes":
        scenes = cls()
        if chapter.folder.name in CHAPTERS:
            scenes.links = {scene.title: scene.link.replace(" ", "+") for scene in chapter.module("page").SCENES}
        for kind, what in Recording(chapter.folder).told:
            if kind == "part":
                scenes.parts.append("")
            elif scenes.parts:
                scenes.parts[-1] += "\n".join(lines_of(kind, what)) + "\n"
        return scenes

    def link(self, inline: Token) -> None:
        """Where a title stands in this line of a text, a link to the scene. Raises LookupError for an unknown title."""
        children = inline.children or []
        for before, child in pairwise(children):
            if before.type != "em_open" or not child.content.startswith(NAMES_A_SCENE):
                continue
            title = child.content.removeprefix(NAMES_A_SCENE).rstrip(".")
            if title not in self.links:
                raise LookupError(f"a text names the scene {title!r}; the lab has {', '.join(self.links) or 'none'}")
            name = self.named.setdefault(title, f"scene-{len(self.named) + 1}")
            link = f'<a id="{name}" href="lab.html#{html.escape(self.links[title])}">{html.escape(title)}</a>.'
            child.type, child.content = "html_inline", NAMES_A_SCENE + link

    def caption(self, tokens: list[Token], at: int, words: Words = ENGLISH) -> str:
        """Of what token `at` quotes from the lab."""
        lines = [found for line in tokens[at].content.splitlines() if masked(found := bare(line)).strip("# ")]
        # What was measured is another number in each recording. Of parts that are alike but for numbers, theirs decide.
        shared = [
            (sum(masked(line).strip("# ") in alike for line in lines), sum(line in part for line in lines))
            for part, alike in zip(self.parts, map(masked, self.parts), strict=True)
        ]
        if not shared or 2 * max(shared)[0] < len(lines):
            return words("page.from_the_lab")
        number = shared.index(max(shared)) + 1
        headings = [i for i in range(at) if tokens[i].type == "heading_open" and tokens[i].tag == "h2"]
        if headings:
            heading = "".join(child.content for child in tokens[headings[-1] + 1].children or [])
            self.quoted.setdefault(number, {})[str(tokens[headings[-1]].meta["id"])] = heading
        place, said = addressed("lab.html", words.language), words("page.from_part", number=number)
        return f'<a href="{place}#part-{number}">{said}</a>'

    def back_from(self, title: str) -> str:
        """To the paragraph that names this scene."""
        return (
            f' <a class="to-text" href="index.html#{self.named[title]}">in the text</a>' if title in self.named else ""
        )

    def back_from_part(self, number: int, words: Words = ENGLISH) -> str:
        """To the sections that quote this part of the recording."""
        found, place = self.quoted.get(number, {}).items(), addressed("index.html", words.language)
        links = ", ".join(f'<a href="{place}#{name}">{html.escape(heading)}</a>' for name, heading in found)
        return f'<p class="to-text">{words("page.in_the_text")}: {links}</p>' if links else ""


def masked(text: str) -> str:
    """With # for each number."""
    return re.sub(r"\d[\d.,]*", "#", text)
