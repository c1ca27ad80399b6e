"""The parts of the site that run Python, a chapter's lab and its exercises, as HTML."""

import json
from html import escape

from docutils.nodes import make_id

from chapters.course import Chapter
from chapters.player import meaning
from chapters.site.runtime import CHAPTERS, GRADED, OF_THE_ENGINE, num_megabytes
from chapters.site.scenes import Scenes
from chapters.site.sources import ROOT, Sources, line_of, relative
from chapters.site.tasks import asked, introduction_of, tasks_of
from chapters.words import ENGLISH, Words

SCRIPTS = ("lab.js", "exercises.js")
STYLES = ("pictures.css", "lab.css")
TIME_LIMIT_S = 60  # for one check; a phone is several times slower than a laptop

# Shown until the script runs; it cannot run where there is no JavaScript, nor on a page opened as a file.
NEEDS_SERVER = (
    '<p class="needs-server">This part runs Python in the browser. It needs JavaScript, and a page that comes from a '
    "web server; <code>python -m chapters site --serve</code> is one.</p>"
)
OWN_MACHINE = "<p>The checks of this function need a computer with the course installed: none of them runs here.</p>"
FAILURE = '<p class="failure" role="alert" hidden></p>'


def progress_bar(words: Words = ENGLISH) -> str:
    return (
        f'<div class="loading" hidden><progress max="1" value="0" aria-label="{words("lab.loading")}"></progress> '
        '<span class="loaded"></span></div>'
    )


def lab_section(chapter: Chapter, to_text: Scenes) -> str:
    """The chapter's lab, or "" if it has none that runs in a browser."""
    if chapter.folder.name not in CHAPTERS:
        return ""
    page = chapter.module("page")
    world = page.new_world()
    buttons, meanings = [], []
    for action in page.ACTIONS:
        does = escape(meaning(world, action))
        buttons.append(
            f'<button type="button" data-key-name="{action.key}" title="{does}">'
            f'<kbd>{action.key}</kbd> {escape(action.label)}<span class="value"></span></button>'
        )
        meanings.append(f"<dt><kbd>{action.key}</kbd> {escape(action.label)}</dt><dd>{does}</dd>")
    form = ""
    if page.ASK:
        form = (
            f'<form class="typed"><label>{escape(page.ASK[0].upper() + page.ASK[1:])} <input name="text" '
            'autocomplete="off" spellcheck="false"></label><button>send it</button></form>'
        )
        meanings.append("<dt><kbd>t</kbd> type</dt><dd>Go to the text field.</dd>")
    scenes = "".join(
        f'<li><a href="#{escape(scene.link.replace(" ", "+"))}">{escape(scene.title)}</a>'
        f"{to_text.back_from(scene.title)}</li>"
        for scene in page.SCENES
    )
    return f"""
<section class="lab" data-chapter="{chapter.number}" aria-label="Lab">
<h2>{escape(page.TITLE)}</h2>
{NEEDS_SERVER}
<div class="begin" hidden>
<p>The lab runs the engine's own Python code in your browser. Nothing is installed; the lab loads
{num_megabytes():.1f} MB when you start it.</p>
<p class="from-link" hidden></p>
<p><button type="button" class="start">Start the lab</button></p>
{progress_bar()}
</div>
{FAILURE}
<details class="scenes" open><summary>Things to see, step by step</summary><ol>{scenes}</ol></details>
<div class="playing" hidden>
<details class="scene" hidden><summary><h3 class="scene-title"></h3></summary><p class="scene-text"></p>
<p class="scene-place"></p></details>
<div class="now"><div class="steps">
<button type="button" class="back" title="Undo the last action (arrow left)">&#9664; back</button>
<button type="button" class="forward" title="The next action of this scene, or the next scene (arrow right)">
</button></div>
<p class="said" role="status"></p></div>
<details class="own"><summary>Do something yourself</summary>
<div class="controls"><div class="actions">{"".join(buttons)}</div>
{form}</div>
<details class="meanings"><summary>What the buttons and keys do</summary><dl>{"".join(meanings)}</dl>
<p>Arrow keys go back and forward.</p></details></details>
<div class="table"><div class="panels"></div></div>
<p class="kept">The address of this page contains all actions so far, so a copy of it opens the same state.
<button type="button" class="copy">copy the address</button></p>
</div>
</section>"""


def exercises_section(chapter: Chapter, sources: Sources) -> str:
    """An editor with the chapter's exercise.py, or "" if its checks cannot run in a browser."""
    if chapter.folder.name not in GRADED:
        return ""
    source = (chapter.folder / "exercise.py").read_text("utf-8")
    tasks, verdicts, texts = "", "", {task.name: asked(task) for task in tasks_of(chapter)}
    for number, task in enumerate(chapter.module("checks").TASKS, start=1):
        sections = [getattr(check, "section", task.section) for check in task.checks]
        checks = [
            {"title": title, "section": name, "place": f"index.html#{make_id(name)}"}
            for title, name in zip(task.titles, sections, strict=True)
        ]
        text = texts.get(task.name, "") + OWN_MACHINE * (task.name in OF_THE_ENGINE)
        tasks += (
            f'<li data-task="{escape(task.name)}" data-checks="{escape(json.dumps(checks))}">'
            f'<details name="task"{" open" * (number == 1)}><summary><code>{escape(task.name)}</code> '
            f'<span class="verdict"></span></summary><div class="asked">{text}</div></details>'
            '<p class="again"></p><div class="outcome"></div></li>'
        )
        ours = link_to_solution(chapter, task.name, sources)
        verdicts += f'<li><code>{escape(task.name)}</code> <span class="verdict"></span> {ours}</li>'
    command = f"python -m chapters check {chapter.number} --file exercise.py"
    introduction = (
        f'<details class="about"><summary>About these exercises</summary>{introduction_of(chapter)}</details>'
    )
    return f"""
<section class="exercises" data-chapter="{chapter.number}" data-limit="{TIME_LIMIT_S}" aria-label="Exercises">
{NEEDS_SERVER}
<p>Write the functions, one after another. Check puts each of them into the engine in place of ours and tries it, from
easy to hard, until something is wrong; then it says what it is. Python has its standard library here, not numpy or
torch.</p>
{introduction}
<div class="work">
<ol class="tasks">{tasks}</ol>
<div class="writing">
<div class="editor"><pre class="numbers" aria-hidden="true"></pre><textarea aria-label="exercise.py" wrap="off"
spellcheck="false" autocapitalize="off" autocorrect="off" autocomplete="off">
{escape(source)}</textarea></div>
<div class="conflict" role="alert" hidden><p>Another tab of this browser has changed exercise.py. What you write here is
not kept until you choose.</p><button type="button" class="theirs">Take that text</button>
<button type="button" class="mine">Keep this one</button></div>
<p class="hint"><span class="keeps">What you write stays in this browser.</span> <span class="keys">Tab indents;
Escape, then Tab, leaves the editor.</span></p>
<div class="controls" hidden><button type="button" class="check">Check</button>
<button type="button" class="stop" hidden>Stop</button>
<button type="button" class="download">Download exercise.py</button>
<button type="button" class="reset">Start over</button></div>
{progress_bar()}
{FAILURE}
<p><span class="status" role="status"></span> <span class="seconds" aria-hidden="true"></span></p>
<ul class="verdicts" hidden>{verdicts}</ul>
<div class="next outcome"></div>
</div>
</div>
<details class="printed" hidden><summary>What your code printed</summary><pre tabindex="0"></pre></details>
<p>The checks are the same as in the terminal, and your functions run inside the engine's own code. Checks in which a
real model answers need a computer with the course installed. There, in the course's folder, this command grades your
downloaded file with all checks:</p>
<div class="highlight"><pre tabindex="0">{command}</pre></div>
</section>"""


def link_to_solution(chapter: Chapter, name: str, sources: Sources) -> str:
    """Shown once the reader's own passes. "" where there are none: a class's edition of the course."""
    path = chapter.folder / "solution.py"
    if not path.exists():
        return ""
    file = path.relative_to(ROOT).as_posix()
    place = relative(sources.place_of(file), f"{chapter.folder.name}/")
    return f'<a class="ours" href="{place}#L{line_of(file, name)}" hidden>our solution</a>'
