"""Lab of chapter 16: a notebook of fixed size, snapshots placed by hand, and a small hybrid model in the engine.

The model has random weights: what is shown is whether answers agree, not what they say.
"""

from collections.abc import Callable
from typing import Any

from rich.text import Text

from chapters.app import explorer
from chapters.ch16_fixed_memory import page
from chapters.ch16_fixed_memory.drawing import draw_answers, draw_computed, draw_next, draw_sent, draw_state, panels
from chapters.ch16_fixed_memory.notebook import ADD_UP, RULES, Notebook
from chapters.ch16_fixed_memory.placing import POLICIES, UNBOUNDED, every_block, hard_workloads, play
from chapters.ch16_fixed_memory.recall import TRIALS, new_day, once_each, rewritten
from chapters.ch16_fixed_memory.shelf import Shelf
from chapters.ch16_fixed_memory.world import ACTIONS, ASK, World
from chapters.draw import make_table
from chapters.story import Story, one_core

HEIGHT, NUM_COLUMNS, LONGEST = 10, 64, 16_000  # of the curves, and the tokens at their right end
BOUNDS = 8, 16, 40  # snapshots


def make_app(model: str | None = None) -> Any:
    return explorer("16. A notebook of fixed size, and snapshots of it", World(), panels, ACTIONS, ask=ASK, page=page)


# -- the story --------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    with one_core():
        tell_growth(story)
        tell_filling(story)
        tell_moves(story)
        tell_days(story)
        tell_layer(story)
        tell_bits(story)
        tell_by_hand(story)
        tell_policies(story)
        tell_drafts(story)


def tell_growth(story: Story) -> None:
    from chapters.ch16_fixed_memory.layer import memory_08b

    story.part("What grows, and what does not")
    memory = memory_08b()
    story.say(
        f"Qwen3.5-0.8B, bf16: a token takes {memory.kv:,} bytes of K and V in the 6 layers that attend, and a sequence "
        f"{memory.state:,} bytes of states in the other 18. If all 24 attended: {memory.kv_of_all:,} bytes a token. "
        "The table shows the memory of one sequence in MB, by its length:"
    )
    story.show(draw_curves({"○ with states": memory.hybrid, "● all attention": memory.attention}))
    table = make_table("tokens", "with states", "all attention", "of it", width=14, first=8)
    for num in (100, 1000, 8000, 16_000, 128_000):
        ours, all_attend = memory.hybrid(num), memory.attention(num)
        table.add_row(f"{num:,}", f"{ours / 1e6:,.1f} MB", f"{all_attend / 1e6:,.1f} MB", f"{ours / all_attend:.2f}")
    story.show(table)
    even = memory.state / (memory.kv_of_all - memory.kv)
    in_tokens = memory.state / memory.kv
    story.say(
        f"Both take the same at {even:.0f} tokens. The states weigh as much as K and V of {in_tokens:,.0f} tokens."
    )


def draw_curves(curves: dict[str, Callable[[int], int]]) -> Text:
    """Megabytes against tokens, from 0 to LONGEST. Each name begins with its sign."""
    lengths = [LONGEST * column // (NUM_COLUMNS - 1) for column in range(NUM_COLUMNS)]
    top = max(curve(LONGEST) for curve in curves.values())
    rows = [[" "] * NUM_COLUMNS for _ in range(HEIGHT + 1)]
    for name, curve in curves.items():
        for column, length in enumerate(lengths):
            rows[HEIGHT - round(HEIGHT * curve(length) / top)][column] = name[0]
    labels = [f"{top * (HEIGHT - i) / HEIGHT / 1e6:>5.0f} |" if not i % 5 else "      |" for i in range(HEIGHT + 1)]
    drawn = [label + "".join(row) for label, row in zip(labels, rows, strict=True)]
    drawn.append("      +" + "-" * NUM_COLUMNS)
    drawn.append(f"       0    {'    '.join(curves)}".ljust(NUM_COLUMNS - 7) + f"{LONGEST:,} tokens")
    return Text("\n".join(line.rstrip() for line in drawn))


# -- the notebook -----------------------------------------------------------------------------------------------------


def tell_filling(story: Story) -> None:
    story.part("A notebook fills")
    book = Notebook()
    for _ in range(4):
        book.come_in()
    story.say(
        "Four lines are added up. First comes the state; then what is read for each name, and how much of the "
        "right room:"
    )
    story.show(draw_state(book.state))
    story.show(draw_answers(book.answers))
    for _ in range(8):
        book.come_in()
    story.say("Eight more lines are written into the same 64 numbers:")
    story.show(draw_answers(book.answers))
    story.say(
        f"On average over {TRIALS} notebooks with random keys and values, each key written once: percent right of all "
        "lines, and of the last four."
    )
    table = make_table("lines", *(name for rule in RULES for name in (rule.name, "last 4")), first=5, width=6)
    for num in (2, 4, 8, 16, 24):
        parts = list(range(num)), list(range(num))[-4:]
        table.add_row(str(num), *(f"{once_each(num, rule, part):.0%}" for rule in RULES for part in parts))
    story.show(table)


def tell_moves(story: Story) -> None:
    story.part("Lines that are corrected")
    book = Notebook()
    for _ in range(3):
        book.come_in()
    for _ in range(9):
        book.move()
    story.say(
        "Three people make nine moves, and every room so far is in the sum. First the lines are added up, then "
        "written by the delta rule:"
    )
    for rule in RULES[:2]:
        book.rule = rule
        story.show(draw_answers(book.answers, columns=3))
    story.say(
        "Four keys are written again and again with new values. The table shows the percentage of the newest "
        "values that are read:"
    )
    table = make_table("lines", *(rule.name for rule in RULES), "add up, decay 0.7", first=5, width=12)
    for num in (4, 8, 16, 32):
        faded = f"{rewritten(num, 4, ADD_UP, 0.7):.0%}"
        table.add_row(str(num), *(f"{rewritten(num, 4, rule):.0%}" for rule in RULES), faded)
    story.show(table)


def tell_days(story: Story) -> None:
    story.part("A new day")
    story.say("Twelve lines of yesterday, then the whole state fades once, then four new lines, which are asked for.")
    table = make_table("decay", *(rule.name for rule in RULES), first=5, width=12)
    for decay in (1.0, 0.5, 0.1, 0.0):
        table.add_row(f"{decay:g}", *(f"{new_day(12, 4, rule, decay):.0%}" for rule in RULES))
    story.show(table)


# -- the engine -------------------------------------------------------------------------------------------------------


def tell_layer(story: Story) -> None:
    from chapters.ch16_fixed_memory.layer import time_layer

    story.part("Token by token")
    story.say(
        "One layer of Qwen3.5-0.8B, random weights in bf16, on one core. Milliseconds for so many tokens of one "
        "sequence: its matrix products; convolution, recurrence and norm in C; the same token by token in PyTorch."
    )
    table = make_table("tokens", "products", "in C", "of both", "in PyTorch", "", width=10, first=6)
    for times in time_layer():
        part = times.recurrence / (times.products + times.recurrence)
        milliseconds = (f"{1e3 * s:.2f}" for s in (times.products, times.recurrence))
        table.add_row(str(times.num_rows), *milliseconds, f"{part:.0%}", f"{1e3 * times.in_torch:.1f}", "(measured)")
    story.show(table)


OPTIONS: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_model_len": 128, "num_gpu_blocks_override": 200}
PROMPT = [7 * i % 251 for i in range(61)]


def load_tiny(**options: Any) -> Any:
    from chapters.ch16_fixed_memory.checks_engine import hybrid_checkpoint
    from nanovllm import LLM

    return LLM(hybrid_checkpoint().name, **{**OPTIONS, **options})


def answer(llm: Any, prompt: list[int]) -> tuple[Any, int]:
    """The tokens with their logprobs, which have every bit of what was computed, and where the prompt began."""
    from nanovllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    [output] = llm.generate([prompt], params, use_tqdm=False)
    [completion] = output.outputs
    return (completion.token_ids, completion.logprobs), output.num_cached_tokens


def tell_bits(story: Story) -> None:
    story.part("The same bits")
    story.say(
        f"A small model of this kind with random weights answers a prompt of {len(PROMPT)} tokens with 12 tokens, "
        "greedy, with their logprobs. The prompt is computed in chunks of the given length, and from the cache, after "
        "the given number of tokens."
    )
    whole, _ = answer(load_tiny(), PROMPT)
    table = make_table("", "begins after", "tokens and logprobs", width=19, first=24)
    for size in (1, 3, 16):
        found, start = answer(load_tiny(max_num_batched_tokens=size, max_num_seqs=1), PROMPT)
        table.add_row(f"chunks of {size}", str(start), "the same bits" if found == whole else "OTHERS")
    llm = load_tiny()
    for shared in (20, 40, 60):
        answer(llm, [*PROMPT[:shared], 1])  # leaves a snapshot at its end
        found, start = answer(llm, PROMPT)
        table.add_row(f"{shared} tokens sent before", str(start), "the same bits" if found == whole else "OTHERS")
        llm.reset_prefix_cache()
    story.show(table)


# -- snapshots --------------------------------------------------------------------------------------------------------


def tell_by_hand(story: Story) -> None:
    story.part("Snapshots by hand")
    story.say(
        "1,500 tokens are shared, 700 are each request's own. Places are chosen by hand, beside the engine's policy, "
        "with room for 8 snapshots. First comes one at the end of every prompt:"
    )
    world = World()
    world.next_workload()
    said = []
    for _ in range(3):
        said += [world.mark_end(), world.send()]
    story.log(*said)
    story.say("K and V of 1,488 shared tokens are there, in full blocks. Nobody has kept a state on the way:")
    story.show(draw_next(world.shelf))
    world.shelf = Shelf(world.shelf.workload)
    said = [world.send(), world.mark_fork(), *(world.send() for _ in range(3))]
    story.say("It starts over. Now the second request is marked where it leaves what the cache knows:")
    story.log(*said)
    story.show(draw_sent(world.shelf))
    story.show(draw_computed(world.shelf))


def tell_policies(story: Story) -> None:
    story.part("What each policy finds")
    given = hard_workloads()
    unbounded = {name: sum(play(requests, every_block, UNBOUNDED)) for name, requests in given.items()}
    saved = ", ".join(f"{num:,}" for num in unbounded.values())
    story.say(
        f"The four workloads run in full on the engine's scheduler. An unbounded cache saves {saved} tokens. The table "
        f"shows the percentage of that, by policy, with room for {BOUNDS[0]} snapshots:"
    )
    table = make_table("", *POLICIES, first=21)
    for name, requests in given.items():
        parts = (sum(play(requests, policy, BOUNDS[0])) / unbounded[name] for policy in POLICIES.values())
        table.add_row(name.removesuffix(" of 6,000"), *(f"{part:.0%}" for part in parts))
    story.show(table)
    hardest = list(given)[-1]
    story.say("This is the last one, by the room for snapshots:")
    table = make_table("snapshots", *POLICIES, first=21)
    for bound in BOUNDS:
        parts = (sum(play(given[hardest], policy, bound)) / unbounded[hardest] for policy in POLICIES.values())
        table.add_row(str(bound), *(f"{part:.0%}" for part in parts))
    story.show(table)


# -- draft tokens-------------------------------------------------------------------------------------------------------


def tell_drafts(story: Story) -> None:
    from chapters.ch13_guess_and_check.lab import Fixed
    from chapters.ch13_guess_and_check.world import drafting
    from chapters.patching import replaced
    from nanovllm.core.snapshots import segments as of_steps
    from nanovllm.core.snapshots.segments import DISCARDED, step_segments

    story.part("What a draft token must not leave behind")
    story.say(
        "The small model again, with three wrong draft tokens in every step: first as the engine does it, then with a "
        "mistake, where the state takes in the draft tokens, too, and nobody takes them out."
    )

    def kept(chunks: Any) -> list[list[int]]:
        """A mistake: what a step leaves of draft tokens is kept in the sequence's own slot."""
        return [[row[0], row[2] if row[1] == DISCARDED else row[1], *row[2:]] for row in step_segments(chunks)]

    speculative = {"method": "ngram", "num_speculative_tokens": 3}
    whole, _ = answer(load_tiny(), PROMPT)
    table = make_table("draft tokens are", "tokens and logprobs", width=20, first=24)
    table.columns[1].justify = "left"
    for name, segments in (("logged", step_segments), ("kept in the state", kept)):
        llm = load_tiny(speculative_config=speculative)
        with replaced(of_steps, "step_segments", segments), drafting(llm, Fixed([3, 3, 3]), 3):
            found, _ = answer(llm, PROMPT)
        num_same = next((i for i, (a, b) in enumerate(zip(found[1], whole[1], strict=True)) if a != b), 12)
        table.add_row(name, "the same bits" if found == whole else f"different from token {num_same + 1} on")
    story.show(table)
