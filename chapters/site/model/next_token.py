"""Chapter 1 with the model on a page: a text, what may follow it, and what a head of attention looks at."""

from typing import Any

from chapters.ch08_sampling.theory import reshape
from chapters.ch13_guess_and_check.again import noise
from chapters.site.model import drawing, lessons
from chapters.site.model.engine import draw
from chapters.site.model.lessons import Values
from chapters.words import words_of
from nanovllm.sampling_params import SamplingParams

NUM_SHOWN, SEED = 8, 3


class Lesson(lessons.Lesson):
    """A text that grows by the token that one chooses."""

    def do(self, act: str, values: Values) -> dict[str, Any]:
        """As all lessons do it. Once the text fills the page's memory, no step waits, and one can only begin again."""
        if act != "begin" and self.has_begun and self.engine.pending is None:
            raise ValueError(self.say("lesson.full"))
        return super().do(act, values)

    def on_begin(self, values: Values) -> None:
        self.say = words_of(values.get("language", "en"))
        if not values["text"]:
            raise ValueError(self.say("lesson.empty"))
        token_ids = self.words.encode(values["text"])
        room = self.engine.layout["max_model_len"] - len(token_ids)
        self.seq = self.engine.begin(token_ids, SamplingParams(max_tokens=max(room, 1), ignore_eos=True, seed=SEED))
        self._compute()
        found = self.seq.num_cached_tokens
        self.said = f"{self.say('lesson.begun', count=len(token_ids), found=found)} {self.said}"

    def on_change(self, values: Values) -> None:
        """Of temperature, layer or head: nothing is computed but what is shown."""

    def on_pick(self, values: Values) -> None:
        self._take(int(values["pick"]))

    def on_likely(self, values: Values) -> None:
        self._take(self.step.chosen[0])

    def on_draw(self, values: Values) -> None:
        self._take(draw(self._probs(values), noise(self.seq)))

    def _take(self, token_id: int) -> None:
        if self.engine.take([token_id]):
            raise ValueError(self.say("lesson.full"))
        self._compute()

    def _compute(self) -> None:
        self.step = self.engine.compute(wants_logits=True)
        chunk = self.step.chunk
        num_rows = chunk.end - chunk.start
        ms, num_layers = f"{self.step.seconds * 1e3:.0f}", len(self.engine.layout["layers"])
        key = "lesson.one_row" if num_rows == 1 else "lesson.rows"
        self.said = self.say(key, rows=num_rows, layers=num_layers, ms=ms)

    def _probs(self, values: Values) -> list[float]:
        return reshape(self.step.logits[0], SamplingParams(temperature=float(values["temperature"]))).after

    def panels(self, values: Values) -> list[tuple[str, str]]:
        layer, head = int(values["layer"]), int(values["head"])
        weights = self.engine.attention(layer - 1)[head - 1]
        pieces, largest = [self.words.piece(i) for i in self.seq.tokens], max(weights)
        looked_at = (
            drawing.token(piece, share=weight / largest, note=drawing.percent(weight))
            for piece, weight in zip(pieces, weights, strict=True)
        )
        probs = self._probs(values)
        best = sorted(range(len(probs)), key=self.step.logits[0].__getitem__, reverse=True)[:NUM_SHOWN]
        rows = [
            (
                f'<button type="button" data-act="pick" data-pick="{i}">{drawing.token(self.words.piece(i))}</button>',
                drawing.bar(probs[i], 1),
                drawing.percent(probs[i]),
            )
            for i in best
        ]
        rest = 1 - sum(probs[i] for i in best)
        others = self.say("lesson.others", count=f"{len(probs) - len(best):,}")
        rows.append((others, drawing.bar(max(rest, 0), 1, "rest"), drawing.percent(max(rest, 0))))
        heads = self.say("lesson.take"), self.say("lesson.probability"), ""
        return [
            (self.say("lesson.next"), drawing.table(heads, rows)),
            (self.say("lesson.looks_at", head=head, layer=layer), drawing.text(looked_at)),
        ]
