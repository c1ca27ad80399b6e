"""The picture of what this is, for the repository's README."""

from chapters.svg import WIDTH, arrow, box, svg, words


def engine() -> str:
    """Prompts come in at the top, text leaves at the bottom, and a step's result leads to the next step."""
    parts = [words(2, 12, "prompts", "name"), words(WIDTH - 2, 12, "text, token by token", "name", "end")]
    for row, text in enumerate(("Which tram ...", "When was ...", "How old is ...")):
        parts.append(box(0, 20 + 24 * row, 112, 20, text))
    for row, text in enumerate(("... is Old Dock", "... in 1904", "... about 2,000")):
        parts.append(box(214, 20 + 24 * row, 106, 20, text, "three"))
    parts.append(arrow(56, 90, 56, 116))
    parts.append('<rect class="frame" x="0" y="118" width="320" height="202" rx="6"/>')
    parts.append(words(10, 135, "the engine", "name"))
    parts.append(box(12, 144, 112, 48, "scheduler\nchooses tokens", "one"))
    parts.append(box(196, 144, 112, 48, "model\nCPU or GPU", "two"))
    parts.append(arrow(124, 162, 195, 162))
    parts.append(arrow(196, 178, 125, 178))
    parts.append(words(160, 156, "a step", "tick", "middle"))
    parts.append(words(160, 192, "results", "tick", "middle"))
    parts.append(arrow(265, 144, 265, 90))
    parts.append(words(258, 110, "new tokens", "tick", "end"))
    parts.append(arrow(70, 192, 70, 224))
    parts.append(words(76, 212, "takes, frees", "tick"))
    parts.append(arrow(270, 224, 270, 193))
    parts.append(words(264, 212, "reads, writes", "tick", "end"))
    parts.append('<rect class="box" x="12" y="225" width="296" height="80" rx="3"/>')
    parts.append(words(22, 242, "KV cache: keys and values, in blocks"))
    rows = (("one", "shared", 4), ("two", "own", 2), ("gone", "free", 5))
    left = 22.0
    for kind, text, count in rows:
        for _ in range(count):
            parts.append(box(left, 252, 20, 26, "", kind))
            left += 24
        parts.append(words(left - 2 - 12 * count, 296, text, "tick", "middle"))
        left += 7
    return svg(
        "What nanovllm is",
        "Prompts enter the engine. Once a step, the scheduler chooses tokens, the model computes them and gives new "
        "tokens back, which leave as text. Keys and values of earlier tokens are kept in blocks: some are shared by "
        "prompts that begin alike, some belong to one request, some are free.",
        parts,
        322,
    )
