"""The pictures of chapter 1: attention as a weighted sum, grouped heads, rotation and the residual stream."""

from math import cos, pi, sin
from pathlib import Path

import torch

from chapters.ch06_prefill_decode.pictures import demo_config
from chapters.recording import quoted_sheet
from chapters.svg import arrow, box, svg, words
from nanovllm.worker.layers import RotaryEmbedding

HERE = Path(__file__).parent
NUM_QUERY_HEADS, NUM_KV_HEADS = 8, 2
PAIRS, POSITIONS = (0, 4, 8), 6


def weighted_sum() -> str:
    """The head whose numbers the text quotes: scores, shares, and values that count by their shares."""
    sheet = quoted_sheet(HERE, "token", "q · k", "weight")
    tokens = [row[1].strip("' ") for row in sheet.rows]
    rows = list(zip(tokens, sheet.column("q · k"), sheet.column("divided"), sheet.column("weight"), strict=True))
    top, step = 34, 34
    middle = top + step * (len(rows) - 1) / 2
    parts = [words(x, 12, text, "name", anchor) for x, text, anchor in (
        (2, "query", "start"), (84, "keys", "middle"), (148, "q · k / 8", "middle"), (205, "weights", "middle"),
        (262, "values", "middle"), (318, "sum", "end"),
    )]  # fmt: skip
    parts.append(box(0, middle - 13, 34, 26, tokens[-1], "one"))
    for number, (token, _, divided, weight) in enumerate(rows):
        y = top + step * number
        parts.append(f'<path class="wire" d="M34,{middle:.1f}L56,{y}"/>')
        parts.append(box(56, y - 11, 56, 22, token))
        parts.append(words(160, y + 4, f"{divided:.2f}", "", "end"))
        parts.append(f'<rect class="two" x="178" y="{y - 9}" width="{max(0.54 * weight, 0.5):.1f}" height="8"/>')
        parts.append(words(178, y + 11, f"{weight:.1f}%", "two"))
        width = 0.6 + 4.4 * weight / 100
        parts.append(f'<path class="share" style="stroke-width:{width:.1f}" d="M278,{y}L298,{middle:.1f}"/>')
        parts.append(box(246, y - 11, 32, 22, "v", "two" if weight > 50 else ""))
    parts.append(box(298, middle - 13, 22, 26, "+", "two"))
    shares = ", ".join(f"{token} {weight:.1f} percent" for token, _, _, weight in rows)
    said = f"The query of {tokens[-1]} is compared with every key; the softmax of the scores gives shares: {shares}. "
    return svg("Attention as a weighted sum", f"{said}The values are added up with these shares.", parts, 186)


def grouped_heads() -> str:
    """Query heads above, the KV heads that they read below."""
    parts, size, group = list[str](), 40, NUM_QUERY_HEADS // NUM_KV_HEADS
    parts.append(words(2, 12, "query heads", "name"))
    for kv_head in range(NUM_KV_HEADS):
        kind = ("one", "two")[kv_head]
        middle = size * (group * kv_head + group / 2)
        for head in range(group * kv_head, group * (kv_head + 1)):
            x = size * head + size / 2
            parts.append(f'<path class="wire" d="M{x},44L{middle},88"/>')
            parts.append(box(size * head + 5, 20, size - 10, 26, str(head), kind))
        parts.append(box(middle - 34, 86, 68, 30, f"K, V  {kv_head}", kind))
    parts.append(words(2, 134, "KV heads", "name"))
    text = "Query heads 0 to 3 read KV head 0; query heads 4 to 7 read KV head 1."
    return svg("Eight query heads share two KV heads", text, parts, 138)


def rotation() -> str:
    """The hands of three pairs of the demo model's keys, by the engine's own table."""
    rotary = RotaryEmbedding(demo_config(), POSITIONS, torch.float32, torch.device("cpu"))
    cosines, sines = rotary.cos_sin(torch.arange(POSITIONS))
    parts, radius, left, step = [words(2, 12, "position", "name")], 17, 88, 42
    for position in range(POSITIONS):
        parts.append(words(left + step * position, 12, str(position), "name", "middle"))
    for row, pair in enumerate(PAIRS):
        y, kind = 40 + 48 * row, ("one", "two", "three")[row]
        angle = float(torch.atan2(sines[1, pair], cosines[1, pair]))
        parts.append(words(2, y - 1, f"pair {pair}", kind))
        parts.append(words(2, y + 12, f"{angle:.2f} rad", "tick"))
        for position in range(POSITIONS):
            x = left + step * position
            turn = position * angle % (2 * pi)
            assert abs(cos(turn) - float(cosines[position, pair])) < 1e-5
            parts.append(f'<circle class="gone open" cx="{x}" cy="{y}" r="{radius}"/>')
            end = x + radius * cos(turn), y - radius * sin(turn)
            parts.append(f'<polyline class="{kind}" points="{x},{y} {end[0]:.1f},{end[1]:.1f}"/>')
            parts.append(f'<circle class="{kind}" cx="{end[0]:.1f}" cy="{end[1]:.1f}" r="2.6"/>')
    text = "Pair 0 turns by one radian a position, pair 4 by about a quarter of that, and pair 8 hardly at all."
    return svg("Pairs of a key, rotated by its position", text, parts, 160)


def residual() -> str:
    """One layer: the stream runs straight down, and two branches add to it."""
    parts = [words(16, 12, "residual stream [T, 576]", "name")]
    parts.append('<path class="stream" d="M30,20V252"/><path class="tip" d="M30,262l-6,-10h12z"/>')
    for top, norm, work, kind, text in (
        (34, "input_layernorm", "self_attn", "one", "tokens look at each other"),
        (142, "post_attention_layernorm", "mlp", "two", "each token on its own"),
    ):
        parts.append(arrow(34, top + 11, 78, top + 11))
        parts.append(box(79, top, 158, 22, norm))
        parts.append(arrow(154, top + 22, 154, top + 40))
        parts.append(box(79, top + 41, 158, 24, work, kind))
        parts.append(words(242, top + 15, "a scaled copy", "tick"))
        parts.append(words(79, top + 81, text, "tick"))
        parts.append(arrow(79, top + 53, 42, top + 53))
        parts.append(f'<circle class="gone open" cx="30" cy="{top + 53}" r="11"/>')
        parts.append(words(30, top + 57.5, "+", "in strong", "middle"))
    parts.append(words(44, 260, "the next layer, or the last norm and the logits", "name"))
    text = (
        "The stream runs through the layer unchanged. A scaled copy goes through self_attn, whose result is added to "
        "the stream; a scaled copy of the sum goes through the mlp, whose result is added, too."
    )
    return svg("The residual stream in one layer", text, parts, 266)
