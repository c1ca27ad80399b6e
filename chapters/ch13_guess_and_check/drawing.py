"""Pictures of guesses: what held, what was refused, what came instead."""

from rich.table import Table
from rich.text import Text

from chapters.ch13_guess_and_check.world import Step, World, expected_run

HELD, REFUSED, SAMPLED = "green", "red", "bold"


def pieces(world: World, token_ids: list[int], style: str) -> Text:
    return Text("|".join(map(world.piece, token_ids)), style)


def draw_steps(world: World, steps: list[Step], first: int = 1) -> Table:
    """A line for each step."""
    table = Table("step", "guesses that held", "refused", "sampled", show_edge=False)
    for number, step in enumerate(steps, first):
        held, refused = step.guesses[: step.num_held], step.guesses[step.num_held :]
        last = pieces(world, step.taken[-1:], SAMPLED)
        table.add_row(str(number), pieces(world, held, HELD), pieces(world, refused, REFUSED), last)
    return table


def draw_text(world: World) -> Text:
    """The text so far: the prompt, what was guessed right, what was sampled where no guess held."""
    decode = world.tokenizer.decode
    text = Text(world.prompt, "dim")
    for step in world.steps:
        text.append(decode(step.taken[:-1]), HELD).append(decode(step.taken[-1:]), SAMPLED)
    return text


def draw_counts(steps: list[Step]) -> Table:
    table = Table("", "steps", "guesses", "held", "of those checked", "tokens a step", "expected", show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, some in (("all", steps), ("with guesses", [step for step in steps if step.guesses])):
        if some:
            table.add_row(name, *counts_of(some))
    return table


def counts_of(steps: list[Step]) -> tuple[str, ...]:
    """Steps, guesses, held, the share of the checked ones that held, tokens a step, and what the formula expects."""
    num_held, num_checked = sum(step.num_held for step in steps), sum(step.num_checked for step in steps)
    a, num_tokens = num_held / max(num_checked, 1), sum(len(step.taken) for step in steps)
    expected = sum(expected_run(a, len(step.guesses)) for step in steps) / len(steps)
    numbers = str(len(steps)), str(sum(len(step.guesses) for step in steps)), str(num_held)
    return *numbers, f"{a:.0%}" if num_checked else "-", f"{num_tokens / len(steps):.2f}", f"{expected:.2f}"
