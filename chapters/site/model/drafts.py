"""Chapter 13 with the model on a page: a text goes on, with draft tokens that are accepted or rejected."""

from html import escape

from chapters.ch13_guess_and_check.world import LONGEST, SHORTEST, Always, Step, expected_run
from chapters.site.model import drawing, lessons
from chapters.site.model.lessons import Values
from nanovllm.features.speculation.ngrams import NgramProposer
from nanovllm.sampling_params import SamplingParams

MAX_TOKENS, NUM_SHOWN, SEED = 96, 12, 3


class Lesson(lessons.Lesson):
    """A text that the model continues, step by step. The proposer is the engine's own, and so is what checks it."""

    def on_begin(self, values: Values) -> None:
        token_ids, num_draft_tokens = self.words.encode(values["text"]), int(values["num_draft_tokens"])
        always = Always(NgramProposer(LONGEST, SHORTEST), num_draft_tokens, self.engine.layout["max_rows"])
        self.engine.speculation = always if num_draft_tokens else None
        params = SamplingParams(temperature=float(values["temperature"]), seed=SEED, max_tokens=MAX_TOKENS)
        self.seq = self.engine.begin(token_ids, params)
        self.steps: list[Step] = []
        self.seconds: list[tuple[int, float]] = []  # (rows, seconds) of each step
        self.on_step(values)

    def on_step(self, values: Values) -> bool:
        """True: the text goes on."""
        if self.seq.finish_reason is not None:
            raise ValueError("The text has ended. Start again, or with another text.")
        step = self.engine.compute(wants_logits=self.seq.sampling_params.temperature > 0)
        chunk = step.chunk
        self.engine.take(self.engine.sample())
        self.steps.append(Step(chunk.draft_token_ids, self.seq.tokens[chunk.known_end :]))
        if len(self.steps) > 1:  # the first one computes the prompt
            self.seconds.append((chunk.end - chunk.start, step.seconds))
        num_tokens = sum(len(each.taken) for each in self.steps[1:])
        self.said = f"{num_tokens} tokens in {len(self.steps) - 1} steps after the prompt's."
        if self.seconds:
            self.said += f" {num_tokens / sum(seconds for _, seconds in self.seconds):.1f} tokens a second."
        return self.seq.finish_reason is None

    on_run = on_step

    def panels(self, values: Values) -> list[tuple[str, str]]:
        words, piece = self.words, self.words.piece
        prompt = words.decode(self.seq.tokens[: self.seq.num_prompt_tokens])
        text = f'<p class="grown"><span class="prompt">{escape(prompt)}</span>'
        for step in self.steps:
            held, sampled = words.decode(step.taken[:-1]), words.decode(step.taken[-1:])
            text += f'<span class="held">{escape(held)}</span><b>{escape(sampled)}</b>'
        rows = []
        for number, step in list(enumerate(self.steps, 1))[: -NUM_SHOWN - 1 : -1]:
            tokens = [drawing.token(piece(i), "held") for i in step.draft_token_ids[: step.num_accepted]]
            tokens += [drawing.token(piece(i), "refused") for i in step.draft_token_ids[step.num_accepted :]]
            rows.append((str(number), drawing.text(tokens), drawing.token(piece(step.taken[-1]), "sampled")))
        steps = drawing.table(("step", "draft tokens", "sampled"), rows)
        return [("The text", f"{text}</p>"), ("Steps, the newest first", steps), ("What it brought", self._counts())]

    def _counts(self) -> str:
        drafting = [step for step in self.steps if step.draft_token_ids]
        accepted, checked = sum(step.num_accepted for step in drafting), sum(step.num_checked for step in drafting)
        rows = [
            ("draft tokens", f"{sum(len(step.draft_token_ids) for step in drafting):,}"),
            ("accepted", f"{accepted:,}"),
        ]
        if drafting:
            share = accepted / checked
            a_step = sum(len(step.taken) for step in drafting) / len(drafting)
            expected = sum(expected_run(share, len(step.draft_token_ids)) for step in drafting) / len(drafting)
            rows += [("of those checked", f"{share:.0%}"), ("tokens a step with draft tokens", f"{a_step:.2f}")]
            rows += [("what the formula expects", f"{expected:.2f}")]
        for num_rows in sorted({rows for rows, _ in self.seconds}):
            times = sorted(seconds for rows, seconds in self.seconds if rows == num_rows)
            rows.append(
                (
                    f"a step of {num_rows} rows" if num_rows > 1 else "a step of one row",
                    f"{times[len(times) // 2] * 1e3:.0f} ms",
                )
            )
        return drawing.table(("", ""), rows)
