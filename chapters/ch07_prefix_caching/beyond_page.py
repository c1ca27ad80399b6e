"""Conversations with tiers below the pool, as a web page shows them."""

from html import escape

from chapters.ch07_prefix_caching.beyond import SIGNS, SIZES, Conversations
from chapters.player import Scene
from nanovllm.serving.http.html_pictures import draw_counters

CLASSES = {"pool": "hit", "memory": "cached", "disk": "own", "computed": "miss", "own": ""}
MEANINGS = {
    "pool": "in the pool",
    "memory": "in memory",
    "disk": "on the disk",
    "computed": "computed",
    "own": "not full, computed",
}
SCENES = [
    Scene(
        "Beyond memory: a pool, memory and a disk",
        "c8/c8",
        "Four people come in turn, and each sends all that was said before. The pool has room for 20 blocks, and soon "
        "that is too little. Watch where the blocks of each prompt are found.",
    ),
    Scene(
        "Beyond memory: without tiers, and with them",
        "h3dc12/d3h",
        "Twelve requests without memory and disk. Then sizes change: the disk gets room, then memory. After each "
        "change all requests come again, and the last panel shows what was computed.",
    ),
    Scene(
        "Beyond memory: the process ends",
        "c12/kc4",
        "After twelve requests the process ends, and another begins. Its pool is empty, and so is its memory. What was "
        "written to the disk is found.",
    ),
]


def panels(world: Conversations) -> list[tuple[str, str]]:
    return [
        ("Room in blocks: the buttons p, h and d change it, and everything is played again", draw_sizes(world)),
        (f"Requests: {world.order}", draw_visits(world)),
        ("Blocks that are kept", draw_filled(world)),
        ("Prompt tokens, and where their K/V came from", draw_counters(dict(world.totals()))),
    ]


def draw_sizes(world: Conversations) -> str:
    """Each size that a tier may have; only the one that it has is a chip, since no size is a button."""
    rows = ""
    for tier, values in SIZES.items():
        chips = "".join(
            f'<li class="chip hit" aria-current="true"><b>{value}</b></li>'
            if value == world.sizes[tier]
            else f'<li class="small">{value}</li>'
            for value in values
        )
        rows += f'<li class="request"><span class="name">{tier}</span><ol class="blocks">{chips}</ol></li>'
    return f'<ol class="requests">{rows}</ol>'


def draw_visits(world: Conversations, last: int = 8) -> str:
    """A sign for each block of a prompt."""
    if not world.visits:
        return '<p class="none">Nobody yet. Let the first one come.</p>'
    rows = ""
    for number, visit in list(enumerate(world.visits))[-last:]:
        chips = "".join(chip(visit.place(index)) for index in range(visit.num_blocks))
        rows += '<li class="none">a new process</li>' if number in world.restarts else ""
        head = f'<span class="name">{escape(visit.name)}</span>'
        rows += f'<li class="request">{head}<ol class="blocks">{chips}</ol></li>'
    legend = "".join(chip(place, f" {meaning}") for place, meaning in MEANINGS.items())
    return f'<ol class="requests">{rows}</ol><ul class="legend" aria-label="Legend">{legend}</ul>'


def chip(place: str, meaning: str = "") -> str:
    return (
        f'<li class="chip {CLASSES[place]}" title="{MEANINGS[place]}"><span class="sign">{SIGNS[place]}</span>'
        f"{meaning}</li>"
    )


def draw_filled(world: Conversations) -> str:
    bars = "".join(
        f'<li><span>{tier}</span><div class="bar"><span class="stored" style="flex-grow:{kept}">{kept} of {room}</span>'
        f'<span style="flex-grow:{room - kept}"></span></div></li>'
        for tier, (kept, room) in world.filled().items()
    )
    return f'<ul class="shares">{bars}</ul>'
