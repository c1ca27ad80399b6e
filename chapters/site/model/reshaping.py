"""Chapter 8 with the model on a page: a distribution, reshaped in the sampler's order, and drawn from."""

from collections import Counter
from dataclasses import replace

from chapters.ch08_sampling.theory import compare, effective_number, reshape
from chapters.ch13_guess_and_check.again import noise
from chapters.site.model import drawing, lessons
from chapters.site.model.engine import draw
from chapters.site.model.lessons import Values
from nanovllm.core.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

NUM_SHOWN, NUM_DRAWS = 12, 200


class Lesson(lessons.Lesson):
    """A text, the logits of its next token, and what was drawn of them with the settings."""

    def on_begin(self, values: Values) -> None:
        self.engine.begin(self.words.encode(values["text"]), SamplingParams(max_tokens=1))
        self.logits = self.engine.compute(wants_logits=True).logits[0]
        self.best = sorted(range(len(self.logits)), key=self.logits.__getitem__, reverse=True)
        self.on_change(values)

    def on_change(self, values: Values) -> None:
        temperature, min_p, top_p = (float(values[name]) for name in ("temperature", "min_p", "top_p"))
        top_k = int(values["top_k"])
        self.params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        self.shape, self.drawn = reshape(self.logits, self.params), Counter[int]()
        cut = Counter(name for name in self.shape.cut_by if name)
        before, after = (effective_number(probs) for probs in (self.shape.before, self.shape.after))
        what = ", ".join(f"{name} cuts {cut[name]:,}" for name in ("min_p", "top_k", "top_p", "greedy") if cut[name])
        left = f"{self.shape.num_left:,} of {len(self.logits):,} tokens are left{f': {what}' if what else ''}."
        self.said = f"{left} Effective number: {before:,.1f} before, {after:,.1f} after."

    def on_draw(self, values: Values) -> None:
        first = sum(self.drawn.values())
        for seed in range(first, first + NUM_DRAWS):
            self.drawn[draw(self.shape.after, noise(Sequence([0], replace(self.params, seed=seed))))] += 1
        fit = compare(self.drawn, self.shape.after)
        said = f"{first + NUM_DRAWS:,} drawn, with seeds 0 to {first + NUM_DRAWS - 1}."
        self.said = (
            f"{said} Chi-square {fit.chi_square:.1f} with {fit.freedom} degrees of freedom." if fit.freedom else said
        )

    def panels(self, values: Values) -> list[tuple[str, str]]:
        before, after, cut_by = self.shape
        largest = max(before[self.best[0]], max(after))
        rows = []
        for i in self.best[:NUM_SHOWN]:
            bars = drawing.bar(before[i], largest) + drawing.bar(after[i], largest, "after")
            now = drawing.percent(after[i]) if not cut_by[i] else f'<em class="cut">cut by {cut_by[i]}</em>'
            count = f"{self.drawn[i]:,}" if self.drawn else ""
            rows.append((drawing.token(self.words.piece(i)), bars, drawing.percent(before[i]), now, count))
        return [("The next token", drawing.table(("token", "", "before", "after", "drawn"), rows))]
