"""Chapter 16's lab as a web page shows it: the same object as in the terminal, drawn as HTML."""

from collections.abc import Sequence
from html import escape

from chapters.ch16_fixed_memory.notebook import RULES, SIZE, Answer, Notebook, State
from chapters.ch16_fixed_memory.placing import BLOCK_SIZE
from chapters.ch16_fixed_memory.shelf import Shelf
from chapters.ch16_fixed_memory.world import ACTIONS, ASK, World
from chapters.player import Scene

__all__ = ["ACTIONS", "ASK", "SCENES", "TITLE", "new_world", "panels", "values"]

TITLE = "A notebook of fixed size, and a shelf for its snapshots"
SCENES = [
    Scene(
        "A notebook fills",
        "/w16",
        "Sixteen people come into the house, one line each. The notebook has 8 x 8 numbers, however much is written "
        "into it. The first answers are right. Watch which ones go wrong, and how much of the right room is read.",
    ),
    Scene(
        "The same sixteen by the delta rule",
        "w16/d2",
        "The same lines are written in different ways: first by the delta rule, then with half of its change. The last "
        "answers get better, the first ones worse.",
    ),
    Scene(
        "People move",
        "w3/c9",
        "Three people make nine moves, written by adding up. The room that somebody has left is never taken off. If "
        "you ask for anybody, you get a mixture of all their rooms so far.",
    ),
    Scene(
        "People move, and lines are corrected",
        "w4d/c12",
        "Four people make twelve moves, written by the delta rule: what a name already gives is taken off before its "
        "new room is added.",
    ),
    Scene(
        "600 tokens are shared",
        "n/pnnn",
        "The first request left no snapshot, so the second one finds K/V in the cache and still begins at its first "
        "token. A snapshot is placed at its end, and from then on all requests begin there.",
    ),
    Scene(
        "1,500 tokens are shared, at the end it is too late",
        "o/pnpnpn",
        "Each prompt gets a snapshot at its end, and 700 of its tokens are its own: no other prompt ever gets there.",
    ),
    Scene(
        "1,500 tokens are shared, at the fork",
        "o/nbnnn",
        "The second prompt leaves known text after token 1,488. A snapshot there is what the third one needs. Compare "
        "where this engine's second request begins.",
    ),
    Scene(
        "Shared lengths vary",
        "o3/t(4896)nnnnn",
        "Prompts share 4,900 to 5,200 tokens of 6,000. One snapshot just before token 4,900 serves all of them. You "
        "can place it only because you know the lengths; the policy does not, but its requests 3 to 5 begin deeper. "
        "The panel counts more snapshots than yours: each request leaves one at its end, where a chat would go on.",
    ),
]
new_world = World
LABELS = {"yours": "you", "this engine's": "this engine", "unbounded": "unbounded"}


def values(world: World) -> dict[str, str]:
    """The shelf's once there is one: it is made when it is first shown."""
    of_notebook = {"d": world.notebook.rule.name, "f": f"{world.notebook.decay:g}"}
    shelf = world.shelf if world.shows == "shelf" else None
    return of_notebook | ({"o": shelf.workload, "m": f"{shelf.bound} snapshots"} if shelf else {"o": "", "m": ""})


def panels(world: World) -> list[tuple[str, str]]:
    if world.shows == "notebook":
        book = world.notebook
        return [
            (f"The notebook: {SIZE} x {SIZE} numbers, {len(book.lines)} lines written", draw_state(book.state)),
            (f"Asked for everybody ({book.rule.name}, decay {book.decay:g})", draw_answers(book.answers)),
            ("Right answers after each line, by each rule", draw_right(book)),
        ]
    shelf = world.shelf
    return [
        (f"The next prompt: {shelf.workload}", draw_next(shelf)),
        ("Sent so far: the token after which each began", draw_sent(shelf)),
        ("Prompt tokens that were computed", draw_computed(shelf)),
    ]


# -- the notebook -----------------------------------------------------------------------------------------------------


def draw_state(state: State) -> str:
    """Each number with its sign and a colour that is as strong as it is large."""
    cells = "".join(
        f'<i class="{"plus" if x > 0 else "minus"}" style="--depth:{min(round(70 * abs(x)), 70)}%">{x:.1f}</i>'
        for row in state
        for x in row
    )
    return f'<div class="state" role="img" aria-label="{SIZE} rows of {SIZE} numbers">{cells}</div>'


def draw_answers(answers: list[Answer]) -> str:
    if not answers:
        return '<p class="none">Nobody is in the house. Write a line.</p>'
    items = "".join(
        f'<li class="chip {"hit" if answer.is_right else "wrong"}"><span class="sign">{"=" if answer.is_right else "!"}'
        f"</span><b>{answer.name}</b> {answer.found}{'' if answer.is_right else f', not {answer.room}'} "
        f"<em>{answer.strength:.2f}</em></li>"
        for answer in answers
    )
    return (
        f'<ol class="answers blocks">{items}</ol><p class="small">The number says how much of the right room was read; '
        "1 is all of it.</p>"
    )


def draw_right(book: Notebook) -> str:
    """A line for each rule; a dotted one shows what would be right if nothing were ever lost."""
    num = len(book.lines)
    if not num:
        return '<p class="none">The curves begin with the first line.</p>'
    wide, top = max(num - 1, 1), len(book.answers)

    def points(values: Sequence[int]) -> str:
        return " ".join(f"{24 + 270 * i / wide:.1f},{104 - 94 * n / top:.1f}" for i, n in enumerate(values))

    everybody = [len(dict(book.lines[:n])) for n in range(1, num + 1)]
    lines = f'<polyline class="all" points="{points(everybody)}"/>'
    legend = '<li><i class="swatch all"></i>all of them</li>'
    for number, rule in enumerate(RULES):
        found = book.right_so_far(rule)
        lines += f'<polyline class="rule-{number}" points="{points(found)}"/>'
        legend += f'<li><i class="swatch rule-{number}"></i>{rule.name}: {found[-1]} of {top}</li>'
    what = f"Right answers after each of {num} lines, of at most {top}"
    return (
        f'<figure class="chart curves"><svg viewBox="0 0 300 112" role="img" aria-label="{what}">'
        f'<text x="20" y="14" text-anchor="end">{top}</text><text x="20" y="107" text-anchor="end">0</text>'
        f'<line x1="22" y1="104" x2="296" y2="104"/>{lines}</svg><ul class="legend">{legend}</ul></figure>'
    )


# -- the shelf --------------------------------------------------------------------------------------------------------


def draw_next(shelf: Shelf) -> str:
    """The prompt as a bar: what the cache has of it, its snapshots below, yours above."""
    if shelf.is_over:
        return '<p class="none">All requests were sent. Take another workload, or start over.</p>'
    length, marks = len(shelf.prompt), sorted(filter(None, shelf.marks))

    def x(position: int) -> float:
        return 6 + 348 * position / length

    def arrows(positions: Sequence[int], kind: str, y: int, by: int) -> str:
        return "".join(
            f'<path class="{kind}" d="M{x(p):.1f} {y} l-5 {by} h10 z"><title>{p:,}</title></path>' for p in positions
        )

    what = (
        f"{shelf.num_matched:,} of {length:,} tokens have K/V in the cache, {len(shelf.snapshots)} snapshots on the way"
    )
    bar = (
        f'<rect class="new" x="6" y="20" width="348" height="22"/>'
        f'<rect class="known" x="6" y="20" width="{x(shelf.num_matched) - 6:.1f}" height="22"/>'
        f"{arrows(marks, 'mark', 19, -11)}{arrows(shelf.snapshots, 'snapshot', 43, 11)}"
    )
    rows = {
        "K/V in the cache": f"{shelf.num_matched:,} of {length:,} tokens",
        "last full block ends at": f"{shelf.last_end:,}",
        "snapshots on its way, below": ", ".join(f"{p:,}" for p in shelf.snapshots) or "none",
        "so it begins after": f"{shelf.begins:,}",
        "snapshots that you want, above": ", ".join(f"{p:,}" for p in marks) or "none",
        "snapshots in all": f"{len(shelf.snapshots_kept)} of at most {shelf.bound}",
    }
    counters = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in rows.items())
    return (
        f'<figure class="chart prompt"><svg viewBox="0 0 360 58" role="img" aria-label="{what}">{bar}</svg></figure>'
        f'<dl class="counters">{counters}</dl><p class="small">Blocks of {BLOCK_SIZE} tokens.</p>'
    )


def draw_sent(shelf: Shelf) -> str:
    if not shelf.sent:
        return '<p class="none">None yet. Place snapshots, then send.</p>'
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "tokens", "known", *LABELS.values()))
    rows = "".join(
        f'<tr><th scope="row">{number}</th>'
        + "".join(f"<td>{n:,}</td>" for n in (sent.length, sent.matched, sent.yours, sent.policy, sent.unbounded))
        + "</tr>"
        for number, sent in enumerate(shelf.sent, start=1)
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        '<p class="small">known: tokens whose K/V the cache had.</p>'
    )


def draw_computed(shelf: Shelf) -> str:
    computed = shelf.computed()
    most = max(1, *computed.values())
    bars = "".join(
        f'<li><span>{escape(LABELS[name])}</span><div class="bar"><span class="stored" style="flex-grow:{num}">{num:,}'
        f'</span><span style="flex-grow:{most - num}"></span></div></li>'
        for name, num in computed.items()
    )
    return f'<ul class="shares">{bars}</ul>'
