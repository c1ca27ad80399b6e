"""The picture of chapter 10: the lab's setups under the line that the speed of its memory draws."""

import re
from pathlib import Path

from chapters.ch06_prefill_decode.pictures import demo_config
from chapters.ch06_prefill_decode.roofline import decode_chunks
from chapters.recording import quotes
from chapters.sealed import solution_of
from chapters.svg import Axis, Chart, Frame, Moved

step_cost = solution_of("ch06_prefill_decode").step_cost

HERE = Path(__file__).parent
CONTEXT = 256  # tokens of a sequence, as in the lab
TIMED = re.compile(r"^(.+?)\s{2,}([\d.]+) to\s+[\d.]+ ms", re.MULTILINE)
KINDS = {"1 decode": ("one", 1, "start", 9), "16 decodes": ("two", 16, "end", -9)}  # and where the words stand


def best_ms(kind: str) -> dict[str, float]:
    """Setup -> the fastest step, in the order in which the optimizations were switched on."""
    found = quotes(HERE)
    at = next(at for at, block in enumerate(found) if block.strip() == f"{kind}:")
    return {name: float(ms) for name, ms in TIMED.findall(found[at + 1])}


def memory_rate() -> float:
    """GB/s."""
    found = re.search(r"together read ([\d.]+) GB/s", "\n".join(quotes(HERE)))
    assert found is not None
    return float(found[1])


def roofline() -> Moved:
    """GFLOP/s that a step of 1 and of 16 decodes comes to, one optimization after another."""
    gigabytes, frames = memory_rate(), list[Frame]()
    costs = {kind: step_cost(demo_config(), 2, decode_chunks(n, CONTEXT)) for kind, (_, n, *_) in KINDS.items()}
    times = {kind: best_ms(kind) for kind in KINDS}
    for place, setup in enumerate(times["1 decode"]):
        x = Axis("FLOPs a byte of the step", (1, 2, 4, 8, 16), 0.7, 20, is_log=True)
        chart = Chart(x, Axis("GFLOP/s", (10, 30, 100, 300), 5, 500, is_log=True), 220)
        chart.curve([(x.low, x.low * gigabytes), (500 / gigabytes, 500)], "gone")
        chart.note(2.2, 2.2 * gigabytes, f"{gigabytes:g} GB/s", "gone", "end", (-6, -6))
        said = []
        for kind, (colour, _, anchor, by) in KINDS.items():
            cost, done = costs[kind], [*times[kind].values()][: place + 1]
            points = [(cost.intensity, cost.flops / ms / 1e6) for ms in done]
            chart.dots(points[:-1], f"{colour} open", 2.6)
            chart.dots(points[-1:], colour, 5)
            chart.note(*points[-1], kind, colour, anchor, (by, 4))
            least_ms = cost.read_bytes / gigabytes / 1e6
            said.append(f"{kind} {done[-1]:.1f} ms, of which its bytes need {least_ms:.1f}")
        text = "; ".join(said) + "."
        frames.append(Frame(setup, chart.draw(f"Under the roof, with {setup}", text), text))
    return Moved("the last one that is on", frames, len(frames) - 1)
