"""The part of a chapter's page where a real model runs, as HTML."""

from html import escape

from chapters.ch13_guess_and_check.world import TEXTS
from chapters.course import Chapter
from chapters.site.labs import FAILURE, PROGRESS
from chapters.site.model.files import NAME
from chapters.site.model.lessons import LESSONS

SCRIPT, STYLE = "model.js", "model.css"
COMMAND = "python -m chapters site --with-model --serve"


def slider(name: str, label: str, values: tuple[float, ...], at: float) -> str:
    """A range whose stops are these values."""
    stops = " ".join(f"{value:g}" for value in values)
    return (
        f'<label>{label} <output>{at:g}</output><input type="range" data-name="{name}" data-stops="{stops}" min="0" '
        f'max="{len(values) - 1}" value="{values.index(at)}"></label>'
    )


def button(act: str, label: str) -> str:
    return f'<button type="button" data-act="{act}">{label}</button>'


TEMPERATURES = (0, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2)
CONTROLS = {
    1: (
        "The next token",
        "Type the beginning of a text. The model says what may come next; you choose, and see which tokens a head of "
        "attention looks at.",
        "The capital of France is",
        slider("temperature", "temperature", TEMPERATURES, 1)
        + slider("layer", "layer", tuple(range(1, 31)), 12)
        + slider("head", "head", tuple(range(1, 10)), 3),
        button("likely", "Take the likeliest") + button("draw", "Draw one"),
    ),
    8: (
        "A real distribution",
        "Type the beginning of a text, and move the sliders. They stand in the order in which the sampler takes them.",
        "She opened the door and saw a",
        slider("temperature", "temperature", TEMPERATURES, 1)
        + slider("min_p", "min_p", (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1), 0)
        + slider("top_k", "top_k (0: off)", (0, 500, 100, 50, 20, 10, 5, 3, 2, 1), 0)
        + slider("top_p", "top_p", (1, 0.99, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1), 1),
        button("draw", "Draw 200 times"),
    ),
    13: (
        "Guesses on a text of yours",
        "Type a text that repeats itself, or one that does not. The engine's n-gram guesser says how it may go on; the "
        "model checks all guesses in one step.",
        TEXTS["a quotation"],
        slider("num_guesses", "guesses a step, at most", (0, 1, 2, 4, 8), 4)
        + slider("temperature", "temperature", (0, 0.5, 1), 0),
        button("step", "One step") + button("run", "Run") + button("pause", "Pause"),
    ),
}


def model_section(chapter: Chapter, num_bytes: int | None) -> str:
    """ "" for a chapter without one. num_bytes: of the model's files beside the pages; None: they are not there."""
    if chapter.number not in LESSONS:
        return ""
    title, text, example, sliders, buttons = CONTROLS[chapter.number]
    if num_bytes is None:
        return f"""
<section class="model" aria-label="Model"><h2>{title}</h2>
<p>With a real model this page lets you try it yourself. This site was built without one. On your own machine, in the
course's folder:</p><pre class="code" tabindex="0"><code>{COMMAND}</code></pre></section>"""
    return f"""
<section class="model" data-chapter="{chapter.number}" aria-label="Model">
<h2>{title}</h2>
<p>{text}</p>
<div class="begin"><p>The model, {NAME}, runs in your browser, on the engine's own scheduler and C kernels. It is
fetched when you click, and kept: next time nothing is loaded. What you type stays on your machine.</p>
<p><button type="button" class="start">Fetch the model ({num_bytes / 1e6:.0f} MB)</button></p>
{PROGRESS}
</div>
{FAILURE}
<form class="asking" hidden><label>Text
<textarea rows="3" data-name="text" spellcheck="false">{escape(example)}</textarea></label>
<div class="moved">{sliders}</div>
<div class="acts"><button class="go">Begin with this text</button>{buttons}</div></form>
<p class="said" role="status"></p>
<div class="shown"></div>
</section>"""
