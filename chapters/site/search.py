"""Search over the course: an index made with the site, and a page that looks through it. No server has a part in it."""

import html
import json
import re

HEADING = re.compile(r'<h[23] id="([^"]+)">(.*?)</h[23]>')
TASK = re.compile(r'<details (?:name="task"|class="(?:about|whole)").*?</details>|<div lang="en">.*?</div>', re.DOTALL)
HIDDEN = re.compile(r"<(script|style|template|noscript|textarea|button|label)\b.*?</\1>", re.DOTALL)

SEARCH = """<main id="content" class="single search"><h1>Search</h1>
<noscript><p class="note">The search needs JavaScript.</p></noscript>
<form role="search"><label>Find all of these words
<input type="search" name="q" autocomplete="off" spellcheck="false"></label> <button>Search</button></form>
<p class="num-found" role="status"></p>
<ol class="found"></ol>
</main>"""


class Index:
    """The sections of the pages: where each is, its page's title, its heading, and its words."""

    def __init__(self) -> None:
        self.sections: list[tuple[str, str, str, str]] = []

    def add(self, path: str, title: str, body: str) -> None:
        """A page. What stands before its first heading is a section, too. Tasks are left out: the text comes first."""
        parts = HEADING.split(HIDDEN.sub(" ", TASK.sub(" ", body)))  # text, then id, heading, text of each section
        if words := words_of(parts[0]):
            self.sections.append((path, title, "", words))
        for name, heading, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            self.sections.append((f"{path}#{name}", title, words_of(heading), words_of(text)))

    def script(self) -> str:
        """A script and no JSON, which a page opened as a file could not read."""
        return f"const SECTIONS = {json.dumps(self.sections, ensure_ascii=False, separators=(',', ':'))};\n"


def words_of(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())
