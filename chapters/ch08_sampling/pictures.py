"""The picture of chapter 8: plots on a street, by the engine's rules, and the walk that chooses one."""

import torch

from chapters.svg import svg, words
from nanovllm.worker.sampler import logit_threshold

LOGITS = (1.0, 4.0, -2.0, 3.0, 2.0)  # by token id
NAMES = "ABCDE"
TEMPERATURE, TOP_P, NOISE, WIDE = 2, 0.8, 0.62, 318
KINDS = ("four", "one", "", "two", "three")


def street() -> str:
    """In the sampler's order: temperature, then top_p, then the draw."""
    logits = torch.tensor([LOGITS])
    scaled = logits / TEMPERATURE
    threshold = logit_threshold(scaled, torch.tensor([len(LOGITS)]), torch.tensor([TOP_P]), torch.tensor([0.0]))
    kept = scaled.masked_fill(scaled < threshold[:, None], -torch.inf)
    gone = " and ".join(name for name, logit in zip(NAMES, kept[0].tolist(), strict=True) if logit == -torch.inf)
    rows = (
        ("temperature 1: a plot is as wide as its probability", logits),
        (f"temperature {TEMPERATURE}: plots become more alike", scaled),
        (f"top_p {TOP_P}: {gone} are gone, the rest move up", kept),
    )
    parts, said = list[str](), list[str]()
    for row, (title, each) in enumerate(rows):
        top, left, shares = 18 + 62 * row, 1.0, each.softmax(-1)[0].tolist()
        parts.append(words(1, top - 6, title, "name"))
        for name, kind, share in zip(NAMES, KINDS, shares, strict=True):
            if share > 0:
                width = WIDE * share
                parts.append(f'<rect class="box {kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="28"/>')
                if width > 12:
                    parts.append(words(left + width / 2, top + 18, name, "in", "middle"))
                left += width
        parts_said = ", ".join(f"{name} {share:.0%}" for name, share in zip(NAMES, shares, strict=True) if share > 0)
        said.append(f"{title}: {parts_said}")
    end = 1 + WIDE * NOISE
    y = 18 + 62 * 2 + 28
    cumulative = kept.softmax(-1).cumsum(-1)[0]
    chosen = NAMES[int(torch.searchsorted(cumulative, torch.tensor(NOISE), right=True))]
    parts.append(f'<path class="stream" d="M1,{y + 14}H{end:.1f}"/>')
    parts.append(f'<path class="tip" d="M{end:.1f},{y + 3}l-4,8h8z"/>')
    parts.append(words(end / 2, y + 31, f"walk {NOISE} of the street: {chosen}", "name", "middle"))
    return svg("A street of tokens", "; ".join(said) + f". A walk of {NOISE} ends at {chosen}.", parts, y + 38)
