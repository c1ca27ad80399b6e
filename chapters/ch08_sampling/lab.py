"""Lab of chapter 8: the next-token distribution of a real model, reshaped by hand and sampled by the engine's sampler.

Everything runs in float32, so that the numbers come out the same on every machine.
"""

import importlib.util
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from torch import Tensor

from chapters.ch01_inference.lab import next_logits_of
from chapters.ch08_sampling.choices import ChoiceGrammar
from chapters.ch08_sampling.company import generate_in_order, preemptions_watched
from chapters.ch08_sampling.solution import allowed_tokens
from chapters.ch08_sampling.theory import Fit, compare, effective_number, reshape
from chapters.patching import replaced
from chapters.story import Story, one_core
from nanovllm import LLM, SamplingParams
from nanovllm.checks.requests import bad_word_ids
from nanovllm.core.sequence import Sequence
from nanovllm.features.grammar import masks
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.worker import model_runner, sampler
from nanovllm.worker.sampler import SamplingBatch, sample, uniform_noise

if TYPE_CHECKING:
    from chapters.explorer import Explorer

SHARP, OPEN = "The capital of France is", "Once upon a time there was a"
DOOR = "She opened the door and saw a"
OTHERS = (OPEN, SHARP, "My favourite colour is", "The opposite of hot is", "The weather today is", "I", "In the end")
NUM_SHOWN, NUM_DRAWS, BAR = 12, 1000, 11
SEED, NUM_TOKENS = 7, 20
CITIES = (" London", " Le Havre", " Berlin")
AS_JSON = "The capital of France is Paris. As JSON:"
TEXT_SCHEMA = {"type": "string"}
CUT_STYLES = {"min_p": "yellow", "top_k": "cyan", "top_p": "magenta", "greedy": "blue"}

# What each slider may be set to; the sliders in the order in which the sampler applies them.
SLIDERS: dict[str, tuple[float, ...]] = {
    "temperature": (0, 0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0),
    "min_p": (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0),
    "top_k": (1, 2, 3, 5, 10, 20, 50, 100, 500, 2000, 0),
    "top_p": (0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
}
OFF = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0}
PRESETS: dict[str, dict[str, float]] = {
    "as the model has it": {},
    "a careful answer": {"temperature": 0.7, "top_p": 0.9},
    "a story: hot, with min_p": {"temperature": 1.5, "min_p": 0.1},
    "the ten most likely": {"top_k": 10},
    "all three filters": {"temperature": 1.2, "min_p": 0.02, "top_k": 20, "top_p": 0.8},
    "hot, nothing cut": {"temperature": 2.0},
    "greedy": {"temperature": 0},
}


# -- practice: the engine's sampler -----------------------------------------------------------------------------------


def draw(logits: Tensor, params: SamplingParams, seeds: range) -> list[int]:
    """A token for each seed, from the engine's sample(), ten rows at a time: larger batches leave the CPU's cache."""
    token_ids: list[int] = []
    with one_core():
        for first in range(0, len(seeds), 10):
            seqs = [Sequence([0], replace(params, seed=seed)) for seed in seeds[first : first + 10]]
            token_ids += sample(logits.repeat(len(seqs), 1), SamplingBatch.from_sequences(seqs))[0]
    return token_ids


class World:
    """A prompt, the model's logits for its next token, four sliders, and what was drawn so far."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.tokenizer, self._next_logits = llm, llm.get_tokenizer(), next_logits_of(llm)
        self.reset()

    # -- what one can do --------------------------------------------------------------------------------------------

    def reset(self) -> str:
        self.selected, self._preset = 0, 0
        self.settings: dict[str, float] = dict(OFF)
        self.typed(DOOR)
        return "All sliders are where they change nothing. Move one, or press t and type another beginning."

    def typed(self, prompt: str) -> str:
        token_ids = self.tokenizer(prompt).input_ids
        if not token_ids:
            raise ValueError("type the beginning of a text, at least a letter")
        logits = self._next_logits(token_ids)  # before anything changes: a text may be too long
        self.prompt, self.logits = prompt, logits
        self._update()
        return f"{len(token_ids)} tokens went through the model; these are the probabilities of the next one."

    def set(self, **settings: float) -> None:
        self.settings = OFF | settings
        self._update()

    def select(self, by: int = 1) -> str:
        self.selected = (self.selected + by) % len(SLIDERS)
        return ""

    def select_previous(self) -> str:
        return self.select(-1)

    def more(self, by: int = 1) -> str:
        name = list(SLIDERS)[self.selected]
        values = SLIDERS[name]
        at = values.index(self.settings[name]) + by
        if not 0 <= at < len(values):
            return f"{name} goes no further."
        self.set(**self.settings | {name: values[at]})
        return ""

    def less(self) -> str:
        return self.more(-1)

    def preset(self) -> str:
        self._preset = (self._preset + 1) % len(PRESETS)
        name = list(PRESETS)[self._preset]
        self.set(**PRESETS[name])
        return f"Preset: {name}."

    def draw(self) -> str:
        """1,000 more samples, each with a seed of its own."""
        num_so_far = sum(self.counts.values())
        self.counts.update(draw(self.logits, self.params, range(num_so_far, num_so_far + NUM_DRAWS)))
        return f"Drawn with seeds {num_so_far} to {num_so_far + NUM_DRAWS - 1}. {self.verdict()}"

    # -- what there is ----------------------------------------------------------------------------------------------

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**self.settings)  # type: ignore[arg-type]

    @property
    def best(self) -> list[int]:
        """Token ids, the most likely first."""
        return self.logits.argsort(descending=True, stable=True).tolist()

    def verdict(self) -> str:
        if not self.counts:
            return "Nothing drawn yet."
        fit = self.fit
        if fit.num_impossible:
            return f"{fit.num_impossible} draws are of tokens that should be cut!"
        if fit.freedom == 0:
            return "There was only one token to draw."
        return (
            f"Chi-square {fit.chi_square:.1f} with {fit.freedom} degrees of freedom (luck exceeds it in "
            f"{fit.chance:.0%} of cases); largest deviation {fit.largest:.1f} standard errors."
        )

    def piece(self, token_id: int, width: int = 12) -> Text:
        text = self.tokenizer.decode([token_id], skip_special_tokens=True)
        text = repr(text or self.tokenizer.convert_ids_to_tokens(token_id))
        return Text(text if len(text) <= width else text[: width - 1] + "…")

    def choices(self, texts: tuple[str, ...]) -> list[list[int]]:
        return [self.tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    def draw_sliders(self) -> Text:
        before, after = (f"{effective_number(p):,.1f}" for p in (self.shape.before, self.shape.after))
        cut = Counter(filter(None, self.shape.cut_by))
        drawn = sum(self.counts.values())
        right = [
            f"{self.shape.num_left:,} of {len(self.shape.after):,} tokens left",
            "cut: " + (", ".join(f"{name} {cut[name]:,}" for name in CUT_STYLES if cut[name]) or "none"),
            f"effective number {before} -> {after}",
            f"{drawn:,} drawn" + (f", chi-square {self.fit.chi_square:.1f} ({self.fit.freedom})" if drawn else ""),
        ]
        text = Text()
        for index, (name, values) in enumerate(SLIDERS.items()):
            value = self.settings[name]
            at, width = values.index(value), 16
            knob = round(at / (len(values) - 1) * (width - 1))
            bar = "─" * knob + "●" + "─" * (width - 1 - knob)
            shown = "off" if name != "temperature" and value == OFF[name] else f"{value:g}"
            chosen = index == self.selected
            text.append(f"{'▶' if chosen else ' '} {name:<12}", "bold" if chosen else "")
            text.append(f"{shown:>5} ").append(bar, "bold green" if chosen else "green").append(f"  {right[index]}\n")
        text.rstrip()
        return text

    def draw_tokens(self) -> Table:
        """The most likely tokens before and after; what was drawn of them, if anything was."""
        table = Table(show_edge=False, pad_edge=False, header_style="bold")
        num_drawn = sum(self.counts.values())
        for name in ("token", "before", "", "after", "", *(("drawn", "theory") if num_drawn else ())):
            table.add_column(name, justify="left" if name in ("token", "") else "right", no_wrap=True)
        best, (before, after, cut_by) = self.best, self.shape
        ids, others = best[:NUM_SHOWN], best[NUM_SHOWN:]
        unit = max(before[ids[0]], max(after)) / BAR

        def add(name: Text, p: float, q: float, bars: tuple[Text, Text], count: int) -> None:
            counted = (f"{count:,}", f"{q * num_drawn:,.1f}") if num_drawn else ()
            table.add_row(name, f"{p:.2%}", bars[0], f"{q:.2%}" if q else "", bars[1], *counted)

        for i in ids:
            cut = (
                Text(f"cut by {cut_by[i]}", CUT_STYLES[cut_by[i]]) if cut_by[i] else Text(_bar(after[i], unit), "green")
            )
            add(self.piece(i), before[i], after[i], (Text(_bar(before[i], unit)), cut), self.counts[i])
        num_left = sum(not cut_by[i] for i in others)
        rest_before, rest_after = (math.fsum(probs[i] for i in others) for probs in (before, after))
        notes = Text(f"({len(others):,})", "dim"), Text(f"{num_left:,} left" if num_left else "all cut", "dim")
        add(Text("all others", "dim"), rest_before, rest_after, notes, sum(self.counts[i] for i in others))
        return table

    def panels(self) -> list[tuple[str, RenderableType]]:
        prompt = self.prompt if len(self.prompt) <= 50 else "…" + self.prompt[-49:]
        return [
            ("Sliders, in the sampler's order", self.draw_sliders()),
            (f"Next token after: {escape(prompt)}", self.draw_tokens()),
        ]

    @property
    def fit(self) -> Fit:
        return compare(self.counts, self.shape.after)

    def _update(self) -> None:
        self.shape = reshape(self.logits.tolist(), self.params)
        self.counts: Counter[int] = Counter()


def _bar(p: float, unit: float) -> str:
    return "█" * round(p / unit) or ("▏" if p > 0 else "")


def load_world(load: Any) -> World:
    """A pool of 24 blocks of 8: eight requests with up to 28 tokens each do not fit, and some are preempted."""
    return World(load(dtype="float32", max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=24, block_size=8))


def make_app(model: str | None) -> "Explorer":
    from chapters.explorer import Action, Explorer

    actions = [
        Action("down", "slider", "select"),
        Action("left", "less", "less"),
        Action("right", "more", "more"),
        Action("up", "", "select_previous"),
        Action("minus", "", "less"),
        Action("plus,equals_sign", "", "more"),
        Action("s", "sample", "draw"),
        Action("p", "preset", "preset"),
        Action("r", "reset", "reset"),
    ]
    world = load_world(Story(model).load)
    return Explorer(
        "8. Sampling: a distribution to reshape", world, World.panels, actions, ask="the beginning of a text"
    )


# -- the same request in other company --------------------------------------------------------------------------------


def one_generator(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What the engine does not do: all rows draw from one stream of random numbers, torch's global one."""
    return torch.multinomial((logits / batch.temperature[:, None]).softmax(-1), 1).squeeze(1)


class Run(NamedTuple):
    token_ids: list[int]
    num_preempted: int  # how often the request that is watched was


def run_in_company(llm: LLM, before: int, after: int) -> Run:
    """Generate for DOOR with SEED; so many others stand before it in the batch, and so many behind."""
    prompts = [*OTHERS[:before], DOOR, *OTHERS[before : before + after]]
    seeds = [100 + i if prompt != DOOR else SEED for i, prompt in enumerate(prompts)]
    params = [SamplingParams(temperature=0.9, seed=s, max_tokens=NUM_TOKENS, ignore_eos=True) for s in seeds]
    with preemptions_watched() as preempted:
        outputs = generate_in_order(llm, prompts, params)
    return Run(outputs[before].outputs[0].token_ids, sum(seq.seed == SEED for seq in preempted))


# -- masks -------------------------------------------------------------------------------------------------------------


def masked(logits: Tensor, params: SamplingParams, **attributes: Any) -> tuple[Tensor, int]:
    """What the engine's sample() leaves of the logits of a sequence with these attributes, and the token it takes."""
    seq, logits = Sequence([0], params), logits[None].clone()
    for name, value in attributes.items():
        setattr(seq, name, value)
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

    def watched_sample(logits: Tensor, batch: SamplingBatch) -> Any:
        before, pending = logits[0].clone(), batch.masks.pending
        was_ready = pending is not None and pending._future is not None and pending._future.done()
        found = sample(logits, batch)
        steps.append(MaskedStep(before, logits[0].clone(), found[0][0], was_ready))
        return found

    with replaced(masks, "_bits", timed_bits), replaced(model_runner, "sample", watched_sample):
        yield steps, seconds


# -- the story ---------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    world = load_world(story.load)
    with one_core():
        tell_logits(story, world)
        tell_temperature(story, world)
        tell_filters(story, world)
        tell_order(story, world)
        tell_draws(story, world)
        tell_noise(story, world)
        tell_company(story, world)
        tell_greedy(story, world)
        tell_logprobs(story, world)
        tell_masks(story, world)
        tell_choice(story, world)
        tell_grammar(story, world)
        tell_candidates(story, world)


def table(*columns: str, left: int = 1) -> Table:
    """Its first `left` columns hold text, the others numbers."""
    made = Table(show_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return made


def tell_logits(story: Story, world: World) -> None:
    story.part("What the model gives")
    story.say(f"The engine's logits for the next token after three beginnings, {len(world.shape.before):,} of each:")
    shown = table("beginning", "the best two: logit, probability", "90% need", "effective", left=2)
    for prompt in (SHARP, DOOR, OPEN):
        world.typed(prompt)
        probs = world.shape.before
        best = Text("  ").join(
            Text.assemble(world.piece(i), f" {float(world.logits[i]):.1f} {probs[i]:.0%}") for i in world.best[:2]
        )
        num = reshape(world.logits.tolist(), SamplingParams(top_p=0.9)).num_left
        shown.add_row(escape(prompt), best, f"{num:,}", f"{effective_number(probs):,.1f}")
    story.show(shown)
    story.say(
        "90% need: how many of the most likely tokens have 90% of the probability together. Effective: the effective "
        "number of tokens, e to the power of the entropy. A fair die with so many faces would be as uncertain."
    )


def tell_temperature(story: Story, world: World) -> None:
    story.part("Temperature")
    story.say(f'"{SHARP}": each logit is divided by the temperature before the softmax.')
    world.typed(SHARP)
    best = world.best
    shown = table(
        "temperature", *(f"{world.piece(i)}" for i in best[:3]), "place 1,001 and on", "90% need", "effective"
    )
    for temperature in (0.2, 0.5, 1.0, 1.5, 2.0):
        shape = reshape(world.logits.tolist(), SamplingParams(temperature=temperature))
        num = reshape(world.logits.tolist(), SamplingParams(temperature=temperature, top_p=0.9)).num_left
        shares = (f"{shape.after[i]:.2%}" for i in best[:3])
        tail = f"{sum(shape.after[i] for i in best[1000:]):.2%}"
        shown.add_row(f"{temperature}", *shares, tail, f"{num:,}", f"{effective_number(shape.after):,.1f}")
    story.show(shown)
    story.say(
        "The order of the tokens never changes. But there are tens of thousands of unlikely ones, and heat makes all "
        "of them a little likelier: together they win."
    )


def tell_filters(story: Story, world: World) -> None:
    story.part("Three ways to cut the tail")
    story.say(
        "How many tokens does each filter leave, and which share of the probability do they have? (T: temperature)"
    )
    filters: dict[str, dict[str, Any]] = {
        "top_k=10": {"top_k": 10},
        "top_p=0.9": {"top_p": 0.9},
        "min_p=0.1": {"min_p": 0.1},
    }
    shown = table("beginning", "T", *filters)
    for prompt in (SHARP, OPEN):
        world.typed(prompt)
        for temperature in (1.0, 1.5, 2.0):
            whole = reshape(world.logits.tolist(), SamplingParams(temperature=temperature)).after
            cells = []
            for options in filters.values():
                shape = reshape(world.logits.tolist(), SamplingParams(temperature=temperature, **options))
                mass = sum(p for p, name in zip(whole, shape.cut_by, strict=True) if not name)
                cells.append(f"{shape.num_left:,} {mass:>4.0%}")
            shown.add_row(escape(prompt), f"{temperature}", *cells)
    story.show(shown)
    story.say(
        "top_k leaves the same number whether the model is sure or not. top_p asks for a share of the mass, and in a "
        "hot distribution that share reaches far into the tail. min_p compares with the most likely token."
    )


def tell_order(story: Story, world: World) -> None:
    story.part("All at once, in the engine's order")
    world.typed(DOOR)
    world.set(**PRESETS["all three filters"])
    story.say(f"{DOOR!r} with temperature 1.2, min_p 0.02, top_k 20, top_p 0.8:")
    story.show(world.draw_sliders())
    story.show(world.draw_tokens())
    at_once = world.shape.num_left
    alone = reshape(world.logits.tolist(), SamplingParams(temperature=1.2, top_p=0.8)).num_left
    cool = reshape(world.logits.tolist(), SamplingParams(min_p=0.02, top_k=20, top_p=0.8)).num_left
    story.say(
        f"Each filter sees only what the one before it has left: top_p=0.8 takes 80% of what 20 tokens have, and "
        f"leaves {at_once}. Alone it would take 80% of everything, {alone:,} tokens. And temperature comes first: with "
        f"the same filters at temperature 1.0, {cool} tokens are left."
    )


def tell_draws(story: Story, world: World) -> None:
    story.part("A thousand draws")
    story.say("The same settings. The engine's sampler draws 1,000 times, with seeds 0 to 999:")
    world.draw()
    story.show(world.draw_tokens())
    story.say(world.verdict())
    wrong = reshape(world.logits.tolist(), SamplingParams(temperature=1.2, min_p=0.02, top_k=20))
    fit = compare(world.counts, wrong.after)
    story.say(
        "Would this comparison notice a mistake? The same draws, against a theory that forgets top_p: chi-square "
        f"{fit.chi_square:.1f} with {fit.freedom} degrees of freedom; luck exceeds that in {fit.chance:.0%} of cases."
    )
    num_bad = 0
    shown = table("settings", "left", "chi-square", "freedom", "luck exceeds it", "largest deviation")
    for name, settings in PRESETS.items():
        if name == "greedy":
            continue
        world.set(**settings)
        world.draw()
        fit = world.fit
        num_bad += fit.num_impossible
        cells = f"{fit.chi_square:.1f}", str(fit.freedom), f"{fit.chance:.0%}", f"{fit.largest:.1f}"
        shown.add_row(name, f"{world.shape.num_left:,}", *cells)
    story.show(shown)
    story.say(f"Draws of a token that theory had cut: {num_bad}.")


def tell_noise(story: Story, world: World) -> None:
    story.part("One number decides")
    world.set(top_k=5)
    left = sorted(i for i, name in enumerate(world.shape.cut_by) if not name)
    story.say("top_k=5 leaves five tokens. In the order of their ids they lie on a line from 0 to 1:")
    shown, end = table("token id", "token", "from", "to", left=0), 0.0
    shown.columns[1].justify = "left"
    for i in left:
        shown.add_row(str(i), world.piece(i), f"{end:.4f}", f"{end + world.shape.after[i]:.4f}")
        end += world.shape.after[i]
    story.show(shown)
    story.say("uniform_noise(seq) for the first four positions, and the token that the sampler takes there:")
    shown = table("seed, sample", *(f"position {i}" for i in range(4)))
    for seed, index in ((7, 0), (7, 1), (8, 0)):
        cells = []
        seq = Sequence([0], replace(world.params, seed=seed))
        seq.sample_index = index
        for _ in range(4):
            noise = uniform_noise(seq)
            [token_id], _ = sample(world.logits[None].clone(), SamplingBatch.from_sequences([seq]))
            cells.append(Text(f"{noise:.4f} ").append(world.piece(token_id)))
            seq.append(token_id)
        shown.add_row(f"{seed}, {index}", *cells)
    story.show(shown)
    story.say("(The logits stay those of the first position here, so that only the number changes.)")


def tell_company(story: Story, world: World) -> None:
    story.part("The same request in other company")
    story.say(
        f"{DOOR!r}, temperature 0.9, seed {SEED}, {NUM_TOKENS} tokens, in a pool of 24 blocks of 8. Then the same with "
        f"a sampler that draws from torch's global generator, seeded with {SEED} before each run:"
    )
    companies = {"alone": (0, 0), "three others before it": (3, 0), "three behind it": (0, 3), "seven before": (7, 0)}
    ours = {name: run_in_company(world.llm, *others) for name, others in companies.items()}
    theirs = {}
    with replaced(sampler, "sample_randomly", one_generator):
        for name, others in companies.items():
            torch.manual_seed(SEED)
            theirs[name] = run_in_company(world.llm, *others)
    shown = table("company", "times preempted", "the engine", "one global generator", left=1)

    def verdict(run: Run, alone: Run) -> str:
        return "-" if run is alone else "same tokens" if run.token_ids == alone.token_ids else "other tokens"

    for name, run in ours.items():
        cells = verdict(run, ours["alone"]), verdict(theirs[name], theirs["alone"])
        shown.add_row(name, str(run.num_preempted), *cells)
    story.show(shown)
    text = world.tokenizer.decode(ours["alone"].token_ids[:16])
    story.say(f"The engine's text begins, each time: {escape(repr(text))}")
    llm_params = SamplingParams(n=3, temperature=0.9, seed=SEED, max_tokens=8, ignore_eos=True)
    [output] = generate_in_order(world.llm, [DOOR], [llm_params])
    story.say("n=3, one seed: the sample index makes the difference.")
    story.show(Text("\n".join(f"sample {c.index}: {c.text!r}" for c in output.outputs)))


def tell_greedy(story: Story, world: World) -> None:
    story.part("Greedy, nearly greedy, and a tie")
    world.set()
    first = world.best[0]
    shown = table("temperature", f"{world.piece(first)} in 1,000 draws", "by theory")
    for temperature in (1.0, 0.1, 0.01, 0.0):
        params = SamplingParams(temperature=temperature)
        count = Counter(draw(world.logits, params, range(NUM_DRAWS)))[first]
        expected = NUM_DRAWS * reshape(world.logits.tolist(), params).after[first]
        shown.add_row(f"{temperature}", f"{count:,}", f"{expected:,.1f}")
    story.show(shown)
    logits = torch.tensor([2.0, 5.0, 5.0, 1.0])
    story.say("Four tokens with logits 2, 5, 5 and 1, drawn 1,000 times:")
    shown = table("settings", *(f"token {i}" for i in range(4)))
    for settings in ({"temperature": 0.0}, {"temperature": 0.01}, {"top_k": 1}, {"top_p": 0.3}, {"min_p": 1.0}):
        counts = Counter(draw(logits, SamplingParams(**settings), range(NUM_DRAWS)))
        name = ", ".join(f"{key}={value:g}" for key, value in settings.items())
        shown.add_row(name, *(str(counts[i]) for i in range(4)))
    story.show(shown)
    story.say(
        "Temperature 0 takes the first of the two. All else leaves both: neither is more likely than the other, and no "
        "filter prefers one because of its token id. (Seeds 0 to 999 each time, so the same numbers decide.)"
    )


def tell_logprobs(story: Story, world: World) -> None:
    story.part("Logprobs are of the raw logits; penalties change the logits")
    shown = table("params", "token", "its logprob", "rank")
    for settings in ({"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 3}):
        options: dict[str, Any] = {"seed": 3, "logprobs": 0} | settings
        params = SamplingParams(**options)
        [token_id], [found] = sample(world.logits[None].clone(), SamplingBatch.from_sequences([Sequence([0], params)]))
        assert found is not None
        name = ", ".join(f"{key}={value:g}" for key, value in settings.items())
        shown.add_row(name, world.piece(token_id), f"{found.logprob:.3f}", str(found.rank))
    story.show(shown)
    first, logprob = world.best[0], math.log(world.shape.before[world.best[0]])
    story.say(f"By hand, the logarithm of the first column of all these tables: {world.piece(first)} {logprob:.3f}.")
    story.say(f"Three times {world.piece(first)} in the output so far, and what each penalty makes of its logit:")
    shown = table("penalty", "logit before", "logit after")
    for name, value in (("repetition_penalty", 1.2), ("presence_penalty", 0.5), ("frequency_penalty", 0.5)):
        params = SamplingParams(temperature=0, **{name: value})  # type: ignore[arg-type]
        seq = Sequence([first + 1], params)
        seq.tokens += [first] * 3
        logits = world.logits[None].clone()
        before = float(logits[0, first])
        sample(logits, SamplingBatch.from_sequences([seq]))  # changes them in place
        shown.add_row(f"{name}={value}", f"{before:.2f}", f"{float(logits[0, first]):.2f}")
    story.show(shown)


def tell_masks(story: Story, world: World) -> None:
    story.part("A mask is one more thing that happens to logits")
    names = " or ".join(city.strip() for city in CITIES)
    story.say(
        f"{SHARP!r}, and the answer shall be {names}. Their first tokens keep their logits; all others lose them:"
    )
    world.typed(SHARP)
    logits, vocab_size, choices = world.logits, len(world.logits), world.choices(CITIES)
    firsts = [choice[0] for choice in choices]
    eos_token_ids = sorted(world.llm.engine.model_config.eos_token_ids)
    grammar = ChoiceGrammar(allowed_tokens, choices, vocab_size, eos_token_ids)
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
    requests: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
        "a choice of three cities": (greedy, {"grammar": grammar}),
        "allowed_token_ids: their first": (replace(greedy, allowed_token_ids=firsts), {}),
        f"bad_words: {word}": (
            replace(greedy, bad_words=[word]),
            {"bad_word_ids": bad_word_ids(world.tokenizer, [word], len(world.logits))},
        ),
        f"logit_bias:{CITIES[0]} +5": (replace(greedy, logit_bias={firsts[0]: 5.0}), {}),
    }
    story.say("Four requests. How many tokens are left, and which share of the probability had they before?")
    shown = table("asked for", "left", "share before", "greedy takes", "probability now")
    for name, (params, attributes) in requests.items():
        row, token_id = masked(logits, params, **attributes)
        kept = row.isfinite()
        share, now = math.fsum(logits.softmax(-1)[kept].tolist()), float(row.softmax(-1)[token_id])
        shown.add_row(name, f"{int(kept.sum()):,}", f"{share:.2%}", world.piece(token_id), f"{now:.2%}")
    story.show(shown)


def tell_choice(story: Story, world: World) -> None:
    story.part("A mask does not look ahead")
    world.typed(SHARP)
    prompt_ids, choices = world.tokenizer(SHARP).input_ids, world.choices(CITIES)
    ways = []  # of each choice, the model's probability of each of its tokens
    for choice in choices:
        rows = [world.logits, *(world._next_logits(prompt_ids + choice[:at]) for at in range(1, len(choice)))]
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


def tell_candidates(story: Story, world: World) -> None:
    story.part("A thousand candidates, or the whole vocabulary")
    vocab_size = len(world.shape.before)
    story.say(
        "Time to find the thresholds of 16 rows with top_p=0.9, on one core, the best of three: as the engine does it, "
        f"and with all {vocab_size:,} logits sorted at once."
    )
    shown = table("beginning", "T", "kept", "engine, ms", "at once, ms", "same", "")
    for prompt, temperature in ((SHARP, 1.0), (OPEN, 1.0), (OPEN, 1.5)):
        world.typed(prompt)
        kept = reshape(world.logits.tolist(), SamplingParams(temperature=temperature, top_p=0.9)).num_left
        scaled = (world.logits / temperature).repeat(16, 1)
        args = torch.full((16,), vocab_size), torch.full((16,), 0.9), torch.zeros(16)
        seconds, found = {}, {}
        for num_candidates in (sampler.NUM_CANDIDATES, vocab_size):
            times = []
            with replaced(sampler, "NUM_CANDIDATES", num_candidates):
                for _ in range(3):
                    started = time.perf_counter()
                    found[num_candidates] = sampler.logit_threshold(scaled, *args)
                    times.append(time.perf_counter() - started)
            seconds[num_candidates] = min(times)
        ours, whole = found.values()
        same = torch.allclose(ours, whole, atol=1e-3)
        milliseconds = (f"{s * 1e3:.1f}" for s in seconds.values())
        shown.add_row(escape(prompt), str(temperature), f"{kept:,}", *milliseconds, str(same), "(measured)")
    story.show(shown)
    story.say(
        f"While top_p ends within the first {sampler.NUM_CANDIDATES:,} candidates, that is all it takes. In the last "
        "row it does not, and the engine looks twice: at the candidates in vain, then at everything."
    )
