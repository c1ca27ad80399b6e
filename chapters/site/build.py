"""The site: a folder of plain files, made from what is in chapters/."""

import hashlib
import html
import json
import shutil
from pathlib import Path

from chapters.course import Chapter, all_chapters
from chapters.site import labs, landing
from chapters.site.model import files as model_files
from chapters.site.model import section as model
from chapters.site.pages import CONTENTS, not_kept, page, relative, said_by, write
from chapters.site.quiz import quiz_section
from chapters.site.runtime import write_runtime
from chapters.site.scenes import Scenes
from chapters.site.search import SEARCH, Index
from chapters.site.sources import ROOT, TEXTS, Sources, highlighted
from chapters.site.stories import story_of
from chapters.site.tasks import asked, introduction_of, tasks_of
from chapters.site.text import Place, Text, render
from chapters.words import ENGLISH, Words, addressed, languages, languages_of, words_of
from nanovllm.serving.http import html_pictures as pictures

ASSETS = Path(__file__).parent / "assets"
SHARED = Path(pictures.__file__).parent / "page"  # theme.css and pictures.css: the server's page looks the same
SCRIPTS, STYLES = (*labs.SCRIPTS, model.SCRIPT), (*labs.STYLES, model.STYLE)  # of labs and exercises
READ = '<p class="read" hidden><label><input type="checkbox" data-read="{number}"> {said}</label></p>\n'
TABS = ("index", "quiz", "lab", "exercises")
# What the scripts of a page say; it comes before them. filled("{n} of {all}", { n: 1, all: 2 }) is "1 of 2".
WORDS = """"use strict";
const WORDS = %s;
const filled = (text, values) => text.replace(/\\{(\\w+)\\}/g, (_, name) => values[name]);
"""


def build(folder: Path, offline: bool = False, with_model: bool | str = False) -> None:
    """Write the site into the folder; of an older one there, every file that still has its name is replaced.

    with_model: lay the model that some labs play with beside the pages; a text names another one than the demo model.
    """
    sources, index, on_pages = Sources(), Index(), None
    if with_model:
        on_pages = model_files.write_model(folder / "model", None if with_model is True else with_model)
    editions = [(chapter, words_of(language)) for chapter in all_chapters() for language in languages_of(chapter)]
    scenes = {(chapter.folder.name, words.language): Scenes.of(chapter) for chapter, words in editions}
    for source, target in TEXTS.items():
        words = words_of(Path(source).suffixes[0][1:] if source.count(".") > 1 else "en")
        seen = scenes.get((target.split("/")[0], words.language), Scenes())
        write(folder, target, text_page(Place(source, target, sources, seen, words=words), index))
    for chapter, words in editions:
        seen = scenes[chapter.folder.name, words.language]
        texts = {"lab": lab_text(chapter, seen, on_pages, words), "exercises": exercises_text(chapter, sources, words)}
        for name, text in texts.items():
            path = f"{chapter.folder.name}/{addressed(f'{name}.html', words.language)}"
            title = f"{words(f'page.tab_{name}')}: {words.title(chapter)}"
            others = other_languages(chapter, f"{name}.html", words)
            body = frame(chapter, name, path, text, words)
            write(folder, path, page(title, body, path, SCRIPTS, STYLES, words=words, others=others))
            if words is ENGLISH:
                index.add(path, title, text.body)
    if landing.PLACE in TEXTS.values():
        write(folder, landing.NOTES, landing.notes_page(sources))
    sources.write(folder)
    write(folder, "search.html", page("Search", SEARCH, "search.html", classic=("search-index.js", "assets/search.js")))
    write(folder, "search-index.js", index.script())
    shutil.copytree(ASSETS, folder / "assets", dirs_exist_ok=True)
    for language in languages():
        said = json.dumps(words_of(language).said["script"], ensure_ascii=False, indent=1)
        write(folder, said_by(words_of(language)), WORDS % said)
    for name in ("theme.css", "pictures.css"):
        shutil.copyfile(SHARED / name, folder / "assets" / name)
    for name in (model.SCRIPT, model.STYLE):
        shutil.copyfile(Path(model.__file__).with_name(name), folder / "assets" / name)
    for chapter in all_chapters():
        labs.write_notebook(folder, chapter)
    write_runtime(folder / "runtime", offline)
    write_worker(folder)


def write_worker(folder: Path) -> None:
    """What keeps pages for when there is no network. Its version is a hash of all that the site has."""
    script, content = "service-worker.js", hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in (script, "weights.bin"):  # model/manifest.json has the weights' hash
            content.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    source = Path(__file__).with_name(script).read_text("utf-8")
    values = {
        "VERSION": content.hexdigest()[:16],
        "NOT_KEPT": {language: not_kept(words_of(language)) for language in languages()},
        "FIRST": CONTENTS,
    }
    for name, value in values.items():
        source = source.replace(f'"@{name}@"', json.dumps(value, ensure_ascii=False))
    write(folder, script, source)


# -- pages ----------------------------------------------------------------------------------------------------------


def text_page(place: Place, index: Index) -> str:
    source, target, words = place.source, place.target, place.words
    others: tuple[tuple[str, str], ...] = ()
    text = render(place)
    if words is ENGLISH:  # one searches the English course
        index.add(target, text.title, text.body)
    chapter = next((chapter for chapter in all_chapters() if chapter.folder.name in source), None)
    if chapter is None:
        way = neighbour(all_chapters()[-1], "prev", target) if "one_request" in target else ""
        if target == landing.PLACE:
            body = landing.first_page(text)
        else:
            body = f'<main id="content" class="single"><h1>{html.escape(text.title)}</h1>\n{text.body}</main>'
        body += f'<footer><nav class="chapter" aria-label="Chapters">{way}</nav></footer>' if way else ""
    else:
        text.headings.append(("quiz", words("quiz.title")))
        text.body += READ.format(number=chapter.number, said=words("page.read")) + quiz_section(chapter, words)
        body, others = frame(chapter, "index", target, text, words), other_languages(chapter, "index.html", words)
    return page(text.title, body, target, words=words, others=others)


def other_languages(chapter: Chapter, name: str, words: Words) -> tuple[tuple[str, str], ...]:
    """Each with the place of this page in it."""
    found = (language for language in languages_of(chapter) if language != words.language)
    return tuple((language, addressed(name, language)) for language in found)


def frame(chapter: Chapter, tab: str, path: str, text: Text, words: Words = ENGLISH) -> str:
    """A chapter's page: the way to its neighbours and to its other pages, and a list of what is on this one."""
    chapters = all_chapters()
    at = chapters.index(chapter)
    before, after = chapters[at - 1] if at else None, chapters[at + 1] if at + 1 < len(chapters) else None
    ways = neighbour(before, "prev", path, words), neighbour(after, "next", path, words)
    texts = {name: addressed("index.html#quiz" if name == "quiz" else f"{name}.html", words.language) for name in TABS}
    tabs = "".join(
        f'<a href="{place}"{" aria-current=page" if name == tab else ""}>{words(f"page.tab_{name}")}</a>'
        for name, place in texts.items()
    )
    items = "".join(f'<li><a href="#{name}">{heading}</a></li>' for name, heading in text.headings)
    here, number = words("page.on_this_page"), words("page.chapter", number=chapter.number)
    languages = "".join(
        f'<a hreflang="{language}" lang="{language}" href="{place}">{words_of(language).said["language"]}</a>'
        for language, place in other_languages(chapter, f"{tab}.html", words)
    )
    side = f'<nav class="toc" aria-label="{here}"><ol>{items}</ol></nav>' if items else ""
    folded = f'<details class="toc"><summary>{here}</summary><ol>{items}</ol></details>' if items else ""
    return f"""<nav class="chapter" aria-label="{words("page.chapters")}">{ways[0]}{ways[1]}</nav>
<div class="columns">{side}
<main id="content">
<p class="eyebrow">{number} <span class="languages">{languages}</span></p>
<h1>{html.escape(words.title(chapter))}</h1>
<nav class="tabs" aria-label="{number}">{tabs}</nav>
{folded}
{text.body}
</main></div>
<footer><nav class="chapter" aria-label="{words("page.chapters_again")}">{ways[0]}{ways[1]}</nav></footer>"""


def neighbour(chapter: Chapter | None, rel: str, path: str, words: Words = ENGLISH) -> str:
    """In this language, if it is there in it; else it is said that it is English."""
    arrow = "←" if rel == "prev" else "→"
    if chapter is not None:
        language = words.language if words.language in languages_of(chapter) else "en"
        target = f"{chapter.folder.name}/{addressed('index.html', language)}"
        title = words.title(chapter) if language == words.language else words("page.in_english", title=chapter.title)
        name = f"{chapter.number} {title}"
    elif rel == "prev":
        target, name = "index.html", words("page.contents")
    else:
        target, name = "one_request.html", words("page.one_request_life")
    return f'<a rel="{rel}" href="{relative(target, path)}"><span aria-hidden="true">{arrow}</span> {name}</a>'


def lab_text(
    chapter: Chapter, scenes: Scenes, on_pages: model_files.OnPages | None = None, words: Words = ENGLISH
) -> Text:
    """The lab that runs on the page, or its recorded story, or both. on_pages: the model."""
    living = labs.lab_section(chapter, scenes) + model.model_section(chapter, on_pages, words)
    text = Text(words.title(chapter))
    if (chapter.folder / "story.json").exists():
        text = story_of(chapter, scenes, words)
    heading = ""
    if living and text.body:  # the lab needs the page's whole width: no list beside it
        heading, text.headings = f'<h2 id="story">{words("lab.story")}</h2>\n', []
    text.body = f"""{living}{heading}{text.body}
<p>{words("lab.own_machine")} <code>python -m chapters lab {chapter.number}</code></p>"""
    return text


def exercises_text(chapter: Chapter, sources: Sources, words: Words = ENGLISH) -> Text:
    links = []
    for report in sorted((chapter.folder / "reports").glob("*.md")):
        place = sources.place_of(report.relative_to(ROOT).as_posix())
        links.append(f'<a href="{relative(place, f"{chapter.folder.name}/")}">{report.name}</a>')
    to_read = f"<p>{words('exercises.to_read')} {', '.join(links)}</p>" if links else ""
    code = highlighted((chapter.folder / "exercise.py").read_text("utf-8"), "python")
    asks = tasks_of(chapter)
    tasks = "".join(
        f'<li><details name="task"{" open" * (number == 1)}><summary><h2><code>{task.name}</code> '
        f'<span class="verdict">{words("exercises.task_of", number=number, count=len(asks))}</span></h2></summary>'
        f'<div class="asked" lang="en">{asked(task)}</div></details></li>'
        for number, task in enumerate(asks, start=1)
    )
    file = f"<code>chapters/{chapter.folder.name}/exercise.py</code>"
    here = f"""<p>{words("exercises.where", file=file)}</p>
<pre class="code" tabindex="0"><code>python -m chapters check {chapter.number}</code></pre>
<p>{words("exercises.how")}</p>
<div lang="en">{introduction_of(chapter)}</div>
<ol class="tasks">{tasks}</ol>
<details class="whole"><summary>{words("exercises.whole_file")}</summary>
<pre class="code" tabindex="0"><code>{code}</code></pre></details>"""
    return Text(words.title(chapter), body=to_read + (labs.exercises_section(chapter) or here))
