"""The site: a folder of plain files that Sphinx makes of what is in chapters/.

Sphinx gets a folder of its own to read: each text under its name in the site (sources.TEXTS), with links to the
chapter's other pages, its quiz and the order of the pages added, and a page for each lab and for each chapter's
exercises.
"""

import html
import io
import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chapters.course import PART_TWO, Chapter, all_chapters
from chapters.site import check_installed, labs
from chapters.site.model import files as model_files
from chapters.site.model import section as model
from chapters.site.quiz import quiz_section
from chapters.site.runtime import CHAPTERS, GRADED, write_runtime
from chapters.site.scenes import Scenes
from chapters.site.sources import ROOT, TEXTS, Sources, highlighted, relative
from chapters.site.stories import story_of
from chapters.site.tasks import asked, introduction_of, tasks_of
from chapters.site.text import Place
from chapters.words import Words, addressed, languages, languages_of, words_of
from nanovllm.serving.http import html_pictures as pictures

if TYPE_CHECKING:
    from chapters.site.pages import Course

ASSETS = Path(__file__).parent / "assets"
SHARED = Path(pictures.__file__).parent / "page"  # theme.css and pictures.css: the server's page looks the same
SETTINGS: dict[str, Any] = {
    "project": "nanovllm",
    "author": "the nanovllm authors",
    "show_warning_types": True,
    "copyright": "the nanovllm authors. Texts and pictures: CC BY 4.0. Code: Apache 2.0",
    "extensions": ["sphinx_copybutton", "chapters.site.pages"],
    "root_doc": "index",
    "myst_enable_extensions": ["dollarmath"],
    "myst_heading_anchors": 6,
    "html_theme": "furo",
    "html_title": "nanovllm: the course",
    "html_css_files": ["theme.css", "course.css"],
    "html_js_files": ["words.js", ("course.js", {"defer": "defer"})],
    "html_math_renderer": "mathml",
    "html_copy_source": False,
    "html_show_sourcelink": False,
    "copybutton_selector": "div.highlight > pre:not(.numbered)",
}
WORDS = """"use strict";
// What the scripts of a page say. filled("{n} of {all}", { n: 1, all: 2 }) is "1 of 2".
const WORDS = %s[document.documentElement.lang];
const filled = (text, values) => text.replace(/\\{(\\w+)\\}/g, (_, name) => values[name]);
"""
FENCE = "`" * 12
TABS = ("index", "lab", "exercises")  # a chapter's pages


def build(folder: Path, offline: bool = False, with_model: bool | str = False) -> None:
    """Write the site into the folder; of an older one there, every file that still has its name is replaced.

    with_model: lay the model that some labs play with beside the pages; a text names another one than the demo model.
    Raises ValueError with all that Sphinx warns of: a link to nothing, a page that no other leads to. Raises OSError if
    the folder cannot be made.
    """
    check_installed()
    folder.mkdir(parents=True, exist_ok=True)
    from chapters.site.pages import Course

    on_pages = None
    if with_model:
        on_pages = model_files.write_model(folder / "model", None if with_model is True else with_model)
    with tempfile.TemporaryDirectory() as temporary:
        texts, static = Path(temporary, "texts"), Path(temporary, "static")
        course = Course({}, {}, Sources())
        write_texts(texts, course, on_pages)
        write_static(static)
        run_sphinx(course, texts, folder, "html", SETTINGS | {"html_static_path": [str(static)]})
    write_runtime(folder / "runtime", offline)


def run_sphinx(course: "Course", texts: Path, folder: Path, builder: str, settings: dict[str, Any]) -> None:
    """Sphinx makes pages of a folder of texts, or slides. Raises ValueError with all that it warns of."""
    from sphinx.util.docutils import docutils_namespace, patch_docutils

    from chapters.site.pages import Pages

    said = io.StringIO()
    with tempfile.TemporaryDirectory() as read, patch_docutils(), docutils_namespace():  # nothing stays registered
        app = Pages(
            course,
            srcdir=texts,
            confdir=None,
            outdir=folder,
            doctreedir=read,
            buildername=builder,
            confoverrides=settings,
            status=None,
            warning=said,
        )
        app.build(force_all=True)
    if said.getvalue():
        raise ValueError(said.getvalue().replace(f"{texts}/", ""))


def write_static(folder: Path) -> None:
    shutil.copytree(ASSETS, folder)
    for name in ("theme.css", "pictures.css"):
        shutil.copyfile(SHARED / name, folder / name)
    for name in (model.SCRIPT, model.STYLE):
        shutil.copyfile(Path(model.__file__).with_name(name), folder / name)
    said = {language: script_words(language) for language in languages()}
    (folder / "words.js").write_text(WORDS % json.dumps(said, ensure_ascii=False, indent=1), "utf-8")


def script_words(language: str) -> dict[str, str]:
    said = words_of(language).said
    return said["script"] | {name: said["quiz"][name] for name in ("type_a_number", "score")}


# -- what Sphinx reads ------------------------------------------------------------------------------------------------


def write_texts(folder: Path, course: "Course", on_pages: model_files.OnPages | None) -> None:
    """The texts, each with what leads from it to other pages. Labs and exercises are made when Sphinx comes to them."""
    for source, name in TEXTS.items():
        text = (ROOT / source).read_text("utf-8")
        course.places[name] = Place(source, f"{name}.html", course.sources)
        if name == "index":
            title, _, text = text.partition("\n")
            text = f"{title}\n{raw(what_runs_here())}{text}{contents()}"
        write(folder, name, text)
    for chapter in all_chapters():
        for words in map(words_of, languages_of(chapter)):
            named = {page: addressed(f"{chapter.folder.name}/{page}.html", words.language)[:-5] for page in TABS}
            place = course.places[named["index"]]
            place.scenes, place.words = Scenes.of(chapter), words
            text = (ROOT / place.source).read_text("utf-8")
            write(folder, named["index"], chapter_text(text, chapter, words))
            course.made[named["lab"]] = partial(lab_text, chapter, place.scenes, on_pages, words)
            course.made[named["exercises"]] = partial(exercises_text, chapter, course.sources, words)
            for page in ("lab", "exercises"):
                write(folder, named[page], "")


def write(folder: Path, name: str, text: str) -> None:
    path = folder / f"{name}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def raw(body: str) -> str:
    """HTML in a text, as it is."""
    return f"\n\n{FENCE}{{raw}} html\n{body}\n{FENCE}\n\n"


def toctree(names: Iterable[str], caption: str = "") -> str:
    """Pages in their order, for the list of all pages and for the way to the next; nothing is shown here."""
    lines = [f":caption: {caption}"] * bool(caption) + ["", *(f"{name}" for name in names)]
    return f"\n{FENCE}{{toctree}}\n:hidden:\n" + "\n".join(lines) + f"\n{FENCE}\n"


def contents() -> str:
    chapters = {chapter.number: f"{chapter.folder.name}/index" for chapter in all_chapters()}
    others = [name for name in TEXTS.values() if name != "index" and not name.startswith("ch")]
    course = ("nano_engine/index", "capstone/index")
    is_engine = {name: (name.endswith("index") and name not in course) or name == "readme" for name in others}
    return (
        toctree((name for number, name in chapters.items() if number < PART_TWO), "Chapters")
        + toctree((name for number, name in chapters.items() if number >= PART_TWO), "Part two")
        + toctree((name for name in others if not is_engine[name]), "And then")
        + toctree((name for name in others if is_engine[name]), "The engine")
        + "".join(map(translations, languages()[1:]))
    )


def translations(language: str) -> str:
    """A language's chapters are a list of their own: the way to the next page stays in one language."""
    chapters = [chapter for chapter in all_chapters() if language in languages_of(chapter)]
    names = [addressed(f"{chapter.folder.name}/index.html", language)[:-5] for chapter in chapters]
    return toctree(names, words_of(language).said["language"]) if names else ""


def what_runs_here() -> str:
    """For a reader of the site, who needs none of the commands that follow."""

    def numbers(folders: Iterable[str], page: str) -> str:
        return ", ".join(f'<a href="{name}/{page}.html">{int(name[2:4])}</a>' for name in sorted(folders))

    return f"""<p class="note">On these pages you need to install nothing: read the chapters, answer their quizzes, play
with the labs of chapters {numbers(CHAPTERS, "lab")}, and write the exercises of chapters
{numbers(GRADED, "exercises")}. The commands further down are for a computer of your own, where everything else runs,
too.</p>"""


def chapter_text(text: str, chapter: Chapter, words: Words) -> str:
    """The text, with the way to the chapter's other pages below its title, and with its quiz."""
    title, _, text = text.partition("\n")
    pages = [page for page in TABS if page != "index"]
    below = [addressed(f"{page}.html", words.language)[:-5] for page in pages]
    commands = "```bash\npython -m chapters lab "
    links = links_to("quiz", "lab", "exercises", words=words).replace("</a><a", "</a>, <a")
    here = f"<p>{words('page.here', links=links)}</p>"
    text = text.replace(commands, f"{raw(here)}{commands}")
    quiz = f"\n## {words('quiz.title')}\n{raw(quiz_section(chapter, words))}"
    return f"{title}\n{raw(tabs(chapter, 'index', words))}{text}{quiz}{toctree(below)}"


def tabs(chapter: Chapter, here: str, words: Words) -> str:
    """Links to the chapter's pages, and to this one in other languages."""
    links = links_to("index", "quiz", "lab", "exercises", here=here, words=words)
    for language in languages_of(chapter):
        if language != words.language:
            place = addressed(f"{here}.html", language)
            links += (
                f'<a hreflang="{language}" lang="{language}" href="{place}">{words_of(language).said["language"]}</a>'
            )
    return f'<nav class="tabs" aria-label="{words("page.chapter", number=chapter.number)}">{links}</nav>'


def links_to(*pages: str, here: str = "", words: Words) -> str:
    places = {page: addressed(f"{page}.html", words.language) for page in TABS}
    places |= {"quiz": f"{places['index']}#quiz"}
    return "".join(
        f'<a href="{places[page]}"{" aria-current=page" if page == here else ""}>{words(f"page.tab_{page}")}</a>'
        for page in pages
    )


def as_markdown(title: str, body: str) -> str:
    """A page of HTML whose headings of the second level are Sphinx's: it lists them beside the page."""
    first, *parts = re.split(r'<h2 id="([^"]+)">(.*?)</h2>', body)
    text = f"# {title}\n{raw(first)}"
    for name, heading, rest in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        plain = html.unescape(re.sub("<[^>]+>", "", heading))
        plain = re.sub(r"([\\`*_{}<>$\[\]])", r"\\\1", plain)
        target = f'<span class="target" id="{name}"></span>'
        text += f"## {plain}\n{raw(target + rest)}"
    return text


def lab_text(chapter: Chapter, scenes: Scenes, on_pages: model_files.OnPages | None, words: Words) -> str:
    """The lab that runs on the page, or its recorded story, or both. on_pages: the model."""
    body = labs.lab_section(chapter, scenes) + model.model_section(chapter, on_pages, words)
    story = story_of(chapter, scenes, words) if (chapter.folder / "story.json").exists() else ""
    if body and story:
        body += f'<h2 id="story">{words("lab.story")}</h2>\n'
    own = f"<p>{words('lab.own_machine')} <code>python -m chapters lab {chapter.number}</code></p>"
    title = f"{words('page.tab_lab')}: {words.title(chapter)}"
    return as_markdown(title, f"{tabs(chapter, 'lab', words)}{body}{story}{own}")


def exercises_text(chapter: Chapter, sources: Sources, words: Words) -> str:
    links = []
    for report in sorted((chapter.folder / "reports").glob("*.md")):
        place = sources.place_of(report.relative_to(ROOT).as_posix())
        links.append(f'<a href="{relative(place, f"{chapter.folder.name}/")}">{report.name}</a>')
    to_read = f"<p>{words('exercises.to_read')} {', '.join(links)}</p>" if links else ""
    body = labs.exercises_section(chapter, sources) or exercises_here(chapter, words)
    title = f"{words('page.tab_exercises')}: {words.title(chapter)}"
    return as_markdown(title, f"{tabs(chapter, 'exercises', words)}{to_read}{body}")


def exercises_here(chapter: Chapter, words: Words) -> str:
    """What there is to write on one's own machine."""
    code = highlighted((chapter.folder / "exercise.py").read_text("utf-8"), "python")
    asks = tasks_of(chapter)
    tasks = "".join(
        f'<li><details name="task"{" open" * (number == 1)}><summary><code>{task.name}</code> '
        f'<span class="verdict">{words("exercises.task_of", number=number, count=len(asks))}</span></summary>'
        f'<div class="asked" lang="en">{asked(task)}</div></details></li>'
        for number, task in enumerate(asks, start=1)
    )
    file = f"<code>chapters/{chapter.folder.name}/exercise.py</code>"
    return f"""<p>{words("exercises.where", file=file)}</p>
<div class="highlight"><pre tabindex="0">python -m chapters check {chapter.number}</pre></div>
<p>{words("exercises.how")}</p>
<div lang="en">{introduction_of(chapter)}</div>
<ol class="tasks">{tasks}</ol>
<details class="whole"><summary>{words("exercises.whole_file")}</summary>
<div class="highlight"><pre tabindex="0">{code}</pre></div></details>"""
