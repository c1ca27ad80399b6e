"""The parts of the lab of chapter 8 on masks: what they leave of a distribution, and where they come from."""

import importlib.util
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from rich.markup import escape
from rich.text import Text
from torch import Tensor

from chapters.ch01_inference.lab import table
from chapters.ch08_sampling.choices import ChoiceGrammar
from chapters.ch08_sampling.company import generate_in_order
from chapters.ch08_sampling.sliders import NUM_DRAWS, World, draw
from chapters.patching import replaced
from chapters.story import Story
from nanovllm import SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.features.grammar import masks
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.features.logits_processors.bad_words import BadWords
from nanovllm.worker import model_runner
from nanovllm.worker.sampler import SamplingBatch, sample, sample_rows

CAPITAL = "The capital of France is"
CITIES = (" London", " Le Havre", " Berlin")
AS_JSON = "The capital of France is Paris. As JSON:"
TEXT_SCHEMA = {"type": "string"}


def masked(logits: Tensor, params: SamplingParams, **parts: Any) -> tuple[Tensor, int]:
    """What the engine's sample() leaves of the logits of a sequence with these parts, and the token it takes."""
    seq, logits = Sequence([0], params), logits[None].clone()
    seq.parts = parts
    [token_id], _ = sample(logits, SamplingBatch.from_sequences([seq]))
    return logits[0], token_id


class MaskedStep(NamedTuple):
    """One row of one step of the engine: what the model gave, what the masks left of it, and the token."""

    before: Tensor  # [vocab_size]
    after: Tensor
    token_id: int
    was_ready: bool  # the mask, when the logits came


@contextmanager
def masks_watched() -> Iterator[tuple[list[MaskedStep], list[float]]]:
    """Collects the engine's steps of one sequence with a grammar, and the seconds that each mask took."""
    steps, seconds = list[MaskedStep](), list[float]()
    bits = masks._bits

    def timed_bits(grammars: list) -> Tensor:
        started = time.perf_counter()
        found = bits(grammars)
        seconds.append(time.perf_counter() - started)
        return found

    def watched_sample(logits: Tensor, batch: SamplingBatch, *kernels: Any) -> Any:
        before = logits[0].clone()
        pending = None if batch.processors is None else batch.processors.pending
        was_ready = pending is not None and pending._future is not None and pending._future.done()
        found = sample_rows(logits, batch, *kernels)
        steps.append(MaskedStep(before, logits[0].clone(), int(found.token_ids[0]), was_ready))
        return found

    with replaced(masks, "_bits", timed_bits), replaced(model_runner, "sample_rows", watched_sample):
        yield steps, seconds


def tell_masks(story: Story, world: World) -> None:
    story.part("A mask is one more thing that happens to logits")
    names = " or ".join(city.strip() for city in CITIES)
    story.say(
        f"{CAPITAL!r}, and the answer should be {names}. Their first tokens keep their logits; all others lose them:"
    )
    world.typed(CAPITAL)
    logits, vocab_size, choices = world.logits, len(world.logits), world.choices(CITIES)
    firsts = [choice[0] for choice in choices]
    eos_token_ids = sorted(world.llm.engine.model_config.eos_token_ids)
    # The grammar is asked once, before anything is generated: then the choices' first tokens may come.
    grammar = ChoiceGrammar(lambda *asked: firsts, choices, vocab_size, eos_token_ids)
    greedy = SamplingParams(temperature=0)
    left, _ = masked(logits, greedy, grammar=grammar)
    before, after = logits.softmax(-1).tolist(), left.softmax(-1).tolist()
    shown = table("token", "logit", "probability", "logit, masked", "probability, masked")
    ids = [*world.best[:2], *firsts]
    for i in ids:
        shown.add_row(world.piece(i), f"{logits[i]:.2f}", f"{before[i]:.2%}", f"{left[i]:.2f}", f"{after[i]:.2%}")
    others = [i for i in range(vocab_size) if i not in ids]
    rest, rest_masked = (math.fsum(probs[i] for i in others) for probs in (before, after))
    shown.add_row(f"{len(others):,} others", "", f"{rest:.2%}", "-inf", f"{rest_masked:.2%}")
    story.show(shown)
    word = world.tokenizer.decode(world.best[:1]).strip()
    bad_words = BadWords(world.tokenizer, [word], vocab_size)
    requests: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
        "a choice of three cities": (greedy, {"grammar": grammar}),
        "allowed_token_ids: their first": (replace(greedy, allowed_token_ids=firsts), {}),
        f"bad_words: {word}": (replace(greedy, bad_words=[word]), {"bad_words": bad_words}),
        f"logit_bias:{CITIES[0]} +5": (replace(greedy, logit_bias={firsts[0]: 5.0}), {}),
    }
    story.say("Four requests. How many tokens are left, and what share of the probability did they have before?")
    shown = table("asked for", "left", "share before", "greedy takes", "probability now")
    for name, (params, attributes) in requests.items():
        row, token_id = masked(logits, params, **attributes)
        kept = row.isfinite()
        share, now = math.fsum(logits.softmax(-1)[kept].tolist()), float(row.softmax(-1)[token_id])
        shown.add_row(name, f"{int(kept.sum()):,}", f"{share:.2%}", world.piece(token_id), f"{now:.2%}")
    story.show(shown)


def tell_choice(story: Story, world: World) -> None:
    story.part("A mask does not look ahead")
    world.typed(CAPITAL)
    prompt_ids, choices = world.tokenizer(CAPITAL).input_ids, world.choices(CITIES)
    ways = []  # of each choice, the model's probability of each of its tokens
    for choice in choices:
        rows = [world.logits, *(world.next_logits(prompt_ids + choice[:at]) for at in range(1, len(choice)))]
        ways.append([float(row.softmax(-1)[token_id]) for row, token_id in zip(rows, choice, strict=True)])
    whole, firsts = [math.prod(way) for way in ways], [way[0] for way in ways]
    params = SamplingParams(allowed_token_ids=[choice[0] for choice in choices])
    counts = Counter(draw(world.logits, params, range(NUM_DRAWS)))
    story.say(
        "The model's probability of each city, token by token and as a whole, and its share among the three. Then its "
        f"share with masks, where the first token decides: by theory, and in {NUM_DRAWS:,} draws of that token."
    )
    shown = table("city", "token by token", "whole", "share", "with masks", "drawn", left=2)
    for city, choice, way, p, q in zip(CITIES, choices, ways, whole, firsts, strict=True):
        tokens = "  ".join(f"{world.piece(i)} {p:.2%}" for i, p in zip(choice, way, strict=True))
        shares = f"{p / sum(whole):.1%}", f"{q / sum(firsts):.1%}", f"{counts[choice[0]] / NUM_DRAWS:.1%}"
        shown.add_row(city.strip(), tokens, f"{p:.3%}", *shares)
    story.show(shown)


def tell_grammar(story: Story, world: World) -> None:
    story.part("Where a mask comes from: a JSON schema")
    if importlib.util.find_spec("llguidance") is None:
        story.say(escape('This part needs llguidance, which is not installed: pip install "nanovllm[structured]"'))
        return

    def generate(properties: dict[str, Any], max_tokens: int) -> tuple[str, str | None]:
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        asked = StructuredOutputsParams(json=schema, disable_any_whitespace=True, disable_additional_properties=True)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=asked)
        [output] = generate_in_order(world.llm, [AS_JSON], [params])
        return output.outputs[0].text, output.outputs[0].finish_reason

    with masks_watched() as (steps, seconds):
        text, reason = generate({"city": TEXT_SCHEMA, "country": TEXT_SCHEMA}, 24)
    story.say(f"{AS_JSON!r}, with a schema of two texts, city and country, without whitespace. Greedy:")
    shown = table("the model's first choice", "allowed", "taken", "probability", "masked")
    for step in steps:
        (p, now), best = (x.softmax(-1)[step.token_id] for x in step[:2]), int(step.before.argmax())
        first = Text.assemble(f"{step.before.softmax(-1)[best]:>4.0%} ", world.piece(best))
        num_allowed = int(step.after.isfinite().sum())
        shown.add_row(first, f"{num_allowed:,}", world.piece(step.token_id), f"{p:.2%}", f"{now:.2%}")
    story.show(shown)
    story.say(escape(f"The output: {text}, finish_reason {reason!r}, {len(steps)} tokens."))
    pieces = ", ".join(str(world.piece(int(i))) for i in steps[2].after.isfinite().nonzero())
    story.say(escape(f"Allowed in the third step: {pieces}."))
    story.say(
        f"A mask took llguidance {min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f} ms; "
        f"{sum(step.was_ready for step in steps)} of {len(steps)} were ready when the logits came.",
        measured=True,
    )
    text, reason = generate({"population": {"type": "integer"}}, 12)
    story.say(escape(f"A schema with one integer, at most 12 tokens: {text}, finish_reason {reason!r}."))
