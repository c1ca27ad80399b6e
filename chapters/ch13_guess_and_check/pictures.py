"""The pictures of chapter 13: a step that checks a draft, and tokens a second by the number of draft tokens."""

from pathlib import Path

from chapters.ch13_guess_and_check.world import expected_run
from chapters.recording import quoted_sheet
from chapters.svg import WIDTH, Axis, Chart, Frame, Moved, arrow, box, svg, words
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.features.speculation.choose import choose_num_draft_tokens

CHANCES = (0, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 94, 97, 99)  # that a draft token is accepted, in percent
NUM_DRAFT_TOKENS = 8
NEWEST, DRAFT, SAMPLED = "the", ["island", "leaves", "near"], ["island", "leaves", "at", "the"]


def checked() -> str:
    """A decode with three draft tokens, as the engine's scheduler takes it. Only the model's choices are given here."""
    vocabulary = sorted({NEWEST, *DRAFT, *SAMPLED})
    scheduler = Scheduler(BlockManager(8, 16), max_num_seqs=1, max_num_batched_tokens=16, max_model_len=64)
    seq = Sequence([vocabulary.index(NEWEST)])
    scheduler.add(seq)
    output = scheduler.schedule({seq.seq_id: [vocabulary.index(word) for word in DRAFT]})
    [chunk] = output.chunks
    computed = [vocabulary[token_id] for token_id in chunk.token_ids]
    scheduler.update(output, [[vocabulary.index(word) for word in SAMPLED]])
    num_new = seq.num_generated_tokens
    step = WIDTH / len(computed)
    parts = [words(1, 12, "the tokens that one step computes", "name")]
    parts.append(box(1, 86, 318, 28, "the model: its weights are read once, for all rows"))
    parts.append(words(1, 195, "the token sampled in each row", "name"))
    for row, (token, sampled) in enumerate(zip(computed, SAMPLED, strict=True)):
        middle = step * (row + 0.5)
        parts.append(words(middle, 32, f"draft {row}" if row else "newest", "tick", "middle"))
        parts.append(box(middle - 34, 38, 68, 26, token, "one" if row < num_new else "gone"))
        parts.append(arrow(middle, 64, middle, 85))
        parts.append(arrow(middle, 114, middle, 135))
        parts.append(box(middle - 34, 136, 68, 26, sampled, "three strong" if row < num_new else "gone"))
        said = "does not count"
        if row < num_new:
            said = f"is draft {row + 1}" if row + 1 < num_new else f"not draft {row + 1}"
        parts.append(words(middle, 176, said, "tick", "middle"))
    parts.append(words(1, 215, f"the text goes on: {' '.join(SAMPLED[:num_new])}"))
    text = (
        f"A step computes {', '.join(computed)}, of which all but the first are draft tokens. Its rows sample "
        f"{', '.join(SAMPLED)}. {num_new} of these count: {', '.join(SAMPLED[:num_new])}."
    )
    return svg("A step that checks three draft tokens", text, parts, 221)


def draft_tokens() -> Moved:
    """For each chance that a draft token is accepted; the ring is what the engine's choose_num_draft_tokens takes."""
    sheet = quoted_sheet(Path(__file__).parent, "rows", "ms")
    times = dict(zip(sheet.column("rows"), sheet.column("ms"), strict=True))
    step_s = [times[rows] / 1e3 for rows in range(1, NUM_DRAFT_TOKENS + 2)]
    most = max(expected_run(CHANCES[-1] / 100, k) / step_s[k] for k in range(NUM_DRAFT_TOKENS + 1))
    tick = next(step for step in (25, 50, 100, 250) if 4 * step > most)
    frames = []
    for chance in CHANCES:
        a = chance / 100
        rates = [expected_run(a, k) / step_s[k] for k in range(NUM_DRAFT_TOKENS + 1)]
        [taken] = choose_num_draft_tokens([a], [NUM_DRAFT_TOKENS], step_s)
        text = (
            f"Without draft tokens, {rates[0]:.0f} tokens a second; the most, {max(rates):.0f}, with "
            f"{rates.index(max(rates))} of them. The engine takes {taken}, for {rates[taken]:.0f} tokens a second."
        )
        x = Axis("draft tokens in a step (k)", range(NUM_DRAFT_TOKENS + 1), -0.2, NUM_DRAFT_TOKENS + 0.2)
        chart = Chart(x, Axis("tokens a second", range(0, int(most), tick), 0, 1.1 * most))
        chart.curve([(x.low, rates[0]), (x.high, rates[0])], "gone thin dashed")
        chart.curve(enumerate(rates))
        chart.dots(enumerate(rates))
        chart.dots([(taken, rates[taken])], "four ring", 7)
        frames.append(
            Frame(
                f"{chance}%", chart.draw(f"Tokens a second if {chance}% of the draft tokens are accepted", text), text
            )
        )
    return Moved("probability that a draft token is accepted", frames, CHANCES.index(70))
