"""The part of a chapter's page where a real model runs, as HTML."""

from collections.abc import Iterable
from html import escape

from chapters.ch13_guess_and_check import world
from chapters.course import Chapter
from chapters.site.labs import FAILURE, PROGRESS
from chapters.site.model.files import OnPages

SCRIPT, STYLE = "model.js", "model.css"
COMMAND = "python -m chapters site --with-model --serve"


def slider(name: str, label: str, values: Iterable[float], at: float) -> str:
    """A range whose stops are these values."""
    values = list(values)
    stops = " ".join(f"{value:g}" for value in values)
    return (
        f'<label>{label} <output>{at:g}</output><input type="range" data-name="{name}" data-stops="{stops}" min="0" '
        f'max="{len(values) - 1}" value="{values.index(at)}"></label>'
    )


TEMPERATURES = (0, 0.2, 0.4, 0.6, 0.8, 1, 1.2, 1.5, 2)
TEXTS = {  # title, what one does, a text to begin with, buttons
    1: (
        "The next token",
        "Type the beginning of a text. The model says what may come next; you choose, and see which tokens a head of "
        "attention looks at.",
        "The capital of France is",
        {"likely": "Take the likeliest", "draw": "Draw one"},
    ),
    8: (
        "A real distribution",
        "Type the beginning of a text, and move the sliders. They stand in the order in which the sampler takes them.",
        "She opened the door and saw a",
        {"draw": "Draw 200 times"},
    ),
    13: (
        "Guesses on a text of yours",
        "Type a text that repeats itself, or one that does not. The engine's n-gram guesser says how it may go on; the "
        "model checks all guesses in one step.",
        world.TEXTS["a quotation"],
        {"step": "One step", "run": "Run", "pause": "Pause"},
    ),
}


def sliders(chapter: Chapter, model: OnPages) -> str:
    if chapter.number == 1:
        layers, heads = range(1, model.num_layers + 1), range(1, model.num_heads + 1)
        return (
            slider("temperature", "temperature", TEMPERATURES, 1)
            + slider("layer", "layer", layers, model.num_layers // 2)
            + slider("head", "head", heads, 1)
        )
    if chapter.number == 8:
        return (
            slider("temperature", "temperature", TEMPERATURES, 1)
            + slider("min_p", "min_p", (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1), 0)
            + slider("top_k", "top_k (0: off)", (0, 500, 100, 50, 20, 10, 5, 3, 2, 1), 0)
            + slider("top_p", "top_p", (1, 0.99, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1), 1)
        )
    guesses = slider("num_guesses", "guesses a step, at most", (0, 1, 2, 4, 8), 4)
    return guesses + slider("temperature", "temperature", (0, 0.5, 1), 0)


def model_section(chapter: Chapter, model: OnPages | None) -> str:
    """ "" for a chapter without one. model: beside the pages; None: none is."""
    if chapter.number not in TEXTS:
        return ""
    title, text, example, acts = TEXTS[chapter.number]
    if model is None:
        return f"""
<section class="model" aria-label="Model"><h2>{title}</h2>
<p>On this page you can try a real model. This site was built without one. On your own machine, in the course's
folder:</p><pre class="code" tabindex="0"><code>{COMMAND}</code></pre></section>"""
    buttons = "".join(f'<button type="button" data-act="{act}">{label}</button>' for act, label in acts.items())
    return f"""
<section class="model" data-chapter="{chapter.number}" data-moved="{"begin" if chapter.number == 13 else "change"}"
aria-label="Model">
<h2>{title}</h2>
<p>{text}</p>
<div class="begin"><p>The model, {escape(model.name)}, runs in your browser, on the engine's own scheduler and C
kernels. It is fetched when you click, and kept: next time nothing is loaded. What you type stays on your machine.</p>
<p><button type="button" class="start">Fetch the model ({model.num_bytes / 1e6:.0f} MB)</button></p>
{PROGRESS}
</div>
{FAILURE}
<form class="asking" hidden><label>Text
<textarea rows="3" data-name="text" spellcheck="false">{escape(example)}</textarea></label>
<div class="moved">{sliders(chapter, model)}</div>
<div class="acts"><button class="go">Begin with this text</button>{buttons}</div></form>
<p class="said" role="status"></p>
<div class="shown"></div>
</section>"""
