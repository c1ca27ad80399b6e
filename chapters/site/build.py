"""The site: a folder of plain files, made from what is in chapters/."""

import hashlib
import html
import json
import shutil
from pathlib import Path

from chapters.course import EXERCISES, Chapter, all_chapters
from chapters.site import labs
from chapters.site.model import files as model_files
from chapters.site.model import section as model
from chapters.site.pages import page, relative, write
from chapters.site.quiz import quiz_section
from chapters.site.runtime import write_runtime
from chapters.site.scenes import Scenes
from chapters.site.search import SEARCH, Index
from chapters.site.sources import ROOT, TEXTS, Sources, highlighted
from chapters.site.stories import story_of
from chapters.site.text import Place, Text, render
from nanovllm.serving.http import html_pictures as pictures

ASSETS = Path(__file__).parent / "assets"
SHARED = Path(pictures.__file__).parent / "page"  # theme.css and pictures.css: the server's page looks the same
SCRIPTS, STYLES = (*labs.SCRIPTS, model.SCRIPT), (*labs.STYLES, model.STYLE)  # of labs and exercises
READ = (
    '<p class="read" hidden><label><input type="checkbox" data-read="{number}"> I have read this chapter</label></p>\n'
)
KEEPING = """<section class="keeping" data-exercises='{exercises}' aria-labelledby="kept" hidden>
<h2 id="kept">What you have done</h2>
<p>This browser keeps what you have read, answered, expected and written, and sends it nowhere. A file takes it to
another browser. Pages that you have opened need no network any more.</p>
<p><button type="button" class="export">Save it as a file</button>
<label class="button">Take in such a file <input type="file" accept=".json,application/json"></label></p>
<p class="said" role="status"></p>
</section>
"""
TABS = {"index": "Text", "quiz": "Quiz", "lab": "Lab", "exercises": "Exercises"}


def build(folder: Path, offline: bool = False, with_model: bool | str = False) -> None:
    """Write the site into the folder; of an older one there, every file that still has its name is replaced.

    with_model: lay the model that some labs play with beside the pages; a text names another one than the demo model.
    """
    sources, index, on_pages = Sources(), Index(), None
    if with_model:
        on_pages = model_files.write_model(folder / "model", None if with_model is True else with_model)
    scenes = {chapter.folder.name: Scenes.of(chapter) for chapter in all_chapters()}
    for source, target in TEXTS.items():
        place = Place(source, target, sources, scenes.get(target.split("/")[0], Scenes()))
        write(folder, target, text_page(place, index))
    for chapter in all_chapters():
        seen = scenes[chapter.folder.name]
        for name, text in (("lab", lab_text(chapter, seen, on_pages)), ("exercises", exercises_text(chapter, sources))):
            path = f"{chapter.folder.name}/{name}.html"
            body = frame(chapter, name, path, text)
            title = f"{TABS[name]}: {chapter.title}"
            write(folder, path, page(title, body, path, SCRIPTS, STYLES))
            index.add(path, title, text.body)
    sources.write(folder)
    write(folder, "search.html", page("Search", SEARCH, "search.html", classic=("search-index.js", "assets/search.js")))
    write(folder, "search-index.js", index.script())
    shutil.copytree(ASSETS, folder / "assets", dirs_exist_ok=True)
    for name in ("theme.css", "pictures.css"):
        shutil.copyfile(SHARED / name, folder / "assets" / name)
    for name in (model.SCRIPT, model.STYLE):
        shutil.copyfile(Path(model.__file__).with_name(name), folder / "assets" / name)
    write_runtime(folder / "runtime", offline)
    write_worker(folder)


def write_worker(folder: Path) -> None:
    """What keeps pages for when there is no network. Its version is a hash of all that the site has."""
    script, content = "service-worker.js", hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (script, "weights.bin"):  # model/manifest.json has the weights' hash
            content.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    source = Path(__file__).with_name(script).read_text("utf-8")
    write(folder, script, source.replace("@VERSION@", content.hexdigest()[:16]))


# -- pages ----------------------------------------------------------------------------------------------------------


def text_page(place: Place, index: Index) -> str:
    source, target = place.source, place.target
    text = render(place)
    index.add(target, text.title, text.body)
    chapter = next((chapter for chapter in all_chapters() if chapter.folder.name in source), None)
    if chapter is None:
        kind = "contents" if target == "index.html" else "single"
        way = neighbour(all_chapters()[-1], "prev", target) if "one_request" in target else ""
        keeping = KEEPING.format(exercises=json.dumps({n: len(names) for n, names in EXERCISES.items()}))
        more = keeping if target == "index.html" else ""
        body = f'<main id="content" class="{kind}"><h1>{html.escape(text.title)}</h1>\n{text.body}{more}</main>'
        body += f'<footer><nav class="chapter" aria-label="Chapters">{way}</nav></footer>' if way else ""
    else:
        text.headings.append(("quiz", "Quiz"))
        text.body += READ.format(number=chapter.number) + quiz_section(chapter)
        body = frame(chapter, "index", target, text)
    return page(text.title, body, target)


def frame(chapter: Chapter, tab: str, path: str, text: Text) -> str:
    """A chapter's page: the way to its neighbours and to its other pages, and a list of what is on this one."""
    chapters = all_chapters()
    at = chapters.index(chapter)
    before, after = chapters[at - 1] if at else None, chapters[at + 1] if at + 1 < len(chapters) else None
    ways = neighbour(before, "prev", path), neighbour(after, "next", path)
    tabs = "".join(
        f'<a href="{"index.html#quiz" if name == "quiz" else f"{name}.html"}"'
        f"{' aria-current=page' if name == tab else ''}>{title}</a>"
        for name, title in TABS.items()
    )
    items = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in text.headings)
    side = f'<nav class="toc" aria-label="On this page"><ol>{items}</ol></nav>' if items else ""
    folded = f'<details class="toc"><summary>On this page</summary><ol>{items}</ol></details>' if items else ""
    return f"""<nav class="chapter" aria-label="Chapters">{ways[0]}{ways[1]}</nav>
<div class="columns">{side}
<main id="content">
<p class="eyebrow">Chapter {chapter.number}</p>
<h1>{html.escape(chapter.title)}</h1>
<nav class="tabs" aria-label="Chapter {chapter.number}">{tabs}</nav>
{folded}
{text.body}
</main></div>
<footer><nav class="chapter" aria-label="Chapters, again">{ways[0]}{ways[1]}</nav></footer>"""


def neighbour(chapter: Chapter | None, rel: str, path: str) -> str:
    arrow = "←" if rel == "prev" else "→"
    if chapter is not None:
        target, name = f"{chapter.folder.name}/index.html", f"{chapter.number} {chapter.title}"
    elif rel == "prev":
        target, name = "index.html", "Contents"
    else:
        target, name = "one_request.html", "One request's life"
    return f'<a rel="{rel}" href="{relative(target, path)}"><span aria-hidden="true">{arrow}</span> {name}</a>'


def lab_text(chapter: Chapter, scenes: Scenes, on_pages: model_files.OnPages | None = None) -> Text:
    """The lab that runs on the page, or its recorded story, or both. on_pages: the model."""
    living = labs.lab_section(chapter, scenes) + model.model_section(chapter, on_pages)
    text = Text(chapter.title)
    if (chapter.folder / "story.json").exists():
        text = story_of(chapter, scenes)
    heading = ""
    if living and text.body:  # the lab needs the page's whole width: no list beside it
        heading, text.headings = '<h2 id="story">The lab as a story</h2>\n', []
    text.body = f"""{living}{heading}{text.body}
<p>On your own machine: <code>python -m chapters lab {chapter.number}</code></p>"""
    return text


def exercises_text(chapter: Chapter, sources: Sources) -> Text:
    links = []
    for file in sorted((chapter.folder / "reports").glob("*.md")):
        place = sources.place_of(file.relative_to(ROOT).as_posix())
        links.append(f'<a href="{relative(place, f"{chapter.folder.name}/")}">{file.name}</a>')
    to_read = f"<p>The reports: {', '.join(links)}</p>" if links else ""
    code = highlighted((chapter.folder / "exercise.py").read_text("utf-8"), "python")
    here = f"""<p>The checks of this chapter work on tensors or with the model, which this page does not have: they run
on your own machine. Write your code in <code>chapters/{chapter.folder.name}/exercise.py</code>, then:</p>
<pre class="code" tabindex="0"><code>python -m chapters check {chapter.number}</code></pre>
<p>It goes from easy to hard and stops at the first thing that is wrong, with a hint and the section to read again.</p>
<pre class="code" tabindex="0"><code>{code}</code></pre>"""
    return Text(chapter.title, body=to_read + (labs.exercises_section(chapter) or here))
