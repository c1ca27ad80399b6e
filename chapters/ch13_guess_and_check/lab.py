"""Lab of chapter 13: a real model's text, drafted and checked, and what a step costs by its rows.

Tokens are computed in float32, so that they come out the same on every machine; times are those of the engine's bf16.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from chapters.app import explorer
from chapters.ch13_guess_and_check.again_lab import tell_again
from chapters.ch13_guess_and_check.coupling import agreement, all_logits
from chapters.ch13_guess_and_check.drawing import counts_of, draw_counts, draw_steps, draw_text
from chapters.ch13_guess_and_check.world import (
    ITSELF,
    LONGEST,
    NGRAMS,
    NOBODY,
    OPTIONS,
    SHORTEST,
    TEXTS,
    World,
    chunks_watched,
    drafting,
    expected_run,
)
from chapters.draw import make_table
from chapters.patching import replaced
from chapters.play import actions
from chapters.recording import Recording
from chapters.story import Story, one_core, stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.features.speculation.choose import choose_num_draft_tokens

NUM_SHOWN = 14  # steps in a panel
NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32)
NUM_SEQS = 32
MAX_ROUNDS = 12  # of a measurement
DRAFT = " and the sea was"  # of a proposer that is wrong
SPECULATIVE: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}
SPECULATIVE |= {"prompt_lookup_max": LONGEST, "prompt_lookup_min": SHORTEST}


def load_world(story: Story) -> World:
    return World(story.load(dtype="float32", **OPTIONS))


class Fixed:
    """Always proposes the same tokens."""

    first_acceptance, draft_s = 0.5, 0.0

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids

    def kind(self, seq: Sequence) -> int:
        return 0

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        return [self.token_ids[:n] for _, n in wanted]


def panels(world: World) -> list[tuple[str, RenderableType]]:
    asked = f"{world.source}, at most {world.num_draft_tokens} draft tokens a step, temperature {world.temperature:g}"
    first = max(0, len(world.steps) - NUM_SHOWN)
    return [
        ("the text: green was drafted and accepted, bold was sampled after that", draw_text(world)),
        (f"the last steps: {asked}", draw_steps(world, world.steps[first:], first + 1)),
        ("so far", draw_counts(world.steps)),
    ]


ACTIONS = actions(
    "n|step|step, e|20 steps|many_steps, g|draft tokens|next_number, w|from where|next_source, "
    "h|heat|next_temperature, x|text|next_text, r|reset|reset"
)


def make_app(model: str | None) -> Any:
    return explorer("Guess and check", load_world(Story(model)), panels, ACTIONS, ask="a text to continue")


# -- the story --------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    with one_core():
        step_s = tell_rows(story)
        world = load_world(story)
        tell_drafts(story, world)
        tell_runs(story, world)
        tell_noise(story, world)
        tell_cache(story, world)
        tell_register(story, world)
        tell_numbers(story, step_s)
        tell_engine(story)
    tell_again(story)


def tell_rows(story: Story) -> list[float]:
    """Returns the seconds of steps of 1, 2, ... rows."""
    story.part("What one more row costs")
    llm = story.load(dtype="bfloat16", **OPTIONS)
    vocab_size = llm.engine.model_config.vocab_size
    llm.engine.add_request(None, TEXTS["a story"], SamplingParams(temperature=0, max_tokens=200, ignore_eos=True))
    llm.engine.step()
    times: dict[int, list[float]] = {num_rows: [] for num_rows in NUM_ROWS}
    for _ in range(MAX_ROUNDS):
        for num_rows, found in times.items():
            with drafting(llm, Fixed([vocab_size - 1] * max(NUM_ROWS)), num_rows - 1):
                found.append(stopwatch(llm.engine.step))
    best = {num_rows: min(found) for num_rows, found in times.items()}
    story.say(
        "One sequence in bf16, on one core. A step with n rows computes its newest token and n - 1 draft tokens, which "
        f"are all wrong. Milliseconds of a step, the best of {MAX_ROUNDS}; as a multiple of a step without draft "
        "tokens; and the milliseconds a token if all draft tokens had been accepted."
    )
    table = make_table("rows", "ms", "times", "ms a row", "", width=10, first=10)
    for num_rows, s in best.items():
        table.add_row(str(num_rows), f"{1e3 * s:.1f}", f"{s / best[1]:.2f}", f"{1e3 * s / num_rows:.1f}", "(measured)")
    story.show(table)
    return [best[num_rows] for num_rows in range(1, 10)]


def run(world: World, text: str, source: str, num_draft_tokens: int, temperature: float, num_tokens: int) -> list[int]:
    """Generate this many tokens, or a few more. Returns them; the world has the steps."""
    world.source, world.num_draft_tokens, world.temperature = source, num_draft_tokens, temperature
    world.begin(TEXTS[text])
    while world.seq.num_generated_tokens < num_tokens and world.seq.finish_reason is None:
        world.step()
    return world.seq.generated_token_ids[:num_tokens]


def tell_drafts(story: Story, world: World) -> None:
    story.part("A text that goes on as it did before")
    tokens = run(world, "a quotation", NGRAMS, 4, 0.0, 44)
    story.say(f"The prompt, {world.seq.num_prompt_tokens} tokens:")
    story.show(Text(world.prompt))
    story.say(
        f"Greedy, at most 4 draft tokens a step, from n-grams of {LONGEST} to {SHORTEST} tokens. A bar stands "
        "between two tokens, a dot for a space. The first step is the prompt's."
    )
    story.show(draw_steps(world, world.steps))
    num_steps = len(world.steps)
    told = "the same" if run(world, "a quotation", NOBODY, 4, 0.0, 44) == tokens else "OTHERS"
    without = f"Without draft tokens {len(world.steps)} steps, and the tokens are {told}."
    story.say(f"{len(tokens)} tokens in {num_steps} steps. {without}")


def tell_runs(story: Story, world: World) -> None:
    story.part("How long a run is")
    story.say(
        "Steps with at least one draft token; the share of those checked that were accepted, a; tokens that such a "
        "step gave; and what a run has by (1 - a^(k+1)) / (1 - a), averaged over the steps' numbers of draft tokens "
        "k. 48 tokens each."
    )
    table = make_table(
        "draft tokens from", "T", "k", "steps", "drafted", "accepted", "a", "tokens a step", "expected", first=24
    )
    for text, source, temperature in (("a quotation", NGRAMS, 0.0), ("a list", NGRAMS, 0.0), ("a story", ITSELF, 0.5)):
        for num_draft_tokens in (1, 4, 8):
            run(world, text, source, num_draft_tokens, temperature, 48)
            steps = [step for step in world.steps if step.draft_token_ids]
            name = f"{text}, {'n-grams' if source == NGRAMS else 'itself'}"
            table.add_row(name, f"{temperature:g}", str(num_draft_tokens), *counts_of(steps))
    story.show(table)


def tell_noise(story: Story, world: World) -> None:
    story.part("The same noise")
    world.source = ITSELF
    draft: Any = world.proposer
    tokens = run(world, "a story", NOBODY, 4, 1.0, 64)
    token_ids = world.tokenizer(world.prompt).input_ids + tokens
    world.begin(TEXTS["a story"])  # its blocks are written over here, and the cache forgets them afterwards
    ours, its = (all_logits(runner, token_ids) for runner in (world.llm.engine.model_runner, draft.runner))
    draft.drafts.clear()
    draft.manager.clear()
    story.say(
        f"The model and its copy in 8 bits read the same {len(token_ids)} tokens. On average over all positions, how "
        "probable is it that a draft token of the copy is accepted? By rejection sampling; if both draw with the same "
        "number; if each draws with its own."
    )
    table = make_table("temperature", "rejection sampling", "same noise", "own noise", first=14, width=18)
    for temperature in (0.0, 0.3, 0.5, 0.7, 1.0):
        table.add_row(f"{temperature:g}", *(f"{x:.1%}" for x in agreement(ours, its, temperature)))
    story.show(table)
    same = ", ".join(f"{x:.1%}" for x in agreement(ours, ours, 1.0))
    story.say(f"A model that is its own draft, at temperature 1: {same}.")


def tell_cache(story: Story, world: World) -> None:
    story.part("What is in the cache, and what can be found")
    llm = world.llm
    draft_token_ids = world.tokenizer(DRAFT).input_ids[:4]
    prompt = world.tokenizer(TEXTS["a story"]).input_ids[:11]
    first, slots = len(prompt) - 3, dict[int, str]()
    world.begin(TEXTS["a story"])
    begin(world, prompt)
    table = Table("step", *map(str, range(first, first + 9)), "computed", "cached", show_edge=False)
    size = llm.engine.scheduler.block_manager.block_size
    for number in range(1, 5):
        with drafting(llm, Fixed(draft_token_ids), 4 if number == 2 else 0), chunks_watched(llm) as chunks:
            llm.engine.step()
        [chunk] = chunks
        for position, token_id in enumerate(chunk.token_ids, chunk.start):
            slots[position] = ("?" if position >= chunk.known_end else "") + world.piece(token_id)
        num_cached = sum(llm.engine.block_manager.blocks[i].block_hash is not None for i in chunk.seq.block_table)
        counts = str(chunk.seq.num_computed_tokens), f"{num_cached} of {len(chunk.seq.block_table)}"
        table.add_row(str(number), *(slots.get(i, "") for i in range(first, first + 9)), *counts)
    story.say(
        f"Blocks of {size} tokens, a prompt of {len(prompt)}. Whose K and V stand in the slots of positions {first} to "
        f"{first + 8} after each step? A question mark is before a draft token. In step 2 four wrong ones are computed."
    )
    story.show(table)


def begin(world: World, token_ids: list[int]) -> Sequence:
    """A request of these tokens, alone in an engine with an empty cache."""
    engine = world.llm.engine
    engine.abort_requests(list(engine.requests.values()))
    world.llm.reset_prefix_cache()
    request = engine.make_request(token_ids, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.enqueue([request])
    return request.samples[0].seq


def register_too_early(
    self: Scheduler, chunks: list[ScheduledChunk], drafts: Mapping[int, list[int]], budget: int
) -> int:
    """A mistake: blocks are registered when the draft tokens in them are computed, not when they are accepted."""
    budget = OUR_ADD_DRAFTS(self, chunks, drafts, budget)
    for chunk in chunks:
        seq, known_end = chunk.seq, chunk.known_end
        seq.tokens += chunk.draft_token_ids
        seq.num_computed_tokens = chunk.end
        self.block_manager.register_prefix(seq)
        del seq.tokens[known_end:]
        seq.num_computed_tokens = known_end
    return budget


OUR_ADD_DRAFTS = Scheduler.add_drafts


def tell_register(story: Story, world: World) -> None:
    story.part("Blocks that are registered too early")
    draft_token_ids = world.tokenizer(DRAFT).input_ids[:4]
    prompt = world.tokenizer(TEXTS["a story"]).input_ids[:11]
    table = make_table("blocks are registered", "goes on with", first=24)
    table.columns[1].justify = "left"
    for name, add in (("when tokens are accepted", OUR_ADD_DRAFTS), ("when they are computed", register_too_early)):
        with replaced(Scheduler, "add_drafts", add):
            seq = begin(world, prompt)
            for number in range(1, 21):
                with drafting(world.llm, Fixed(draft_token_ids), 4 if number == 2 else 0):
                    world.llm.engine.step()
            table.add_row(name, Text(repr(world.tokenizer.decode(seq.generated_token_ids))))
    world.llm.engine.abort_requests(list(world.llm.engine.requests.values()))
    story.say("This is the same request, with the same four wrong draft tokens in step 2, 20 tokens, greedy:")
    story.show(table)


def tell_numbers(story: Story, step_s: list[float]) -> None:
    story.part("How many draft tokens")
    story.say(
        "Tokens a second that are expected of one sequence, by the step times of part 1, if each draft token is "
        "accepted with probability a. The last column is what the engine's choose_num_draft_tokens takes, of at most 8."
    )
    columns = (0, 1, 2, 3, 4, 5, 6, 8)
    table = make_table("a", *(f"k = {k}" for k in columns), "takes", "", width=5)
    for a in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
        rates = (f"{expected_run(a, k) / step_s[k]:.0f}" for k in columns)
        table.add_row(f"{a:g}", *rates, str(choose_num_draft_tokens([a], [8], step_s)[0]), "(measured)")
    story.show(table)


def tell_engine(story: Story) -> None:
    story.part("The engine decides")
    sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": NUM_SEQS, "dtype": "bfloat16"}
    plain, speculative = story.load(**sizes), story.load(speculative_config=SPECULATIVE, **sizes)
    story.say(
        "bf16, greedy, with draft tokens from n-grams, at most 5, and with none: one stream of 100 tokens, then "
        f"{NUM_SEQS} streams of 12 at once, twice each. The draft tokens are those of the second time, the "
        "milliseconds a token those of the faster one."
    )
    table = make_table("", "drafted", "accepted", "ms without", "ms with", "same tokens", "", first=26, width=7)
    for name, prompts, num_tokens in (
        ("a quotation", [TEXTS["a quotation"]], 100),
        ("a story", [TEXTS["a story"]], 100),
        (f"{NUM_SEQS} lists at once", [TEXTS["a list"]] * NUM_SEQS, 12),
    ):
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        seconds: dict[LLM, list[float]] = {plain: [], speculative: []}
        tokens: dict[LLM, list[list[int]]] = {}
        for _ in range(min(2, MAX_ROUNDS)):
            for llm, found in seconds.items():
                outputs = llm.generate(prompts, params, use_tqdm=False)
                metrics = [output.metrics for output in outputs]
                first = max(m.first_token_time or 0.0 for m in metrics)
                found.append(max(m.last_token_time or 0.0 for m in metrics) - first)
                tokens[llm] = [output.outputs[0].token_ids for output in outputs]
        counts = sum(m.num_draft_tokens for m in metrics), sum(m.num_accepted_tokens for m in metrics)
        per_token = (f"{1e3 * min(found) / (num_tokens - 1) / len(prompts):.1f}" for found in seconds.values())
        same = f"{sum(a == b for a, b in zip(*tokens.values(), strict=True))} of {len(prompts)}"
        table.add_row(name, *map(str, counts), *per_token, same, "(measured)")
    story.show(table)


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: more rows never take much less time, and one row takes
    the least; draft tokens pay for a quotation, and cost little in a crowd."""
    [sheet] = recorded.sheets("What one more row costs")
    rows, ms = sheet.column("rows"), sheet.column("ms")
    for (fewer, before), (more, after) in pairwise(zip(rows, ms, strict=True)):
        if after < ms[0] or after < 0.9 * before:
            raise ValueError(f"{more:.0f} rows took {after} ms, {fewer:.0f} rows {before} ms, and one {ms[0]} ms")
    [sheet] = recorded.sheets("The engine decides")
    for name, without, with_drafts in zip(
        (row[0] for row in sheet.rows), sheet.column("ms without"), sheet.column("ms with"), strict=True
    ):
        if with_drafts > (1.1 if name.startswith(str(NUM_SEQS)) else 0.9) * without:
            raise ValueError(f"{name} took {with_drafts} ms a token with draft tokens, {without} ms without")
