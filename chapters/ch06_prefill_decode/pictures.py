"""The pictures of chapter 6: the roofline, with the steps that the text's lab has measured."""

import re
import tempfile
from pathlib import Path

from chapters.ch06_prefill_decode.roofline import StepCost, demo_decodes
from chapters.course import Progress, find_chapter
from chapters.recording import quoted_sheet, quotes
from chapters.svg import Axis, Chart, Frame, Moved
from nanovllm.checkpoint import ModelConfig

HERE = Path(__file__).parent
SEQUENCES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 128)
CONTEXT = 64  # tokens of a sequence, as in the lab
H100 = 3350, 989_000  # GB/s and GFLOP/s, by NVIDIA's data sheet: SXM, bf16 without sparsity
DEMO = """{
"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
"intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64,
"hidden_act": "silu", "tie_word_embeddings": true, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05,
"rope_theta": 100000.0
}"""


def demo_config() -> ModelConfig:
    """The demo model's sizes: the checkpoint itself need not be there."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(DEMO, "utf-8")
        return ModelConfig.from_directory(Path(folder))


def rates() -> tuple[float, float, float]:
    """GB/s, GFLOP/s and FLOPs a byte of the machine whose figures the text quotes."""
    found = re.search(r"Reads ([\d.,]+) GB/s, does ([\d.,]+) GFLOP/s.*?: ([\d.,]+) FLOPs", "\n".join(quotes(HERE)))
    assert found is not None
    gigabytes, gflops, corner = (float(each.replace(",", "")) for each in found.groups())
    return gigabytes, gflops, corner


def measured() -> dict[str, tuple[float, float]]:
    """Step -> FLOPs a byte, and the GFLOP/s at which it was done: its FLOPs take `FLOPs, ms` at the machine's rate."""
    sheet, (_, gflops, _) = quoted_sheet(HERE, "FLOPs a byte", "took, ms"), rates()
    columns = zip(*(sheet.column(name) for name in ("FLOPs a byte", "FLOPs, ms", "took, ms")), strict=True)
    return {
        row[0]: (intensity, gflops * flops_ms / took_ms)
        for row, (intensity, flops_ms, took_ms) in zip(sheet.rows, columns, strict=True)
    }


def h100() -> str:
    """The data sheet's roof, and steps of the demo model as far along as the text's count puts them."""
    gigabytes, gflops = H100
    x, y = Axis("FLOPs a byte of the step", (1, 10, 100, 1000), 0.6, 3000, is_log=True), (1, 10, 100, 1000)
    chart = Chart(x, Axis("TFLOP/s", y, 1, 2000, is_log=True), 230)
    corner, roof = gflops / gigabytes, gflops / 1e3
    chart.curve([(x.low, x.low * gigabytes / 1e3), (corner, roof), (x.high, roof)], "gone")
    chart.curve([(corner, 1), (corner, roof)], "gone thin dashed")
    chart.note(corner, 1, f"{corner:.0f}", "gone", by=(4, -5))
    chart.note(x.high, roof, f"{roof:.0f} TFLOP/s", "gone", "end", (0, -7))
    chart.note(20, 20 * gigabytes / 1e3, f"{gigabytes / 1e3:g} TB/s", "gone", "end", (-8, -6))
    sheet = quoted_sheet(HERE, "FLOPs a byte", "K/V MB")
    intensity = dict(zip((row[0] for row in sheet.rows), sheet.column("FLOPs a byte"), strict=True))
    said = []
    for step, kind in (
        ("1 x decode, context 64", "one"),
        ("16 x decode, context 64", "one"),
        ("prompt of 1,024", "two"),
    ):
        point = intensity[step], min(intensity[step] * gigabytes / 1e3, roof)
        chart.dots([point], kind, 4.5)
        if kind == "one":
            chart.note(*point, step.split(",")[0], kind, by=(9, 9))
        else:  # between the corner and the edge there is room for half of it
            first, last = step.split(" of ")
            chart.note(*point, first, kind, by=(-20, 18))
            chart.note(*point, f"of {last}", kind, by=(-20, 31))
        said.append(f"{step}: {intensity[step]:g} FLOPs a byte, {point[1]:.1f} TFLOP/s")
    return chart.draw("The roofline of an H100", f"{'; '.join(said)} at most.")


def readers_machine() -> tuple[float, float] | None:
    """GB/s and GFLOP/s, where the lab has measured them in a terminal of this computer."""
    found = Progress().get(find_chapter(6)).get("machine", {})
    return (found["GB/s"], found["GFLOP/s"]) if {"GB/s", "GFLOP/s"} <= found.keys() else None


def roofline() -> Moved:
    """A step of n decodes on the roof of the text's machine, and on that of the reader's where it is known."""
    (gigabytes, gflops, corner), theirs = rates(), readers_machine()
    frames = []
    for n in SEQUENCES:
        cost = demo_decodes(n, CONTEXT)
        text = (
            f"{cost.flops / 1e9:.2f} GFLOP and {cost.read_bytes / 1e6:.0f} MB, {cost.intensity:.1f} FLOPs a byte. "
            f"{floors(cost, n, gigabytes, gflops)}"
        )
        chart = base_chart(gigabytes, gflops, corner, theirs)
        points = [(cost.intensity, min(cost.intensity * gigabytes, gflops))]
        if theirs is not None:
            text += f" On your machine: {floors(cost, n, *theirs)}"
            points.append((cost.intensity, min(cost.intensity * theirs[0], theirs[1])))
        chart.curve([(cost.intensity, chart.y.low), max(points)], "four dashed")
        chart.dots(points, "four", 5)
        title = f"Roofline, a step of {n} decodes"
        frames.append(Frame(str(n), chart.draw(title, f"A machine with {gigabytes:g} GB/s. {text}"), text))
    return Moved("sequences that decode in one step", frames, SEQUENCES.index(8))


def floors(cost: StepCost, num_tokens: int, gigabytes: float, gflops: float) -> str:
    bytes_ms, flops_ms = cost.read_bytes / gigabytes / 1e6, cost.flops / gflops / 1e6
    limit = "bytes" if bytes_ms > flops_ms else "FLOPs"
    return (
        f"The bytes take {bytes_ms:.3g} ms, the FLOPs {flops_ms:.3g} ms: the step waits for its {limit}, and a token "
        f"costs {max(bytes_ms, flops_ms) / num_tokens:.3g} ms at least."
    )


def base_chart(gigabytes: float, gflops: float, corner: float, theirs: tuple[float, float] | None) -> Chart:
    """Two roofs at most, and the measured steps."""
    highest = 1.8 * max(gflops, theirs[1] if theirs else 0)
    farthest = max(1500, 3 * theirs[1] / theirs[0] if theirs else 0)
    x = Axis("FLOPs a byte of the step", powers_of_ten(1, farthest), 0.6, farthest, is_log=True)
    chart = Chart(x, Axis("GFLOP/s", powers_of_ten(10, highest), 10, highest, is_log=True), 230)
    for rates_of, kind in ((theirs, "three"), ((gigabytes, gflops), "gone")):
        if rates_of is not None:
            slope, roof = rates_of
            chart.curve([(x.low, max(x.low * slope, 10)), (roof / slope, roof), (x.high, roof)], kind)
    if theirs is not None:  # below the roofs, where nothing else is
        text = "yours: {:,.0f} GB/s, {:,.0f} GFLOP/s".format(*theirs)
        chart.note(x.high, chart.y.low, text, "three", "end", (0, -22))
    chart.note(x.high, gflops, f"{gflops:,.0f} GFLOP/s", "gone", "end", (0, -7))
    chart.curve([(corner, chart.y.low), (corner, gflops)], "gone thin dashed")
    chart.note(corner, chart.y.low, f"{corner:.0f}", "gone", by=(4, -5))
    chart.note(3, 3 * gigabytes, f"{gigabytes:g} GB/s", "gone", "end", (-6, -8))
    steps = measured()
    for kind, word, height in (("one", "decode", 70), ("two", "prompt", 43)):
        sample = 50, height  # of the marks, where nothing else is drawn
        chart.dots([*(point for name, point in steps.items() if word in name), sample], f"{kind} open")
        chart.note(*sample, f"measured: {word}s", kind, by=(8, 4))
    return chart


def powers_of_ten(low: int, high: float) -> list[int]:
    return [power for power in (10**n for n in range(9)) if low <= power <= high]
