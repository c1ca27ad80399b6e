import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 8: Sampling")

with app.setup(hide_code=True):
    import importlib.util
    import math
    from collections import Counter
    from dataclasses import replace
    from functools import partial
    from typing import Any

    import torch
    from rich.markup import escape
    from rich.text import Text
    from torch import Tensor

    from chapters.ch01_inference.lab_parts import table
    from chapters.ch08_sampling.choices import ChoiceGrammar
    from chapters.ch08_sampling.company import draws_with, generate_in_order
    from chapters.ch08_sampling.lab_parts import (
        ACTIONS,
        NUM_TOKENS,
        OPEN,
        SEED,
        SHARP,
        load_world,
        one_generator,
        run_in_company,
    )
    from chapters.ch08_sampling.masking import AS_JSON, CAPITAL, CITIES, TEXT_SCHEMA, masked, masks_watched
    from chapters.ch08_sampling.sliders import DOOR, NUM_DRAWS, PRESETS, World, draw
    from chapters.ch08_sampling.theory import compare, effective_number, reshape
    from chapters.lab_notebook import the_story
    from chapters.patching import replaced
    from chapters.playing import playground, start_button, title
    from chapters.story import one_core, stopwatch
    from nanovllm import SamplingParams
    from nanovllm.core.sequence import Sequence
    from nanovllm.features.grammar.params import StructuredOutputsParams
    from nanovllm.features.logits_processors.bad_words import BadWords
    from nanovllm.worker import sampler
    from nanovllm.worker.sampler import SamplingBatch, choose_tokens, sample, uniform_noise


@app.cell(hide_code=True)
def _():
    title(8)
    return


@app.cell(hide_code=True)
def play_it():
    player, turn = playground(
        lambda: load_world(the_story().load), World.panels, ACTIONS, ask="the beginning of a text", first="s"
    )
    return player, turn


@app.cell(hide_code=True, expand_output=True)
def show_it(player, turn):
    turn()
    controls = player.controls()
    player.show(controls)
    return


@app.cell(hide_code=True)
def start_it():
    start = start_button("half a minute")
    start
    return (start,)


@app.cell(hide_code=True)
def begin(start):
    story = the_story(start)
    story.enter(one_core())
    return (story,)


@app.cell
def _(story):
    world = load_world(story.load)
    return (world,)


@app.cell(expand_output=True)
def tell_logits(story, world):
    story.part("What the model gives")
    story.say(
        "The table shows the engine's logits for the next token after three beginnings, "
        f"{len(world.shape.before):,} of each:"
    )
    _shown = table("beginning", "the best two: logit, probability", "90% need", "effective", left=2)
    for _prompt in (SHARP, DOOR, OPEN):
        world.typed(_prompt)
        _probs = world.shape.before
        _best = Text("  ").join(
            Text.assemble(world.piece(i), f" {float(world.logits[i]):.1f} {_probs[i]:.0%}") for i in world.best[:2]
        )
        _num = world.reshaped(top_p=0.9).num_left
        _shown.add_row(escape(_prompt), _best, f"{_num:,}", f"{effective_number(_probs):,.1f}")
    story.show(_shown)
    story.say(
        "90% need: how many of the most likely tokens have 90% of the probability together. Effective: the effective "
        "number of tokens, e to the power of the entropy. A fair die with so many faces would be as uncertain."
    )
    return


@app.cell(expand_output=True)
def tell_temperature(story, world):
    story.part("Temperature")
    story.say(f'"{SHARP}": each logit is divided by the temperature before the softmax.')
    world.typed(SHARP)
    _best = world.best
    _pieces = (str(world.piece(i)) for i in _best[:3])
    _shown = table("temperature", *_pieces, "place 1,001 and on", "90% need", "effective")
    for _temperature in (0.2, 0.5, 1.0, 1.5, 2.0):
        _shape = world.reshaped(temperature=_temperature)
        _num = world.reshaped(temperature=_temperature, top_p=0.9).num_left
        _shares = (f"{_shape.after[i]:.2%}" for i in _best[:3])
        _tail = f"{sum(_shape.after[i] for i in _best[1000:]):.2%}"
        _shown.add_row(f"{_temperature}", *_shares, _tail, f"{_num:,}", f"{effective_number(_shape.after):,.1f}")
    story.show(_shown)
    story.say(
        "The order of the tokens never changes. But there are tens of thousands of unlikely ones, and heat makes all "
        "of them a little likelier: together they win."
    )
    return


@app.cell(expand_output=True)
def tell_filters(story, world):
    story.part("Three ways to cut the tail")
    story.say(
        "How many tokens does each filter leave, and what share of the probability do they have? (T: temperature)"
    )
    _filters = {"top_k": 10, "top_p": 0.9, "min_p": 0.1}
    _shown = table("beginning", "T", *(f"{_name}={_value}" for _name, _value in _filters.items()))
    for _prompt in (SHARP, OPEN):
        world.typed(_prompt)
        for _temperature in (1.0, 1.5, 2.0):
            _whole = world.reshaped(temperature=_temperature).after
            _cells = []
            for _name, _value in _filters.items():
                _shape = world.reshaped(temperature=_temperature, **{_name: _value})
                _mass = sum(p for p, cut_by in zip(_whole, _shape.cut_by, strict=True) if not cut_by)
                _cells.append(f"{_shape.num_left:,} {_mass:>4.0%}")
            _shown.add_row(escape(_prompt), f"{_temperature}", *_cells)
    story.show(_shown)
    story.say(
        "top_k leaves the same number whether the model is sure or not. top_p asks for a share of the mass, and in a "
        "hot distribution that share reaches far into the tail. min_p compares with the most likely token."
    )
    return


@app.cell(expand_output=True)
def tell_order(story, world):
    story.part("All at once, in the engine's order")
    world.typed(DOOR)
    world.set(**PRESETS["all three filters"])
    story.say(f"{DOOR!r} with temperature 1.2, min_p 0.02, top_k 20, top_p 0.8:")
    story.show(world.draw_sliders())
    story.show(world.draw_tokens())
    _at_once = world.shape.num_left
    _alone = world.reshaped(temperature=1.2, top_p=0.8).num_left
    _cool = world.reshaped(min_p=0.02, top_k=20, top_p=0.8).num_left
    story.say(
        f"Each filter sees only what the one before it has left: top_p=0.8 takes 80% of what 20 tokens have, and "
        f"leaves {_at_once}. Alone it would take 80% of everything, {_alone:,} tokens. And temperature comes first: "
        f"with the same filters at temperature 1.0, {_cool} tokens are left."
    )
    return


@app.cell(expand_output=True)
def tell_draws(story, world):
    story.part("A thousand draws")
    story.say("The settings are the same. The engine's sampler draws 1,000 times, with seeds 0 to 999:")
    world.draw()
    story.show(world.draw_tokens())
    story.say(world.verdict())
    _wrong = world.reshaped(temperature=1.2, min_p=0.02, top_k=20)
    _fit = compare(world.counts, _wrong.after)
    story.say(
        "Would this comparison notice a mistake? The same draws, against a theory that forgets top_p: chi-square "
        f"{_fit.chi_square:.1f} with {_fit.freedom} degrees of freedom; luck exceeds that in {_fit.chance:.0%} of "
        "cases."
    )
    _num_bad = 0
    _shown = table("settings", "left", "chi-square", "freedom", "luck exceeds it", "largest deviation")
    for _name, _settings in PRESETS.items():
        if _name == "greedy":
            continue
        world.set(**_settings)
        world.draw()
        _fit = world.fit
        _num_bad += _fit.num_impossible
        _cells = f"{_fit.chi_square:.1f}", str(_fit.freedom), f"{_fit.chance:.0%}", f"{_fit.largest:.1f}"
        _shown.add_row(_name, f"{world.shape.num_left:,}", *_cells)
    story.show(_shown)
    story.say(f"Draws of a token that theory had cut: {_num_bad}.")
    return


@app.cell(expand_output=True)
def tell_noise(story, world):
    story.part("One number decides")
    world.set(top_k=5)
    _left = sorted(_i for _i, name in enumerate(world.shape.cut_by) if not name)
    story.say("top_k=5 leaves five tokens. In the order of their ids they lie on a line from 0 to 1:")
    _shown, _end = table("token id", "token", "from", "to", left=0), 0.0
    _shown.columns[1].justify = "left"
    for _i in _left:
        _shown.add_row(str(_i), world.piece(_i), f"{_end:.4f}", f"{_end + world.shape.after[_i]:.4f}")
        _end += world.shape.after[_i]
    story.show(_shown)
    story.say(
        "The table shows uniform_noise(seq) for the first four positions, and the token that the sampler takes there:"
    )
    _shown = table("seed, sample", *(f"position {_i}" for _i in range(4)))
    for _seed, _index in ((7, 0), (7, 1), (8, 0)):
        _cells = []
        _seq = Sequence([0], replace(world.params, seed=_seed))
        _seq.sample_index = _index
        for _ in range(4):
            _noise = uniform_noise(_seq)
            [_token_id], _ = sample(world.logits[None].clone(), SamplingBatch.from_sequences([_seq]))
            _cells.append(Text(f"{_noise:.4f} ").append(world.piece(_token_id)))
            _seq.append(_token_id)
        _shown.add_row(f"{_seed}, {_index}", *_cells)
    story.show(_shown)
    story.say("(The logits stay those of the first position here, so that only the number changes.)")
    return


@app.cell(expand_output=True)
def tell_company(story, world):
    story.part("The same request in different company")
    story.say(
        f"{DOOR!r}, temperature 0.9, seed {SEED}, {NUM_TOKENS} tokens, in a pool of 24 blocks of 8. Then it runs with "
        f"a sampler that draws from torch's global generator, seeded with {SEED} before each run:"
    )
    _companies = {"alone": (0, 0), "three others before it": (3, 0), "three after it": (0, 3), "seven before": (7, 0)}
    _ours = {_name: run_in_company(world.llm, *_others) for _name, _others in _companies.items()}
    _theirs = {}
    with draws_with(one_generator):
        for _name, _others in _companies.items():
            torch.manual_seed(SEED)
            _theirs[_name] = run_in_company(world.llm, *_others)
    _shown = table("company", "times preempted", "the engine", "one global generator", left=1)
    for _name, (_, _num_preempted) in _ours.items():
        _same = (
            "same tokens" if runs[_name][0] == runs["alone"][0] else "different tokens" for runs in (_ours, _theirs)
        )
        _shown.add_row(_name, str(_num_preempted), *(("-", "-") if _name == "alone" else _same))
    story.show(_shown)
    _text = world.tokenizer.decode(_ours["alone"][0][:16])
    _params = SamplingParams(n=3, temperature=0.9, seed=SEED, max_tokens=8, ignore_eos=True)
    [_output] = generate_in_order(world.llm, [DOOR], [_params])
    story.say(f"The engine's text begins, each time: {escape(repr(_text))}")
    story.say("n=3, one seed: the sample index makes the difference.")
    story.show(Text("\n".join(f"sample {c.index}: {c.text!r}" for c in _output.outputs)))
    return


@app.cell(expand_output=True)
def tell_greedy(story, world):
    story.part("Greedy, nearly greedy, and a tie")
    world.set()
    _first = world.best[0]
    _shown = table("temperature", f"{world.piece(_first)} in 1,000 draws", "by theory")
    for _temperature in (1.0, 0.1, 0.01, 0.0):
        _params = SamplingParams(temperature=_temperature)
        _count = Counter(draw(world.logits, _params, range(NUM_DRAWS)))[_first]
        _expected = NUM_DRAWS * reshape(world.logits.tolist(), _params).after[_first]
        _shown.add_row(f"{_temperature}", f"{_count:,}", f"{_expected:,.1f}")
    story.show(_shown)
    _logits = torch.tensor([2.0, 5.0, 5.0, 1.0])
    story.say("Four tokens with logits 2, 5, 5 and 1 are drawn 1,000 times:")
    _shown = table("settings", *(f"token {i}" for i in range(4)))
    for _settings in ({"temperature": 0.0}, {"temperature": 0.01}, {"top_k": 1}, {"top_p": 0.3}, {"min_p": 1.0}):
        _counts = Counter(draw(_logits, SamplingParams(**_settings), range(NUM_DRAWS)))
        _name = ", ".join(f"{key}={value:g}" for key, value in _settings.items())
        _shown.add_row(_name, *(str(_counts[i]) for i in range(4)))
    story.show(_shown)
    story.say(
        "Temperature 0 takes the first of the two. All else leaves both: neither is more likely than the other, and no "
        "filter prefers one because of its token id. (Seeds 0 to 999 each time, so the same numbers decide.)"
    )
    return


@app.cell(expand_output=True)
def tell_logprobs(story, world):
    story.part("Logprobs are of the raw logits; penalties change the logits")
    _shown = table("params", "token", "its logprob", "rank")
    for _settings in ({"temperature": 1.0}, {"temperature": 0.5}, {"temperature": 2.0, "top_k": 3}):
        _options: dict[str, Any] = {"seed": 3, "logprobs": 0} | _settings
        _params = SamplingParams(**_options)
        [_token_id], [_found] = sample(
            world.logits[None].clone(), SamplingBatch.from_sequences([Sequence([0], _params)])
        )
        assert _found is not None
        _name = ", ".join(f"{key}={_value:g}" for key, _value in _settings.items())
        _shown.add_row(_name, world.piece(_token_id), f"{_found.logprob:.3f}", str(_found.rank))
    story.show(_shown)
    _first, _logprob = world.best[0], math.log(world.shape.before[world.best[0]])
    story.say(f"By hand, the logarithm of the first column of all these tables: {world.piece(_first)} {_logprob:.3f}.")
    story.say(
        f"Three times {world.piece(_first)} are in the output so far. This is what each penalty makes of its logit:"
    )
    _shown = table("penalty", "logit before", "logit after")
    for _name, _value in (("repetition_penalty", 1.2), ("presence_penalty", 0.5), ("frequency_penalty", 0.5)):
        _params = SamplingParams(temperature=0, **{_name: _value})
        _seq = Sequence([_first + 1], _params)
        _seq.tokens += [_first] * 3
        _logits = world.logits[None].clone()
        _before = float(_logits[0, _first])
        sample(_logits, SamplingBatch.from_sequences([_seq]))  # changes them in place
        _shown.add_row(f"{_name}={_value}", f"{_before:.2f}", f"{float(_logits[0, _first]):.2f}")
    story.show(_shown)
    return


@app.cell(expand_output=True)
def tell_masks(story, world):
    story.part("A mask is one more thing that happens to logits")
    _names = " or ".join(city.strip() for city in CITIES)
    story.say(
        f"{CAPITAL!r}, and the answer should be {_names}. Their first tokens keep their logits; all others lose them:"
    )
    world.typed(CAPITAL)
    _logits, _vocab_size, _choices = world.logits, len(world.logits), world.choices(CITIES)
    _firsts = [choice[0] for choice in _choices]
    _eos_token_ids = sorted(world.llm.engine.model_config.eos_token_ids)
    # The grammar is asked once, before anything is generated: then the choices' first tokens may come.
    _grammar = ChoiceGrammar(lambda *asked: _firsts, _choices, _vocab_size, _eos_token_ids)
    _greedy = SamplingParams(temperature=0)
    _left, _ = masked(_logits, _greedy, grammar=_grammar)
    _before, _after = _logits.softmax(-1).tolist(), _left.softmax(-1).tolist()
    _shown = table("token", "logit", "probability", "logit, masked", "probability, masked")
    _ids = [*world.best[:2], *_firsts]
    for _i in _ids:
        _shown.add_row(
            world.piece(_i), f"{_logits[_i]:.2f}", f"{_before[_i]:.2%}", f"{_left[_i]:.2f}", f"{_after[_i]:.2%}"
        )
    _others = [_i for _i in range(_vocab_size) if _i not in _ids]
    _rest, _rest_masked = (math.fsum(probs[_i] for _i in _others) for probs in (_before, _after))
    _shown.add_row(f"{len(_others):,} others", "", f"{_rest:.2%}", "-inf", f"{_rest_masked:.2%}")
    story.show(_shown)
    _word = world.tokenizer.decode(world.best[:1]).strip()
    _bad_words = BadWords(world.tokenizer, [_word], _vocab_size)
    _requests: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
        "a choice of three cities": (_greedy, {"grammar": _grammar}),
        "allowed_token_ids: the cities' first tokens": (replace(_greedy, allowed_token_ids=_firsts), {}),
        f"bad_words: {_word}": (replace(_greedy, bad_words=[_word]), {"bad_words": _bad_words}),
        f"logit_bias:{CITIES[0]} +5": (replace(_greedy, logit_bias={_firsts[0]: 5.0}), {}),
    }
    story.say("Four requests. How many tokens are left, and what share of the probability did they have before?")
    _shown = table("asked for", "left", "share before", "greedy takes", "probability now")
    for _name, (_params, _attributes) in _requests.items():
        _row, _token_id = masked(_logits, _params, **_attributes)
        _kept = _row.isfinite()
        _share, _now = math.fsum(_logits.softmax(-1)[_kept].tolist()), float(_row.softmax(-1)[_token_id])
        _shown.add_row(_name, f"{int(_kept.sum()):,}", f"{_share:.2%}", world.piece(_token_id), f"{_now:.2%}")
    story.show(_shown)
    return


@app.cell(expand_output=True)
def tell_choice(story, world):
    story.part("A mask does not look ahead")
    world.typed(CAPITAL)
    _prompt_ids, _choices = world.tokenizer(CAPITAL).input_ids, world.choices(CITIES)
    _ways = []  # of each choice, the model's probability of each of its tokens
    for _choice in _choices:
        _rows = [world.logits, *(world.next_logits(_prompt_ids + _choice[:at]) for at in range(1, len(_choice)))]
        _ways.append([float(row.softmax(-1)[token_id]) for row, token_id in zip(_rows, _choice, strict=True)])
    _whole, _firsts = [math.prod(_way) for _way in _ways], [_way[0] for _way in _ways]
    _params = SamplingParams(allowed_token_ids=[_choice[0] for _choice in _choices])
    _counts = Counter(draw(world.logits, _params, range(NUM_DRAWS)))
    story.say(
        "The model's probability of each city, token by token and as a whole, and its share among the three. Then its "
        f"share with masks, where the first token decides: by theory, and in {NUM_DRAWS:,} draws of that token."
    )
    _shown = table("city", "token by token", "whole", "share", "with masks", "drawn", left=2)
    for _city, _choice, _way, _p, _q in zip(CITIES, _choices, _ways, _whole, _firsts, strict=True):
        _tokens = "  ".join(f"{world.piece(i)} {_p:.2%}" for i, _p in zip(_choice, _way, strict=True))
        _shares = f"{_p / sum(_whole):.1%}", f"{_q / sum(_firsts):.1%}", f"{_counts[_choice[0]] / NUM_DRAWS:.1%}"
        _shown.add_row(_city.strip(), _tokens, f"{_p:.3%}", *_shares)
    story.show(_shown)
    return


@app.cell(expand_output=True)
def tell_grammar(story, world):
    story.part("Where a mask comes from: a JSON schema")
    if importlib.util.find_spec("llguidance") is None:
        story.say(escape('This part needs llguidance, which is not installed: pip install "nanovllm[structured]"'))
    else:

        def _generate(properties: dict[str, Any], max_tokens: int) -> tuple[str, str | None]:
            schema = {"type": "object", "properties": properties, "required": list(properties)}
            asked = StructuredOutputsParams(
                json=schema, disable_any_whitespace=True, disable_additional_properties=True
            )
            params = SamplingParams(temperature=0, max_tokens=max_tokens, structured_outputs=asked)
            [output] = generate_in_order(world.llm, [AS_JSON], [params])
            return output.outputs[0].text, output.outputs[0].finish_reason

        with masks_watched() as (_steps, _seconds):
            _text, _reason = _generate({"city": TEXT_SCHEMA, "country": TEXT_SCHEMA}, 24)
        story.say(f"{AS_JSON!r}, with a schema of two texts, city and country, without whitespace. Greedy:")
        _shown = table("the model's first choice", "allowed", "taken", "probability", "masked")
        for _step in _steps:
            (_p, _now), _best = (x.softmax(-1)[_step.token_id] for x in _step[:2]), int(_step.before.argmax())
            _first = Text.assemble(f"{_step.before.softmax(-1)[_best]:>4.0%} ", world.piece(_best))
            _num_allowed = int(_step.after.isfinite().sum())
            _shown.add_row(_first, f"{_num_allowed:,}", world.piece(_step.token_id), f"{_p:.2%}", f"{_now:.2%}")
        story.show(_shown)
        story.say(escape(f"The output: {_text}, finish_reason {_reason!r}, {len(_steps)} tokens."))
        _pieces = ", ".join(str(world.piece(int(i))) for i in _steps[2].after.isfinite().nonzero())
        story.say(escape(f"Allowed in the third step: {_pieces}."))
        story.say(
            f"A mask took llguidance {min(_seconds) * 1e3:.1f} to {max(_seconds) * 1e3:.1f} ms; "
            f"{sum(_step.was_ready for _step in _steps)} of {len(_steps)} were ready when the logits came.",
            measured=True,
        )
        _text, _reason = _generate({"population": {"type": "integer"}}, 12)
        story.say(escape(f"A schema with one integer, at most 12 tokens: {_text}, finish_reason {_reason!r}."))
    return


@app.cell(expand_output=True)
def tell_candidates(story, world):
    story.part("The border, sorted or not")
    _vocab_size = len(world.shape.before)
    story.say(
        "Milliseconds to find the thresholds of 16 rows with top_p=0.9, on one core, the best of three: with all "
        f"{_vocab_size:,} logits sorted, with {sampler.NUM_CANDIDATES:,} candidates, and in C, without sorting, "
        "where a token of each row is drawn as well."
    )
    _choose = world.llm.engine.model_runner.kernels.choose_tokens
    _shown = table("beginning", "T", "kept", "sorted", "candidates", "in C", "same", "")
    for _prompt, _temperature in ((SHARP, 1.0), (OPEN, 1.0), (OPEN, 1.5)):
        world.typed(_prompt)
        _kept = world.reshaped(temperature=_temperature, top_p=0.9).num_left
        _scaled = (world.logits / _temperature).repeat(16, 1)
        _args = torch.full((16,), _vocab_size), torch.full((16,), 0.9), torch.zeros(16)
        _seconds, _found = list[float](), list[Tensor]()
        for _num_candidates in (_vocab_size, sampler.NUM_CANDIDATES):
            _work = partial(sampler.logit_threshold, _scaled, *_args)
            with replaced(sampler, "NUM_CANDIDATES", _num_candidates):
                _seconds.append(min(stopwatch(_work) for _ in range(3)))
                _found.append(_work())
        _seqs = [Sequence([0], SamplingParams(temperature=_temperature, top_p=0.9, seed=i)) for i in range(16)]
        _logits, _batch = world.logits.repeat(16, 1), SamplingBatch.from_sequences(_seqs)
        _seconds.append(min(stopwatch(partial(_choose, _logits, _batch)) for _ in range(3)))
        _same = torch.equal(*_found) and torch.equal(_choose(_logits, _batch), choose_tokens(_logits, _batch))
        _milliseconds = (f"{s * 1e3:.1f}" for s in _seconds)
        _shown.add_row(escape(_prompt), str(_temperature), f"{_kept:,}", *_milliseconds, str(_same), "(measured)")
    story.show(_shown)
    story.say(
        f"Where top_p ends within {sampler.NUM_CANDIDATES:,} candidates, they are all it takes. In the last row it "
        "does not, and everything is looked at after all."
    )
    return


if __name__ == "__main__":
    app.run()
