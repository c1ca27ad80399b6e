"""A next-token distribution with four sliders: what the lab of chapter 8 plays with, and what its story draws from."""

import math
from collections import Counter
from dataclasses import replace

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.ch01_inference.lab_parts import next_logits_of
from chapters.ch08_sampling.theory import Fit, Reshaped, compare, effective_number, reshape
from chapters.story import one_core
from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.worker.sampler import SamplingBatch, sample

DOOR = "She opened the door and saw a"
NUM_SHOWN, NUM_DRAWS, BAR = 12, 1000, 11
CUT_STYLES = {"min_p": "yellow", "top_k": "cyan", "top_p": "magenta", "greedy": "blue"}

# What each slider may be set to; the sliders in the order in which the sampler applies them.
SLIDERS: dict[str, tuple[float, ...]] = {
    "temperature": (0, 0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0),
    "min_p": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0),
    "top_k": (1, 2, 3, 5, 10, 20, 50, 100, 500, 2000, 0),
    "top_p": (0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
}
OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
PRESETS: dict[str, dict[str, float]] = {
    "as the model has it": {},
    "a careful answer": {"temperature": 0.7, "top_p": 0.9},
    "a story: hot, with min_p": {"temperature": 1.5, "min_p": 0.1},
    "the ten most likely": {"top_k": 10},
    "all three filters": {"temperature": 1.2, "min_p": 0.02, "top_k": 20, "top_p": 0.8},
    "hot, nothing cut": {"temperature": 2.0},
    "greedy": {"temperature": 0},
}


def draw(logits: Tensor, params: SamplingParams, seeds: range) -> list[int]:
    """A token for each seed, from the engine's sample(), ten rows at a time: larger batches leave the CPU's cache."""
    token_ids: list[int] = []
    with one_core():
        for first in range(0, len(seeds), 10):
            seqs = [Sequence([0], replace(params, seed=seed)) for seed in seeds[first : first + 10]]
            token_ids += sample(logits.repeat(len(seqs), 1), SamplingBatch.from_sequences(seqs))[0]
    return token_ids


class World:
    """A prompt, the model's logits for its next token, four sliders, and what was drawn so far."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokenizer, self.next_logits = llm, llm.get_tokenizer(), next_logits_of(llm)
        self.reset()

    # -- what you can do --------------------------------------------------------------------------------------------

    def reset(self) -> str:
        self.selected, self._preset = 0, 0
        self.settings: dict[str, float] = dict(OFF)
        self.typed(DOOR)
        return "All sliders are where they change nothing. Move one, or type another beginning into the field."

    def typed(self, prompt: str) -> str:
        token_ids = self.tokenizer(prompt).input_ids
        if not token_ids:
            raise ValueError("type the beginning of a text, at least a letter")
        logits = self.next_logits(token_ids)  # before anything changes: a text may be too long
        self.prompt, self.logits = prompt, logits
        self._update()
        return f"{len(token_ids)} tokens went through the model; these are the probabilities of the next one."

    def set(self, **settings: float) -> None:
        self.settings = OFF | settings
        self._update()

    def select(self, by: int = 1) -> str:
        self.selected = (self.selected + by) % len(SLIDERS)
        return ""

    def select_previous(self) -> str:
        return self.select(-1)

    def more(self, by: int = 1) -> str:
        name = list(SLIDERS)[self.selected]
        values = SLIDERS[name]
        at = values.index(self.settings[name]) + by
        if not 0 <= at < len(values):
            return f"{name} goes no further."
        self.set(**self.settings | {name: values[at]})
        return ""

    def less(self) -> str:
        return self.more(-1)

    def preset(self) -> str:
        self._preset = (self._preset + 1) % len(PRESETS)
        name = list(PRESETS)[self._preset]
        self.set(**PRESETS[name])
        return f"Preset: {name}."

    def draw(self) -> str:
        """1,000 more samples, each with a seed of its own."""
        num_so_far = sum(self.counts.values())
        self.counts.update(draw(self.logits, self.params, range(num_so_far, num_so_far + NUM_DRAWS)))
        return f"Drawn with seeds {num_so_far} to {num_so_far + NUM_DRAWS - 1}. {self.verdict()}"

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.settings)  # pyrefly: ignore[bad-argument-type]

    @property
    def best(self) -> list[int]:
        """Token ids, the most likely first."""
        return self.logits.argsort(descending=True, stable=True).tolist()

    def verdict(self) -> str:
        if not self.counts:
            return "Nothing drawn yet."
        fit = self.fit
        if fit.num_impossible:
            return f"{fit.num_impossible} draws are of tokens that should be cut!"
        if fit.freedom == 0:
            return "There was only one token to draw."
        return (
            f"Chi-square {fit.chi_square:.1f} with {fit.freedom} degrees of freedom (luck exceeds it in "
            f"{fit.chance:.0%} of cases); largest deviation {fit.largest:.1f} standard errors."
        )

    def piece(self, token_id: int, width: int = 12) -> Text:
        text = self.tokenizer.decode([token_id], skip_special_tokens=True)
        text = repr(text or self.tokenizer.convert_ids_to_tokens(token_id))
        return Text(text if len(text) <= width else text[: width - 1] + "…")

    def choices(self, texts: tuple[str, ...]) -> list[list[int]]:
        return [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    def draw_sliders(self) -> Text:
        before, after = (f"{effective_number(p):,.1f}" for p in (self.shape.before, self.shape.after))
        cut = Counter(filter(None, self.shape.cut_by))
        drawn = sum(self.counts.values())
        right = [
            f"{self.shape.num_left:,} of {len(self.shape.after):,} tokens left",
            "cut: " + (", ".join(f"{name} {cut[name]:,}" for name in CUT_STYLES if cut[name]) or "none"),
            f"effective number {before} -> {after}",
            f"{drawn:,} drawn" + (f", chi-square {self.fit.chi_square:.1f} ({self.fit.freedom})" if drawn else ""),
        ]
        text = Text()
        for index, (name, values) in enumerate(SLIDERS.items()):
            value = self.settings[name]
            at, width = values.index(value), 16
            knob = round(at / (len(values) - 1) * (width - 1))
            bar = "─" * knob + "●" + "─" * (width - 1 - knob)
            shown = "off" if name != "temperature" and value == OFF[name] else f"{value:g}"
            chosen = index == self.selected
            text.append(f"{'▶' if chosen else ' '} {name:<12}", "bold" if chosen else "")
            text.append(f"{shown:>5} ").append(bar, "bold green" if chosen else "green").append(f"  {right[index]}\n")
        text.rstrip()
        return text

    def draw_tokens(self) -> Table:
        """The most likely tokens before and after; what was drawn of them, if anything was."""
        table = Table(show_edge=False, pad_edge=False, header_style="bold")
        num_drawn = sum(self.counts.values())
        for name in ("token", "before", "", "after", "", *(("drawn", "theory") if num_drawn else ())):
            table.add_column(name, justify="left" if name in ("token", "") else "right", no_wrap=True)
        best, (before, after, cut_by) = self.best, self.shape
        ids, others = best[:NUM_SHOWN], best[NUM_SHOWN:]
        unit = max(before[ids[0]], max(after)) / BAR

        def add(name: Text, p: float, q: float, bars: tuple[Text, Text], count: int) -> None:
            counted = (f"{count:,}", f"{q * num_drawn:,.1f}") if num_drawn else ()
            table.add_row(name, f"{p:.2%}", bars[0], f"{q:.2%}" if q else "", bars[1], *counted)

        for i in ids:
            cut = Text(f"cut by {cut_by[i]}", CUT_STYLES[cut_by[i]]) if cut_by[i] else None
            bars = Text(_bar(before[i], unit)), cut or Text(_bar(after[i], unit), "green")
            add(self.piece(i), before[i], after[i], bars, self.counts[i])
        num_left = sum(not cut_by[i] for i in others)
        rest_before, rest_after = (math.fsum(probs[i] for i in others) for probs in (before, after))
        notes = Text(f"({len(others):,})", "dim"), Text(f"{num_left:,} left" if num_left else "all cut", "dim")
        add(Text("all others", "dim"), rest_before, rest_after, notes, sum(self.counts[i] for i in others))
        return table

    def panels(self) -> list[tuple[str, RenderableType]]:
        prompt = self.prompt if len(self.prompt) <= 50 else "…" + self.prompt[-49:]
        return [
            ("Sliders, in the sampler's order", self.draw_sliders()),
            (f"Next token after: {escape(prompt)}", self.draw_tokens()),
        ]

    def reshaped(self, **settings: float) -> Reshaped:
        """By theory, with these settings."""
        return reshape(self.logits.tolist(), SamplingParams(**settings))  # pyrefly: ignore[bad-argument-type]

    @property
    def fit(self) -> Fit:
        return compare(self.counts, self.shape.after)

    def _update(self) -> None:
        self.shape = self.reshaped(**self.settings)
        self.counts: Counter[int] = Counter()


def _bar(p: float, unit: float) -> str:
    return "█" * round(p / unit) or ("▏" if p > 0 else "")
