import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 16: Memory that does not grow")

with app.setup(hide_code=True):
    from typing import Any

    from chapters.ch13_guess_and_check.lab_parts import fixed
    from chapters.ch13_guess_and_check.world import drafting
    from chapters.ch16_fixed_memory import page
    from chapters.ch16_fixed_memory.drawing import draw_answers, draw_computed, draw_next, draw_sent, draw_state
    from chapters.ch16_fixed_memory.lab_parts import PROMPT, answer, draw_curves, load_tiny
    from chapters.ch16_fixed_memory.layer import memory_08b, time_layer
    from chapters.ch16_fixed_memory.notebook import ADD_UP, RULES, Notebook
    from chapters.ch16_fixed_memory.placing import POLICIES, UNBOUNDED, every_block, hard_workloads, play
    from chapters.ch16_fixed_memory.recall import TRIALS, new_day, once_each, rewritten
    from chapters.ch16_fixed_memory.shelf import Shelf
    from chapters.ch16_fixed_memory.world import World
    from chapters.draw import make_table
    from chapters.lab_notebook import the_story
    from chapters.patching import replaced
    from chapters.playing import playground_of, start_button, title
    from chapters.story import one_core
    from nanovllm.core.snapshots.segments import DISCARDED, step_segments
    from nanovllm.features.hybrid import batch_states


@app.cell(hide_code=True)
def _():
    title(16)
    return


@app.cell(hide_code=True)
def play_it():
    player, turn = playground_of(page)
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
    BOUNDS = 8, 16, 40  # snapshots
    return (BOUNDS,)


@app.cell(expand_output=True)
def tell_growth(story):
    story.part("What grows, and what does not")
    _memory = memory_08b()
    story.say(
        f"Qwen3.5-0.8B, bf16: a token takes {_memory.kv:,} bytes of K and V in the 6 layers that attend, and a "
        f"sequence {_memory.state:,} bytes of states in the other 18. If all 24 attended: {_memory.kv_of_all:,} bytes "
        "a token. The table shows the memory of one sequence in MB, by its length:"
    )
    story.show(draw_curves({"○ with states": _memory.hybrid, "● all attention": _memory.attention}))
    _table = make_table("tokens", "with states", "all attention", "of it", width=14, first=8)
    for _num in (100, 1000, 8000, 16_000, 128_000):
        _ours, _all_attend = _memory.hybrid(_num), _memory.attention(_num)
        _table.add_row(
            f"{_num:,}", f"{_ours / 1e6:,.1f} MB", f"{_all_attend / 1e6:,.1f} MB", f"{_ours / _all_attend:.2f}"
        )
    story.show(_table)
    _even = _memory.state / (_memory.kv_of_all - _memory.kv)
    _in_tokens = _memory.state / _memory.kv
    story.say(
        f"Both take the same at {_even:.0f} tokens. The states weigh as much as K and V of {_in_tokens:,.0f} tokens."
    )
    return


@app.cell(expand_output=True)
def tell_filling(story):
    story.part("A notebook fills")
    _book = Notebook()
    for _ in range(4):
        _book.come_in()
    story.say(
        "Four lines are added up. First comes the state; then what is read for each name, and how much of the "
        "right room:"
    )
    story.show(draw_state(_book.state))
    story.show(draw_answers(_book.answers))
    for _ in range(8):
        _book.come_in()
    story.say("Eight more lines are written into the same 64 numbers:")
    story.show(draw_answers(_book.answers))
    story.say(
        f"On average over {TRIALS} notebooks with random keys and values, each key written once: percent right of all "
        "lines, and of the last four."
    )
    _table = make_table("lines", *(name for rule in RULES for name in (rule.name, "last 4")), first=5, width=6)
    for _num in (2, 4, 8, 16, 24):
        _parts = list(range(_num)), list(range(_num))[-4:]
        _table.add_row(str(_num), *(f"{once_each(_num, rule, part):.0%}" for rule in RULES for part in _parts))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_moves(story):
    story.part("Lines that are corrected")
    _book = Notebook()
    for _ in range(3):
        _book.come_in()
    for _ in range(9):
        _book.move()
    story.say(
        "Three people make nine moves, and every room so far is in the sum. First the lines are added up, then "
        "written by the delta rule:"
    )
    for _rule in RULES[:2]:
        _book.rule = _rule
        story.show(draw_answers(_book.answers, columns=3))
    story.say(
        "Four keys are written again and again with new values. The table shows the percentage of the newest "
        "values that are read:"
    )
    _table = make_table("lines", *(_rule.name for _rule in RULES), "add up, decay 0.7", first=5, width=12)
    for _num in (4, 8, 16, 32):
        _faded = f"{rewritten(_num, 4, ADD_UP, 0.7):.0%}"
        _table.add_row(str(_num), *(f"{rewritten(_num, 4, _rule):.0%}" for _rule in RULES), _faded)
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_days(story):
    story.part("A new day")
    story.say("Twelve lines of yesterday, then the whole state fades once, then four new lines, which are asked for.")
    _table = make_table("decay", *(rule.name for rule in RULES), first=5, width=12)
    for _decay in (1.0, 0.5, 0.1, 0.0):
        _table.add_row(f"{_decay:g}", *(f"{new_day(12, 4, rule, _decay):.0%}" for rule in RULES))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_layer(story):

    story.part("Token by token")
    story.say(
        "One layer of Qwen3.5-0.8B, random weights in bf16, on one core. Milliseconds for so many tokens of one "
        "sequence: its matrix products; convolution, recurrence and norm in C; the same token by token in PyTorch."
    )
    _table = make_table("tokens", "products", "in C", "of both", "in PyTorch", "", width=10, first=6)
    for _times in time_layer():
        _part = _times.recurrence / (_times.products + _times.recurrence)
        _milliseconds = (f"{1e3 * s:.2f}" for s in (_times.products, _times.recurrence))
        _table.add_row(
            str(_times.num_rows), *_milliseconds, f"{_part:.0%}", f"{1e3 * _times.in_torch:.1f}", "(measured)"
        )
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_bits(story):
    story.part("The same bits")
    story.say(
        f"A small model of this kind with random weights answers a prompt of {len(PROMPT)} tokens with 12 tokens, "
        "greedy, with their logprobs. The prompt is computed in chunks of the given length, and from the cache, after "
        "the given number of tokens."
    )
    _whole, _ = answer(load_tiny(), PROMPT)
    _table = make_table("", "begins after", "tokens and logprobs", width=19, first=24)
    for _size in (1, 3, 16):
        _found, _start = answer(load_tiny(max_num_batched_tokens=_size, max_num_seqs=1), PROMPT)
        _table.add_row(f"chunks of {_size}", str(_start), "the same bits" if _found == _whole else "OTHERS")
    _llm = load_tiny()
    for _shared in (20, 40, 60):
        answer(_llm, [*PROMPT[:_shared], 1])  # leaves a snapshot at its end
        _found, _start = answer(_llm, PROMPT)
        _table.add_row(f"{_shared} tokens sent before", str(_start), "the same bits" if _found == _whole else "OTHERS")
        _llm.reset_prefix_cache()
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_by_hand(story):
    story.part("Snapshots by hand")
    story.say(
        "1,500 tokens are shared, 700 are each request's own. Places are chosen by hand, beside the engine's policy, "
        "with room for 8 snapshots. First comes one at the end of every prompt:"
    )
    _world = World()
    _world.next_workload()
    _said = []
    for _ in range(3):
        _said += [_world.mark_end(), _world.send()]
    story.log(*_said)
    story.say("K and V of 1,488 shared tokens are there, in full blocks. Nobody has kept a state on the way:")
    story.show(draw_next(_world.shelf))
    _world.shelf = Shelf(_world.shelf.workload)
    _said = [_world.send(), _world.mark_fork(), *(_world.send() for _ in range(3))]
    story.say("It starts over. Now the second request is marked where it leaves what the cache knows:")
    story.log(*_said)
    story.show(draw_sent(_world.shelf))
    story.show(draw_computed(_world.shelf))
    return


@app.cell(expand_output=True)
def tell_policies(BOUNDS, story):
    story.part("What each policy finds")
    _given = hard_workloads()
    _unbounded = {_name: sum(play(_requests, every_block, UNBOUNDED)) for _name, _requests in _given.items()}
    _saved = ", ".join(f"{num:,}" for num in _unbounded.values())
    story.say(
        f"The four workloads run in full on the engine's scheduler. An unbounded cache saves {_saved} tokens. The "
        f"table shows the percentage of that, by policy, with room for {BOUNDS[0]} snapshots:"
    )
    _table = make_table("", *POLICIES, first=21)
    for _name, _requests in _given.items():
        _parts = (sum(play(_requests, policy, BOUNDS[0])) / _unbounded[_name] for policy in POLICIES.values())
        _table.add_row(_name.removesuffix(" of 6,000"), *(f"{part:.0%}" for part in _parts))
    story.show(_table)
    _hardest = list(_given)[-1]
    story.say("This is the last one, by the room for snapshots:")
    _table = make_table("snapshots", *POLICIES, first=21)
    for _bound in BOUNDS:
        _parts = (sum(play(_given[_hardest], policy, _bound)) / _unbounded[_hardest] for policy in POLICIES.values())
        _table.add_row(str(_bound), *(f"{part:.0%}" for part in _parts))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_drafts(story):

    story.part("What a draft token must not leave behind")
    story.say(
        "The small model again, with three wrong draft tokens in every step: first as the engine does it, then with a "
        "mistake, where the state takes in the draft tokens, too, and nobody takes them out."
    )

    def _kept(chunks: Any) -> list[list[int]]:
        """A mistake: what a step leaves of draft tokens is kept in the sequence's own slot."""
        return [[row[0], row[2] if row[1] == DISCARDED else row[1], *row[2:]] for row in step_segments(chunks)]

    _speculative = {"method": "ngram", "num_speculative_tokens": 3}
    _whole, _ = answer(load_tiny(), PROMPT)
    _table = make_table("draft tokens are", "tokens and logprobs", width=20, first=24)
    _table.columns[1].justify = "left"
    for _name, _segments in (("logged", step_segments), ("kept in the state", _kept)):
        _llm = load_tiny(speculative_config=_speculative)
        with replaced(batch_states, "step_segments", _segments), drafting(_llm, fixed([3, 3, 3]), 3):
            _found, _ = answer(_llm, PROMPT)
        _num_same = next((i for i, (a, b) in enumerate(zip(_found[1], _whole[1], strict=True)) if a != b), 12)
        _table.add_row(_name, "the same bits" if _found == _whole else f"different from token {_num_same + 1} on")
    story.show(_table)
    return


if __name__ == "__main__":
    app.run()
