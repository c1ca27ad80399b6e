"""The mermaid diagrams of the texts, as SVG in the page's colours.

They are drawn by npm's mermaid and kept in drawn/, so that building the site takes neither npm nor a browser. After a
change to a diagram, redraw it: python -m chapters site --draw  After a change here, remove all of drawn/ before.
"""

import hashlib
import html
import re
from pathlib import Path

from chapters.site.runtime import MERMAID, cached
from chapters.site.server import chromium
from chapters.site.sources import ROOT, TEXTS
from chapters.words import ENGLISH, Words

DRAWN = Path(__file__).parent / "drawn"
DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONFIG = {  # sizes in pixels; the widest of common fonts, so that words fit their boxes in any other
    "fontFamily": "Verdana, DejaVu Sans",
    "fontSize": 13,
    "themeVariables": {"fontSize": "13px"},
    "htmlLabels": False,
    "flowchart": {"wrappingWidth": 160, "nodeSpacing": 18, "rankSpacing": 28, "padding": 8},
    "state": {"nodeSpacing": 24, "rankSpacing": 50},
    "sequence": {"mirrorActors": False, "width": 104, "actorMargin": 24, "messageMargin": 28, "boxMargin": 4}
    | {"diagramMarginX": 4, "diagramMarginY": 10, "height": 46},
}


def picture_of(source: str) -> Path:
    """The file's name is a digest of what it shows."""
    return DRAWN / f"{hashlib.sha256(source.encode()).hexdigest()[:8]}.svg"


def figure(source: str, number: int, words: Words = ENGLISH) -> str:
    """The diagram of this number on its page; what stands in the text, as long as it has not been drawn."""
    if not (picture := picture_of(source)).exists():
        return f'<pre class="printed" tabindex="0">{html.escape(source)}</pre>\n'
    drawing = picture.read_text("utf-8").replace('"Diagram. ', f'"{words("page.diagram")}. ', 1)
    drawing = re.sub(r' width="(\d+)"', r' style="--wide: \1px"\g<0>', drawing, count=1)  # for course.css
    name = words("page.diagram_number", number=number)
    return f'<div class="diagram" tabindex="0" role="group" aria-label="{name}">{drawing}</div>\n'


def wanted() -> dict[Path, str]:
    """The picture of each diagram of the texts -> its source."""
    sources = [source for text in TEXTS for source in DIAGRAM.findall((ROOT / text).read_text("utf-8"))]
    return {picture_of(source): source for source in sources}


def draw_all() -> None:
    """Draw what is new in the texts, from top to bottom, which fits a column; remove what is in no text any more.

    Raises MissingRuntime, and ValueError for a diagram without accDescr, which is read to those who do not see it.
    """
    from playwright.sync_api import sync_playwright

    pictures, read = wanted(), Path(__file__).with_name("mermaid_to_svg.js").read_text("utf-8")
    with sync_playwright() as playwright:
        page = playwright.chromium.launch(executable_path=chromium()).new_page()
        page.add_script_tag(path=cached(MERMAID))
        page.evaluate("config => mermaid.initialize(config)", CONFIG)
        for picture, source in pictures.items():
            if picture.exists():
                continue
            described = re.search(r"accDescr {(.*?)}", source, re.DOTALL)
            if described is None:
                raise ValueError(f"a diagram has no accDescr: {source}")
            name = html.escape(f"Diagram. {' '.join(described[1].split())}")
            downwards = re.sub(r"^(flowchart|\s+direction) LR$", r"\1 TB", source, flags=re.MULTILINE)
            drawing = page.evaluate(read, downwards)
            picture.write_text(drawing.replace("<svg", f'<svg role="img" aria-label="{name}"', 1) + "\n", "utf-8")
    for picture in set(DRAWN.glob("*.svg")) - pictures.keys():
        picture.unlink()
