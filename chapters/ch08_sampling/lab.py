"""Lab of chapter 8: the next-token distribution of a real model, reshaped by hand and sampled by the engine's sampler.

Everything runs in float32, so that the numbers come out the same on every machine.
"""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.markup import escape
from rich.text import Text
from torch import Tensor

from chapters.app import explorer
from chapters.ch01_inference.lab import table
from chapters.ch08_sampling.company import draws_with, generate_in_order, preemptions_watched
from chapters.ch08_sampling.masking import CAPITAL, tell_choice, tell_grammar, tell_masks
from chapters.ch08_sampling.sliders import DOOR, NUM_DRAWS, PRESETS, World, draw
from chapters.ch08_sampling.theory import compare, effective_number, reshape
from chapters.patching import replaced
from chapters.play import actions
from chapters.recording import Recording
from chapters.story import Story, one_core, stopwatch
from nanovllm import LLM, SamplingParams
from nanovllm.core.sequence import Sequence
from nanovllm.worker import sampler
from nanovllm.worker.sampler import SamplingBatch, choose_tokens, sample, uniform_noise

SHARP, OPEN = CAPITAL, "Once upon a time there was a"
OTHERS = (OPEN, SHARP, "My favourite colour is", "The opposite of hot is", "The weather today is", "I", "In the end")
SEED, NUM_TOKENS = 7, 20


def load_world(load: Any) -> World:
    """A pool of 24 blocks of 8: eight requests with up to 28 tokens each do not fit, and some are preempted."""
    return World(load(dtype="float32", max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=24, block_size=8))


ACTIONS = actions(
    "down|slider|select, left|less|less, right|more|more, up||select_previous, minus||less, "
    "plus,equals_sign||more, s|sample|draw, p|preset|preset, r|reset|reset"
)


def make_app(model: str | None) -> Any:
    title, world = "8. Sampling: a distribution to reshape", load_world(Story(model).load)
    return explorer(title, world, World.panels, ACTIONS, ask="the beginning of a text")


# -- the same request in different company ----------------------------------------------------------------------------


def one_generator(logits: Tensor, batch: SamplingBatch) -> Tensor:
    """What the engine does not do: all rows draw from one stream of random numbers, torch's global one."""
    return torch.multinomial((logits / batch.temperature[:, None]).softmax(-1), 1).squeeze(1)


def run_in_company(llm: LLM, before: int, after: int) -> tuple[list[int], int]:
    """Generate for DOOR with SEED. before, after: how many other requests come before it in the batch, and after it.

    Returns its tokens, and how often it was preempted.
    """
    prompts = [*OTHERS[:before], DOOR, *OTHERS[before : before + after]]
    seeds = [100 + i if prompt != DOOR else SEED for i, prompt in enumerate(prompts)]
    params = [SamplingParams(temperature=0.9, seed=s, max_tokens=NUM_TOKENS, ignore_eos=True) for s in seeds]
    with preemptions_watched() as preempted:
        outputs = generate_in_order(llm, prompts, params)
    return outputs[before].outputs[0].token_ids, sum(seq.seed == SEED for seq in preempted)


# -- the story ---------------------------------------------------------------------------------------------------------


def tell(story: Story) -> None:
    world = load_world(story.load)
    parts = (
        *(tell_logits, tell_temperature, tell_filters, tell_order, tell_draws, tell_noise, tell_company, tell_greedy),
        *(tell_logprobs, tell_masks, tell_choice, tell_grammar, tell_candidates),
    )
    with one_core():
        for part in parts:
            part(story, world)


def tell_logits(story: Story, world: World) -> None:
    story.part("What the model gives")
    story.say(
        "The table shows the engine's logits for the next token after three beginnings, "
        f"{len(world.shape.before):,} of each:"
    )
    shown = table("beginning", "the best two: logit, probability", "90% need", "effective", left=2)
    for prompt in (SHARP, DOOR, OPEN):
        world.typed(prompt)
        probs = world.shape.before
        best = Text("  ").join(
            Text.assemble(world.piece(i), f" {float(world.logits[i]):.1f} {probs[i]:.0%}") for i in world.best[:2]
        )
        num = world.reshaped(top_p=0.9).num_left
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
    pieces = (str(world.piece(i)) for i in best[:3])
    shown = table("temperature", *pieces, "place 1,001 and on", "90% need", "effective")
    for temperature in (0.2, 0.5, 1.0, 1.5, 2.0):
        shape = world.reshaped(temperature=temperature)
        num = world.reshaped(temperature=temperature, top_p=0.9).num_left
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
        "How many tokens does each filter leave, and what share of the probability do they have? (T: temperature)"
    )
    filters = {"top_k": 10, "top_p": 0.9, "min_p": 0.1}
    shown = table("beginning", "T", *(f"{name}={value}" for name, value in filters.items()))
    for prompt in (SHARP, OPEN):
        world.typed(prompt)
        for temperature in (1.0, 1.5, 2.0):
            whole = world.reshaped(temperature=temperature).after
            cells = []
            for name, value in filters.items():
                shape = world.reshaped(temperature=temperature, **{name: value})
                mass = sum(p for p, cut_by in zip(whole, shape.cut_by, strict=True) if not cut_by)
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
    alone = world.reshaped(temperature=1.2, top_p=0.8).num_left
    cool = world.reshaped(min_p=0.02, top_k=20, top_p=0.8).num_left
    story.say(
        f"Each filter sees only what the one before it has left: top_p=0.8 takes 80% of what 20 tokens have, and "
        f"leaves {at_once}. Alone it would take 80% of everything, {alone:,} tokens. And temperature comes first: with "
        f"the same filters at temperature 1.0, {cool} tokens are left."
    )


def tell_draws(story: Story, world: World) -> None:
    story.part("A thousand draws")
    story.say("The settings are the same. The engine's sampler draws 1,000 times, with seeds 0 to 999:")
    world.draw()
    story.show(world.draw_tokens())
    story.say(world.verdict())
    wrong = world.reshaped(temperature=1.2, min_p=0.02, top_k=20)
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
    story.say(
        "The table shows uniform_noise(seq) for the first four positions, and the token that the sampler takes there:"
    )
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
    story.part("The same request in different company")
    story.say(
        f"{DOOR!r}, temperature 0.9, seed {SEED}, {NUM_TOKENS} tokens, in a pool of 24 blocks of 8. Then it runs with "
        f"a sampler that draws from torch's global generator, seeded with {SEED} before each run:"
    )
    companies = {"alone": (0, 0), "three others before it": (3, 0), "three after it": (0, 3), "seven before": (7, 0)}
    ours = {name: run_in_company(world.llm, *others) for name, others in companies.items()}
    theirs = {}
    with draws_with(one_generator):
        for name, others in companies.items():
            torch.manual_seed(SEED)
            theirs[name] = run_in_company(world.llm, *others)
    shown = table("company", "times preempted", "the engine", "one global generator", left=1)
    for name, (_, num_preempted) in ours.items():
        same = ("same tokens" if runs[name][0] == runs["alone"][0] else "different tokens" for runs in (ours, theirs))
        shown.add_row(name, str(num_preempted), *(("-", "-") if name == "alone" else same))
    story.show(shown)
    text = world.tokenizer.decode(ours["alone"][0][:16])
    params = SamplingParams(n=3, temperature=0.9, seed=SEED, max_tokens=8, ignore_eos=True)
    [output] = generate_in_order(world.llm, [DOOR], [params])
    story.say(f"The engine's text begins, each time: {escape(repr(text))}")
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
    story.say("Four tokens with logits 2, 5, 5 and 1 are drawn 1,000 times:")
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
    story.say(
        f"Three times {world.piece(first)} are in the output so far. This is what each penalty makes of its logit:"
    )
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


def tell_candidates(story: Story, world: World) -> None:
    story.part("The border, sorted or not")
    vocab_size = len(world.shape.before)
    story.say(
        "Milliseconds to find the thresholds of 16 rows with top_p=0.9, on one core, the best of three: with all "
        f"{vocab_size:,} logits sorted, with {sampler.NUM_CANDIDATES:,} candidates, and in C, without sorting, "
        "where a token of each row is drawn as well."
    )
    choose = world.llm.engine.model_runner.kernels.choose_tokens
    shown = table("beginning", "T", "kept", "sorted", "candidates", "in C", "same", "")
    for prompt, temperature in ((SHARP, 1.0), (OPEN, 1.0), (OPEN, 1.5)):
        world.typed(prompt)
        kept = world.reshaped(temperature=temperature, top_p=0.9).num_left
        scaled = (world.logits / temperature).repeat(16, 1)
        args = torch.full((16,), vocab_size), torch.full((16,), 0.9), torch.zeros(16)
        seconds, found = list[float](), list[Tensor]()
        for num_candidates in (vocab_size, sampler.NUM_CANDIDATES):
            work = partial(sampler.logit_threshold, scaled, *args)
            with replaced(sampler, "NUM_CANDIDATES", num_candidates):
                seconds.append(min(stopwatch(work) for _ in range(3)))
                found.append(work())
        seqs = [Sequence([0], SamplingParams(temperature=temperature, top_p=0.9, seed=i)) for i in range(16)]
        logits, batch = world.logits.repeat(16, 1), SamplingBatch.from_sequences(seqs)
        seconds.append(min(stopwatch(partial(choose, logits, batch)) for _ in range(3)))
        same = torch.equal(*found) and torch.equal(choose(logits, batch), choose_tokens(logits, batch))
        milliseconds = (f"{s * 1e3:.1f}" for s in seconds)
        shown.add_row(escape(prompt), str(temperature), f"{kept:,}", *milliseconds, str(same), "(measured)")
    story.show(shown)
    story.say(
        f"Where top_p ends within {sampler.NUM_CANDIDATES:,} candidates, they are all it takes. In the last row it "
        "does not, and everything is looked at after all."
    )


def check_recording(recorded: Recording) -> None:
    """Raises ValueError for times that only a busy machine has: where 1,024 candidates are enough they take less time
    than sorting, and C takes the least; masks are ready when the logits come."""
    [sheet] = recorded.sheets("The border, sorted or not")
    for row in sheet.rows:
        in_order, candidates, in_c = (float(cell) for cell in row[3:6])
        is_enough = int(row[2].replace(",", "")) < sampler.NUM_CANDIDATES
        if in_c > candidates or candidates > (0.5 if is_enough else 1.5) * in_order:
            raise ValueError(f"{row[0]!r} took {in_order} ms sorted, {candidates} with candidates, {in_c} in C")
    ready = re.search(r"(\d+) of (\d+) were ready", recorded.says("Where a mask comes from: a JSON schema"))
    if ready is None or int(ready[1]) < 0.9 * int(ready[2]):
        raise ValueError(ready[0] if ready else "no mask was watched: llguidance is not installed")
