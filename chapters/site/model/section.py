"""The part of a chapter's page where a real model runs, as HTML."""

from collections.abc import Iterable
from html import escape

from chapters.ch13_guess_and_check import world
from chapters.course import Chapter
from chapters.site.labs import FAILURE, progress_bar
from chapters.site.model.files import OnPages
from chapters.words import ENGLISH, Words

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
    1: ("model.title", "model.text", "The capital of France is", {"likely": "model.likely", "draw": "model.draw"}),
    8: (
        "A real distribution",
        "Type the beginning of a text, and move the sliders. They stand in the order in which the sampler takes them.",
        "She opened the door and saw a",
        {"draw": "Draw 200 times"},
    ),
    13: (
        "Draft tokens on a text of yours",
        "Type a text that repeats itself, or one that does not. The engine's n-gram proposer says how it may go on; "
        "the model checks all draft tokens in one step.",
        world.TEXTS["a quotation"],
        {"step": "One step", "run": "Run", "pause": "Pause"},
    ),
}


def sliders(chapter: Chapter, model: OnPages, words: Words) -> str:
    if chapter.number == 1:
        layers, heads = range(1, model.num_layers + 1), range(1, model.num_heads + 1)
        return (
            slider("temperature", words("model.temperature"), TEMPERATURES, 1)
            + slider("layer", words("model.layer"), layers, model.num_layers // 2)
            + slider("head", words("model.head"), heads, 1)
        )
    if chapter.number == 8:
        return (
            slider("temperature", "temperature", TEMPERATURES, 1)
            + slider("min_p", "min_p", (0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1), 0)
            + slider("top_k", "top_k (0: off)", (0, 500, 100, 50, 20, 10, 5, 3, 2, 1), 0)
            + slider("top_p", "top_p", (1, 0.99, 0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.1), 1)
        )
    sliders = slider("num_draft_tokens", "draft tokens a step, at most", (0, 1, 2, 4, 8), 4)
    return sliders + slider("temperature", "temperature", (0, 0.5, 1), 0)


def model_section(chapter: Chapter, model: OnPages | None, words: Words = ENGLISH) -> str:
    """ "" for a chapter without one. model: beside the pages; None: none is."""
    if chapter.number not in TEXTS:
        return ""
    title, text, example, acts = TEXTS[chapter.number]
    if chapter.number == 1:  # the one that is translated
        title, text, acts = words(title), words(text), {act: words(label) for act, label in acts.items()}
    if model is None:
        return f"""
<section class="model" aria-label="{words("model.section")}"><h2>{title}</h2>
<p>{words("model.without")}</p><div class="highlight"><pre tabindex="0">{COMMAND}</pre></div></section>"""
    buttons = "".join(f'<button type="button" data-act="{act}">{label}</button>' for act, label in acts.items())
    return f"""
<section class="model" data-chapter="{chapter.number}" data-moved="{"begin" if chapter.number == 13 else "change"}"
aria-label="{words("model.section")}">
<h2>{title}</h2>
<p>{text}</p>
<div class="begin"><p>{words("model.runs", name=escape(model.name))}</p>
<p><button type="button" class="start">{words("model.fetch", size=f"{model.num_bytes / 1e6:.0f} MB")}</button></p>
{progress_bar(words)}
</div>
{FAILURE}
<form class="asking" hidden><label>{words("model.its_text")}
<textarea rows="3" data-name="text" spellcheck="false">{escape(example)}</textarea></label>
<div class="sliders">{sliders(chapter, model, words)}</div>
<div class="acts"><button class="go">{words("model.begin")}</button>{buttons}</div></form>
<p class="said" role="status"></p>
<div class="shown"></div>
</section>"""
