"""The picture of chapter 13: tokens a second by the number of draft tokens, for the step times that the text quotes."""

from pathlib import Path

from chapters.ch13_guess_and_check.world import expected_run
from chapters.recording import quoted_sheet
from chapters.svg import Axis, Chart, Frame, Moved
from nanovllm.features.speculation.choose import choose_num_draft_tokens

CHANCES = (0, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 94, 97, 99)  # that a draft token is accepted, in percent
NUM_DRAFT_TOKENS = 8


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
