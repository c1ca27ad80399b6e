"""The pictures of chapter 8: plots on a street, by the engine's rules, and the walk that chooses one; three draws among
five tokens; the blocks in which top_k looks.
"""

import torch

from chapters.svg import arrow, box, svg, words
from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.worker.sampler import logit_threshold, uniform_noise

LOGITS = (1.0, 4.0, -2.0, 3.0, 2.0)  # by token id
NAMES = "ABCDE"
TEMPERATURE, TOP_P, NOISE, WIDE = 2, 0.8, 0.62, 318
KINDS = ("four", "one", "", "two", "three")
DRAWN_FROM, SEEDS = (2.0, -1.0, 0.5, 1.5, 0.0), (7, 8, 10)  # as in the text
LOGITS_OF_BLOCKS = ((1, 4, 0, 2), (3, 7, 1, 6), (2, 0, 3, 1), (0, 8, 2, 9), (4, 1, 5, 3))
TOP_K = 2


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


def draws() -> str:
    """Where the plots of five tokens end, and where the numbers of three seeds fall."""
    cumulative = torch.tensor(DRAWN_FROM).softmax(-1).cumsum(-1).tolist()
    parts, said, left, top = list[str](), list[str](), 0.0, 52
    for token_id, (end, kind) in enumerate(zip(cumulative, KINDS, strict=True)):
        right = min(end, 1.0)
        parts.append(box(1 + WIDE * left, top, WIDE * (right - left), 28, str(token_id) * (right - left > 0.04), kind))
        row, anchor = (28, "end") if token_id in (1, 4) else (14, "middle" if token_id == 2 else "end")
        parts.append(f'<path class="wire" d="M{1 + WIDE * right:.1f},{top + 28}v{row - 8}"/>')
        parts.append(words(1 + WIDE * right, top + 32 + row, f"{end:.3f}", "tick", anchor))
        said.append(f"token {token_id} ends at {end:.3f}")
        left = right
    for row, seed in enumerate(SEEDS):
        noise = uniform_noise(Sequence([7], SamplingParams(seed=seed)))
        token_id = sum(end <= noise for end in cumulative)
        x, y = 1 + WIDE * noise, 28 if row == 1 else 12
        parts.append(
            words(min(x + 6, WIDE) if row else x, y, f"seed {seed}: {noise:.3f}", "", "end" if row else "middle")
        )
        parts.append(arrow(x, y + 5, x, top))
        said.append(f"seed {seed} gives {noise:.3f} and token {token_id}")
    parts.append(words(WIDE / 2, top + 76, "at each border: the sum of the probabilities so far", "name", "middle"))
    return svg("Five tokens and three draws", "; ".join(said) + ".", parts, top + 82)


def blocks() -> str:
    """top_k in blocks: the k-th largest of the blocks' largest logits says in which blocks the k largest can be."""
    largest = [max(block) for block in LOGITS_OF_BLOCKS]
    least = sorted(largest)[-TOP_K]
    height, bottom = 11, 128
    parts = [words(1, 12, f"top_k={TOP_K}: which blocks can hold the {TOP_K} largest logits?", "name")]
    for number, (block, top) in enumerate(zip(LOGITS_OF_BLOCKS, largest, strict=True)):
        left, kind = 2 + 64 * number, "one" if top >= least else "gone"
        for place, logit in enumerate(block):
            x = left + 2 + 14 * place
            strong = " strong" * (logit == top)
            parts.append(box(x, bottom - height * logit, 12, max(height * logit, 1), "", kind + strong))
            if logit == top:
                parts.append(words(x + 6, bottom - height * logit - 4, str(logit), "", "middle"))
        parts.append(words(left + 29, bottom + 15, f"block {number}", "tick", "middle"))
        parts.append(words(left + 29, bottom + 29, "again" if top >= least else "skipped", "tick", "middle"))
    y = bottom - height * least
    parts.append(f'<path class="wire dashed" d="M0,{y}H320"/>')
    parts.append(words(2, y - 5, f"border: {least}", "name"))
    listed = ", ".join(map(str, largest))
    said = f"The largest logits of five blocks are {listed}; number {TOP_K} of these is {least}, so only blocks with a "
    return svg(
        "Five blocks and the border", f"{said}logit of at least {least} are looked at again.", parts, bottom + 34
    )
