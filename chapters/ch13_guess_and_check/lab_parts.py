"""Parts of lab 13: a real model's text, drafted and checked, and what a step costs by its rows.

Tokens are computed in float32, so that they come out the same on every machine; times are those of the engine's bf16.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from rich.console import RenderableType

from chapters.ch13_guess_and_check.drawing import draw_counts, draw_steps, draw_text
from chapters.ch13_guess_and_check.world import LONGEST, OPTIONS, SHORTEST, TEXTS, Proposes, World
from chapters.player import actions
from chapters.recording import Recording
from chapters.story import Story
from nanovllm import SamplingParams
from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.core.sequence import Sequence

NUM_SHOWN = 14  # steps in a panel
NUM_SEQS = 32
SPECULATIVE: dict[str, Any] = {"method": "ngram", "num_speculative_tokens": 5}
SPECULATIVE |= {"prompt_lookup_max": LONGEST, "prompt_lookup_min": SHORTEST}


def load_world(story: Story) -> World:
    return World(story.load(dtype="float32", **OPTIONS))


def fixed(token_ids: list[int]) -> Proposes:
    """Always proposes the same tokens."""
    return Proposes(lambda seq, num_draft_tokens: token_ids[:num_draft_tokens])


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


def run(world: World, text: str, source: str, num_draft_tokens: int, temperature: float, num_tokens: int) -> list[int]:
    """Generate this many tokens, or a few more. Returns them; the world has the steps."""
    world.source, world.num_draft_tokens, world.temperature = source, num_draft_tokens, temperature
    world.begin(TEXTS[text])
    while world.seq.num_generated_tokens < num_tokens and world.seq.finish_reason is None:
        world.step()
    return world.seq.generated_token_ids[:num_tokens]


def begin_request(world: World, token_ids: list[int]) -> Sequence:
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
