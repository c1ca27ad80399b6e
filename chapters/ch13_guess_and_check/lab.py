import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 13: Guess and check")

with app.setup(hide_code=True):
    from typing import Any

    from rich.table import Table
    from rich.text import Text

    from chapters.ch13_guess_and_check.again import HAPPENS, SMALL, Played, hat, noise
    from chapters.ch13_guess_and_check.coupling import agreement, all_logits
    from chapters.ch13_guess_and_check.drawing import counts_of, draw_steps
    from chapters.ch13_guess_and_check.lab_parts import (
        ACTIONS,
        NUM_SEQS,
        OUR_ADD_DRAFTS,
        SPECULATIVE,
        begin_request,
        fixed,
        load_world,
        panels,
        register_too_early,
        run,
    )
    from chapters.ch13_guess_and_check.world import (
        ITSELF,
        LONGEST,
        NGRAMS,
        NOBODY,
        OPTIONS,
        SHORTEST,
        TEXTS,
        chunks_watched,
        drafting,
        expected_run,
    )
    from chapters.draw import make_table
    from chapters.lab_notebook import the_story
    from chapters.patching import replaced
    from chapters.playing import playground, start_button, title
    from chapters.story import one_core, stopwatch
    from nanovllm import LLM, SamplingParams
    from nanovllm.core.scheduler import Scheduler
    from nanovllm.features.speculation.choose import choose_num_draft_tokens


@app.cell(hide_code=True)
def _():
    title(13)
    return


@app.cell(hide_code=True)
def play_it():
    player, turn = playground(lambda: load_world(the_story()), panels, ACTIONS, ask="a text to continue")
    return player, turn


@app.cell(hide_code=True, expand_output=True)
def show_it(player, turn):
    turn()
    controls = player.controls()
    player.show(controls)
    return


@app.cell(hide_code=True)
def start_it():
    start = start_button("a minute")
    start
    return (start,)


@app.cell(hide_code=True)
def begin(start):
    story = the_story(start)
    story.enter(one_core())
    return (story,)


@app.cell
def settings():
    NUM_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 32)
    MAX_ROUNDS = 12  # of a measurement
    DRAFT = " and the sea was"  # of a proposer that is wrong
    return DRAFT, MAX_ROUNDS, NUM_ROWS


@app.cell(expand_output=True)
def tell_rows(MAX_ROUNDS, NUM_ROWS, story):
    story.part("What one more row costs")
    _llm = story.load(dtype="bfloat16", **OPTIONS)
    _vocab_size = _llm.engine.model_config.vocab_size
    _num_tokens = 1 + len(NUM_ROWS) + max(NUM_ROWS)  # so that a step's draft tokens never go beyond the last one
    _params = SamplingParams(temperature=0, max_tokens=_num_tokens, ignore_eos=True)
    _times: dict[int, list[float]] = {_num_rows: [] for _num_rows in NUM_ROWS}
    for _ in range(MAX_ROUNDS):
        _request_id = _llm.engine.add_request(None, TEXTS["a story"], _params)
        _llm.engine.step()
        for _num_rows, _found in _times.items():
            with drafting(_llm, fixed([_vocab_size - 1] * max(NUM_ROWS)), _num_rows - 1):
                _found.append(stopwatch(_llm.engine.step))
        _llm.engine.abort_request(_request_id)
    _best = {_num_rows: min(_found) for _num_rows, _found in _times.items()}
    story.say(
        "One sequence in bf16, on one core. A step with n rows computes its newest token and n - 1 draft tokens, which "
        f"are all wrong. Milliseconds of a step, the best of {MAX_ROUNDS}; as a multiple of a step without draft "
        "tokens; and the milliseconds a token if all draft tokens had been accepted."
    )
    _table = make_table("rows", "ms", "times", "ms a row", "", width=10, first=10)
    for _num_rows, _s in _best.items():
        _table.add_row(
            str(_num_rows), f"{1e3 * _s:.1f}", f"{_s / _best[1]:.2f}", f"{1e3 * _s / _num_rows:.1f}", "(measured)"
        )
    story.show(_table)
    step_s = [round(_best[_num_rows], 4) for _num_rows in range(1, 10)]  # as the table shows them: pictures read it
    return (step_s,)


@app.cell
def _(story):
    world = load_world(story)
    return (world,)


@app.cell(expand_output=True)
def tell_drafts(story, world):
    story.part("A text that goes on as it did before")
    _tokens = run(world, "a quotation", NGRAMS, 4, 0.0, 44)
    story.say(f"The prompt, {world.seq.num_prompt_tokens} tokens:")
    story.show(Text(world.prompt))
    story.say(
        f"Greedy, at most 4 draft tokens a step, from n-grams of {LONGEST} to {SHORTEST} tokens. A bar stands "
        "between two tokens, a dot for a space. The first step is the prompt's."
    )
    story.show(draw_steps(world, world.steps))
    _num_steps = len(world.steps)
    _told = "the same" if run(world, "a quotation", NOBODY, 4, 0.0, 44) == _tokens else "OTHERS"
    _without = f"Without draft tokens {len(world.steps)} steps, and the tokens are {_told}."
    story.say(f"{len(_tokens)} tokens in {_num_steps} steps. {_without}")
    return


@app.cell(expand_output=True)
def tell_runs(story, world):
    story.part("How long a run is")
    story.say(
        "The table shows, for 48 tokens each: the steps with at least one draft token; the share a of the checked "
        "draft tokens that were accepted; the tokens that such a step gave; and the number to expect by the formula "
        "(1 - a^(k+1)) / (1 - a), averaged over the k of the steps."
    )
    _table = make_table(
        "draft tokens from", "T", "k", "steps", "drafted", "accepted", "a", "tokens a step", "expected", first=24
    )
    for _text, _source, _temperature in (
        ("a quotation", NGRAMS, 0.0),
        ("a list", NGRAMS, 0.0),
        ("a story", ITSELF, 0.5),
    ):
        for _num_draft_tokens in (1, 4, 8):
            run(world, _text, _source, _num_draft_tokens, _temperature, 48)
            _steps = [step for step in world.steps if step.draft_token_ids]
            _name = f"{_text}, {'n-grams' if _source == NGRAMS else 'itself'}"
            _table.add_row(_name, f"{_temperature:g}", str(_num_draft_tokens), *counts_of(_steps))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_noise(story, world):
    story.part("The same noise")
    world.source = ITSELF
    _draft: Any = world.proposer
    _tokens = run(world, "a story", NOBODY, 4, 1.0, 64)
    _token_ids = world.tokenizer(world.prompt).input_ids + _tokens
    world.begin(TEXTS["a story"])  # its blocks are written over here, and the cache forgets them afterwards
    _ours, _its = (all_logits(runner, _token_ids) for runner in (world.llm.engine.model_runner, _draft.runner))
    _draft.drafts.clear()
    _draft.manager.clear()
    story.say(
        f"The model and its copy in 8 bits read the same {len(_token_ids)} tokens. On average over all positions, how "
        "probable is it that a draft token of the copy is accepted? By rejection sampling; if both draw with the same "
        "number; if each draws with its own."
    )
    _table = make_table("temperature", "rejection sampling", "same noise", "own noise", first=14, width=18)
    for _temperature in (0.0, 0.3, 0.5, 0.7, 1.0):
        _table.add_row(f"{_temperature:g}", *(f"{x:.1%}" for x in agreement(_ours, _its, _temperature)))
    story.show(_table)
    _same = ", ".join(f"{x:.1%}" for x in agreement(_ours, _ours, 1.0))
    story.say(f"A model that is its own draft, at temperature 1: {_same}.")
    return


@app.cell(expand_output=True)
def tell_cache(DRAFT, story, world):
    story.part("What is in the cache, and what can be found")
    _llm = world.llm
    _draft_token_ids = world.tokenizer(DRAFT).input_ids[:4]
    _prompt = world.tokenizer(TEXTS["a story"]).input_ids[:11]
    _first, _slots = len(_prompt) - 3, dict[int, str]()
    world.begin(TEXTS["a story"])
    begin_request(world, _prompt)
    _table = Table("step", *map(str, range(_first, _first + 9)), "computed", "cached", show_edge=False)
    _size = _llm.engine.scheduler.block_manager.block_size
    for _number in range(1, 5):
        with drafting(_llm, fixed(_draft_token_ids), 4 if _number == 2 else 0), chunks_watched(_llm) as _chunks:
            _llm.engine.step()
        [_chunk] = _chunks
        for _position, _token_id in enumerate(_chunk.token_ids, _chunk.start):
            _slots[_position] = ("?" if _position >= _chunk.known_end else "") + world.piece(_token_id)
        _num_cached = sum(_llm.engine.block_manager.blocks[i].block_hash is not None for i in _chunk.seq.block_table)
        _counts = str(_chunk.seq.num_computed_tokens), f"{_num_cached} of {len(_chunk.seq.block_table)}"
        _table.add_row(str(_number), *(_slots.get(i, "") for i in range(_first, _first + 9)), *_counts)
    story.say(
        f"Blocks of {_size} tokens, a prompt of {len(_prompt)}. Whose K and V stand in the slots of positions {_first} "
        f"to {_first + 8} after each step? A question mark is before a draft token. In step 2 four wrong ones are "
        "computed."
    )
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_register(DRAFT, story, world):
    story.part("Blocks that are registered too early")
    _draft_token_ids = world.tokenizer(DRAFT).input_ids[:4]
    _prompt = world.tokenizer(TEXTS["a story"]).input_ids[:11]
    _table = make_table("blocks are registered", "goes on with", first=24)
    _table.columns[1].justify = "left"
    for _name, _add in (("when tokens are accepted", OUR_ADD_DRAFTS), ("when they are computed", register_too_early)):
        with replaced(Scheduler, "add_drafts", _add):
            _seq = begin_request(world, _prompt)
            for _number in range(1, 21):
                with drafting(world.llm, fixed(_draft_token_ids), 4 if _number == 2 else 0):
                    world.llm.engine.step()
            _table.add_row(_name, Text(repr(world.tokenizer.decode(_seq.generated_token_ids))))
    world.llm.engine.abort_requests(list(world.llm.engine.requests.values()))
    story.say("This is the same request, with the same four wrong draft tokens in step 2, 20 tokens, greedy:")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_numbers(step_s, story):
    story.part("How many draft tokens")
    story.say(
        "Tokens a second that are expected of one sequence, by the step times of the first table, if each draft token "
        "is accepted with probability a. The last column is what the engine's choose_num_draft_tokens takes, of at "
        "most 8."
    )
    _columns = (0, 1, 2, 3, 4, 5, 6, 8)
    _table = make_table("a", *(f"k = {k}" for k in _columns), "takes", "", width=5)
    for _a in (0.1, 0.3, 0.5, 0.7, 0.9, 0.97):
        _rates = (f"{expected_run(_a, k) / step_s[k]:.0f}" for k in _columns)
        _table.add_row(f"{_a:g}", *_rates, str(choose_num_draft_tokens([_a], [8], step_s)[0]), "(measured)")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_engine(MAX_ROUNDS, story):
    story.part("The engine decides")
    _sizes: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": NUM_SEQS, "dtype": "bfloat16"}
    _plain, _speculative = story.load(**_sizes), story.load(speculative_config=SPECULATIVE, **_sizes)
    story.say(
        "bf16, greedy, with draft tokens from n-grams, at most 5, and with none: one stream of 100 tokens, then "
        f"{NUM_SEQS} streams of 12 at once, twice each. The draft tokens are those of the second time, the "
        "milliseconds a token those of the faster one."
    )
    _table = make_table("", "drafted", "accepted", "ms without", "ms with", "same tokens", "", first=26, width=7)
    for _name, _prompts, _num_tokens in (
        ("a quotation", [TEXTS["a quotation"]], 100),
        ("a story", [TEXTS["a story"]], 100),
        (f"{NUM_SEQS} lists at once", [TEXTS["a list"]] * NUM_SEQS, 12),
    ):
        _params = SamplingParams(temperature=0, max_tokens=_num_tokens, ignore_eos=True)
        _seconds: dict[LLM, list[float]] = {_plain: [], _speculative: []}
        _tokens: dict[LLM, list[list[int]]] = {}
        for _ in range(min(2, MAX_ROUNDS)):
            for _llm, _found in _seconds.items():
                _outputs = _llm.generate(_prompts, _params, use_tqdm=False)
                _metrics = [output.metrics for output in _outputs]
                _first = max(m.first_token_time or 0.0 for m in _metrics)
                _found.append(max(m.last_token_time or 0.0 for m in _metrics) - _first)
                _tokens[_llm] = [output.outputs[0].token_ids for output in _outputs]
        _counts = sum(m.num_draft_tokens for m in _metrics), sum(m.num_accepted_tokens for m in _metrics)
        _per_token = (f"{1e3 * min(_found) / (_num_tokens - 1) / len(_prompts):.1f}" for _found in _seconds.values())
        _same = f"{sum(a == b for a, b in zip(*_tokens.values(), strict=True))} of {len(_prompts)}"
        _table.add_row(_name, *map(str, _counts), *_per_token, _same, "(measured)")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_again(story):
    story.part("Computed again")
    _played = Played()
    _pools = f"{len(_played.scheduler.block_manager.blocks)} blocks, and {SMALL} in a small pool"
    story.say(
        f"The scheduler and the block manager are the engine's, and the model is a rule: which token comes depends on "
        f"the tokens before it and on a number. {len(_played.seqs)} sequences, two samples each of "
        f"{len(_played.seqs) // 2} requests, get 20 tokens each. The pool has {_pools}. One in three draft tokens is "
        "wrong. After a step that fails all sequences wait, and the pool is forgotten. The last two columns: how "
        "many answers are those of the first line, if the number is a hash of seed, sample index and position in the "
        "output, and if each draw takes the next number of one generator, the hat."
    )
    _table = make_table("", "preempted", "failed", "tokens computed", "hash", "hat", width=10, first=24)
    _expected: dict[str, list[list[int]]] = {}
    for _name, _options in HAPPENS.items():
        _same = []
        for _draw_name, _draw in (("hat", hat()), ("hash", noise)):
            _played = Played(draw=_draw, **_options)
            _answers = _played.answers()
            _pairs = zip(_answers, _expected.setdefault(_draw_name, _answers), strict=True)
            _same.append(f"{sum(ours == theirs for ours, theirs in _pairs)} of {len(_answers)}")
        _counts = _played.num_preemptions, _played.num_failures, _played.num_computed_tokens
        _table.add_row(_name, *map(str, _counts), *reversed(_same))
    story.show(_table)
    return


if __name__ == "__main__":
    app.run()
