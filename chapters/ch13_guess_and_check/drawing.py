"""Pictures of draft tokens: which were accepted, which were rejected, what came instead."""

from rich.table import Table
from rich.text import Text

from chapters.ch13_guess_and_check.world import Step, World, expected_run

ACCEPTED, REJECTED, SAMPLED = "green", "red", "bold"


def pieces(world: World, token_ids: list[int], style: str) -> Text:
    return Text("|".join(map(world.piece, token_ids)), style)


def draw_steps(world: World, steps: list[Step], first: int = 1) -> Table:
    """A line for each step."""
    table = Table("step", "accepted", "rejected", "sampled", show_edge=False)
    for number, step in enumerate(steps, first):
        accepted, rejected = step.draft_token_ids[: step.num_accepted], step.draft_token_ids[step.num_accepted :]
        last = pieces(world, step.taken[step.num_accepted :], SAMPLED)
        table.add_row(str(number), pieces(world, accepted, ACCEPTED), pieces(world, rejected, REJECTED), last)
    return table


def draw_text(world: World) -> Text:
    """The text so far: the prompt, draft tokens that were accepted, what was sampled after them."""
    decode = world.tokenizer.decode
    text = Text(world.prompt, "dim")
    for step in world.steps:
        accepted, sampled = step.taken[: step.num_accepted], step.taken[step.num_accepted :]
        text.append(decode(accepted), ACCEPTED).append(decode(sampled), SAMPLED)
    return text


def draw_counts(steps: list[Step]) -> Table:
    table = Table("", "steps", "drafted", "accepted", "of those checked", "tokens a step", "expected", show_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, some in (("all", steps), ("with draft tokens", [step for step in steps if step.draft_token_ids])):
        if some:
            table.add_row(name, *counts_of(some))
    return table


def counts_of(steps: list[Step]) -> tuple[str, ...]:
    """Steps, draft tokens, accepted ones, their share of those checked, tokens a step, and what the formula expects."""
    num_accepted, num_checked = sum(step.num_accepted for step in steps), sum(step.num_checked for step in steps)
    a, num_tokens = num_accepted / max(num_checked, 1), sum(len(step.taken) for step in steps)
    expected = sum(expected_run(a, len(step.draft_token_ids)) for step in steps) / len(steps)
    numbers = str(len(steps)), str(sum(len(step.draft_token_ids) for step in steps)), str(num_accepted)
    return *numbers, f"{a:.0%}" if num_checked else "-", f"{num_tokens / len(steps):.2f}", f"{expected:.2f}"
