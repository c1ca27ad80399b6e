"""The picture of the eight steps."""

from chapters.svg import arrow, box, svg, words

LEFT, MIDDLE, RIGHT, WIDE = 10, 116, 222, 88
SCHEDULER, MODEL, SAMPLER, HIGH = 44, 118, 226, 40  # tops of the rows


def eight_steps() -> str:
    """Where each step's part has its place in one step of the engine."""
    parts = ['<rect class="frame" x="0" y="14" width="320" height="274" rx="6"/>']
    parts.append(words(10, 33, "8  the engine: one step after another", "name"))
    parts.append(box(LEFT, SCHEDULER, WIDE, HIGH, "3\nscheduler", "one"))
    parts.append(box(LEFT, MODEL + 20, WIDE, HIGH, "2\nblock manager", "one"))
    parts.append(box(LEFT, SAMPLER, WIDE, HIGH, "1\nsequences", "one"))
    parts.append(box(MIDDLE, SCHEDULER, WIDE, HIGH, "4\nbatch", "two"))
    parts.append(box(MIDDLE, MODEL, WIDE, 80, "5\nmodel", "two"))
    parts.append(box(MIDDLE, SAMPLER, WIDE, HIGH, "7\nsampler", "two"))
    parts.append(box(RIGHT, MODEL, WIDE, 36, "6\nweights", "three"))
    parts.append(box(RIGHT, MODEL + 44, WIDE, 36, "KV cache,\nin blocks"))
    parts.append(arrow(LEFT + WIDE, SCHEDULER + 20, MIDDLE, SCHEDULER + 20))
    parts.append(arrow(MIDDLE + 44, SCHEDULER + HIGH, MIDDLE + 44, MODEL))
    parts.append(arrow(MIDDLE + 44, MODEL + 80, MIDDLE + 44, SAMPLER))
    parts.append(arrow(MIDDLE, SAMPLER + 20, LEFT + WIDE, SAMPLER + 20))
    parts.append(arrow(RIGHT, MODEL + 18, MIDDLE + WIDE, MODEL + 18))
    parts.append(arrow(MIDDLE + WIDE, MODEL + 62, RIGHT, MODEL + 62))
    parts.append(arrow(LEFT + 44, SAMPLER, LEFT + 44, MODEL + 20 + HIGH))
    parts.append(arrow(LEFT + 44, MODEL + 20, LEFT + 44, SCHEDULER + HIGH))
    parts.append(words(MIDDLE + 50, SCHEDULER + HIGH + 20, "ids, positions, slots", "tick"))
    parts.append(words(MIDDLE + 50, SAMPLER - 10, "logits", "tick"))
    parts.append(words(LEFT, SAMPLER + HIGH + 15, "prompts and answers", "tick"))
    return svg(
        "The eight steps of a nano engine",
        "The scheduler (3) chooses what a step computes, with the blocks of the block manager (2), which belong to "
        "sequences (1). The batch (4) makes tensors of it: token ids, positions, slots. The model (5) computes them "
        "with its weights (6), writes keys and values into the cache and reads them there. From its logits the "
        "sampler (7) takes a token for each sequence. The engine (8) makes such steps until all answers are complete.",
        parts,
        290,
    )
