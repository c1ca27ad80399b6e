"""The picture of chapter 9: an MLP on three ranks, with the sizes of the demo model."""

from chapters.ch06_prefill_decode.pictures import demo_config
from chapters.svg import box, svg, words
from nanovllm.features.parallel.group import shard_config

NUM_RANKS = 3
KINDS = ("one", "two", "three")


def mlp() -> str:
    """Each rank has a part of both weights; the ranks meet once, in the sum."""
    config = demo_config()
    whole, part = config.hidden_size, shard_config(config, NUM_RANKS).intermediate_size
    parts = [
        words(x, 12, text, "name", "middle") for x, text in ((14, "x"), (84, "gate_up"), (158, "h"), (216, "down"))
    ]
    for rank in range(NUM_RANKS):
        y = 20 + 64 * rank
        kind = KINDS[rank]
        parts.append(f'<path class="wire" d="M28,106L50,{y + 22}"/>')
        parts.append(box(50, y, 68, 44, f"{2 * part:,} rows\nof {2 * part * NUM_RANKS:,}", kind))
        parts.append(f'<path class="wire" d="M118,{y + 22}H140M176,{y + 22}H186"/>')
        parts.append(box(140, y + 8, 36, 28, str(part), kind))
        parts.append(box(186, y, 62, 44, f"{part} cols\nof {part * NUM_RANKS:,}", kind))
        parts.append(f'<path class="wire" d="M248,{y + 22}L276,106"/>')
        parts.append(words(84, y + 56, f"rank {rank}", "tick", "middle"))
    parts.append(box(0, 74, 28, 64, str(whole)))
    parts.append('<circle class="gone open" cx="284" cy="106" r="11"/>')
    parts.append(words(284, 110.5, "+", "in strong", "middle"))
    parts.append('<path class="wire" d="M295,106H300"/>')
    parts.append(words(306, 110, "y", "name"))
    parts.append(words(318, 82, "all-reduce", "tick", "end"))
    parts.append(words(160, 222, "no rank needs a number of another before the sum", "name", "middle"))
    text = (
        f"Each of {NUM_RANKS} ranks gets the whole x of {whole} numbers, computes {part} of the {part * NUM_RANKS:,} "
        "numbers in the middle, and from those a partial sum of every output. One all-reduce adds the partial sums."
    )
    return svg("An MLP on three ranks", text, parts, 228)
