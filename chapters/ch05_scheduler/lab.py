import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 5: The scheduler")

with app.setup(hide_code=True):
    from rich.console import Group
    from rich.table import Table

    from chapters.ch05_scheduler import page
    from chapters.ch05_scheduler.batching import REQUESTS, StaticStage, idle_share, mean_num_steps, num_computed_tokens
    from chapters.ch05_scheduler.drawing import draw_memory, draw_sequences, draw_timeline, draw_trace
    from chapters.lab_notebook import the_story
    from chapters.playing import playground_of, title
    from chapters.stage import EOS, Stage


@app.cell(hide_code=True)
def _():
    title(5)
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
def begin():
    story = the_story()
    return (story,)


@app.cell(expand_output=True)
def _(story):
    story.say("The Scheduler and the BlockManager are the engine's. A stage samples in the model's place.")
    return


@app.cell(expand_output=True)
def tell_one_request(story):
    story.part("One request, from WAITING to FINISHED")
    _stage = Stage(max_num_batched_tokens=6)
    _seq = _stage.add(10, 3)
    _table = Table("step", "chunk", "samples", "state after it", "len(tokens)", "computed", show_edge=False)
    _table.add_row("", "", "", _seq.status.name, str(len(_seq.tokens)), str(_seq.num_computed_tokens))
    while _stage.has_unfinished():
        [_chunk] = _stage.step().chunks
        _work = f"{_chunk.start}..{_chunk.end}", str(_seq.tokens[-1]) if _chunk.reaches_end else "", _seq.status.name
        _table.add_row(str(len(_stage.steps)), *_work, str(len(_seq.tokens)), str(_seq.num_computed_tokens))
    story.say(
        "The prompt has 10 tokens, the budget is 6 tokens a step, and the answer has 3 tokens (the last is EOS, id 0)."
    )
    story.show(_table)
    story.say(
        "Computed chases len(tokens). When it gets there, the step samples a token, and computed is one behind again. "
        "The last token is never computed: nobody asks what comes after it."
    )
    return


@app.cell(expand_output=True)
def tell_static_and_continuous(story):
    story.part("Eight requests, four seats: static and continuous batching")
    _options: dict = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    _stages: dict[str, Stage] = {"static batches": StaticStage(32, **_options), "continuous": Stage(32, **_options)}
    for _title, _stage in _stages.items():
        for _request in REQUESTS:
            _stage.add(*_request)
        _stage.run()
        story.say(f"{_title} (P prefill, d decode, . waits, - has ended and keeps its seat):")
        story.show(draw_timeline(_stage))
    _table = Table("", "steps", "idle seats", "tokens a step", "steps from arrival to end", show_edge=False)
    for _title, _stage in _stages.items():
        _numbers = f"{idle_share(_stage):.0%}", f"{num_computed_tokens(_stage) / len(_stage.steps):.1f}"
        _table.add_row(_title, str(len(_stage.steps)), *_numbers, f"{mean_num_steps(_stage):.1f}")
    story.show(_table)
    [_computed] = {num_computed_tokens(_stage) for _stage in _stages.values()}
    story.say(f"Both computed the same {_computed} tokens. What differs is how many steps they are spread over.")
    return


@app.cell(expand_output=True)
def tell_budget(story):
    story.part("A budget of 8 tokens a step")
    _stage = Stage(max_num_batched_tokens=8)
    _stage.add(5, 6)
    _stage.add(3, 6)
    _stage.step()
    _stage.add(17, 3)
    _stage.add(2, 2)
    _stage.run()
    story.say("A and B run. Then C comes with 17 tokens, and D with 2. A star marks the chunks that sample.")
    story.show(draw_trace(_stage))
    story.say(
        "Decodes come first, one token each; what is left goes to C's prompt. D comes in only when C's prompt is done: "
        "one sequence at most is in the middle of its prompt, the last one."
    )
    return


@app.cell(expand_output=True)
def tell_preemption(story):
    story.part("The pool runs dry")
    _stage = Stage(7, max_num_batched_tokens=32)
    for _num_prompt_tokens, _num_answer_tokens in ((7, 4), (7, 8), (5, 8)):
        _stage.add(_num_prompt_tokens, _num_answer_tokens)
    while _stage.scheduler.num_preemptions == 0:
        _before = Group(draw_sequences(_stage), draw_memory(_stage))
        _num_computed = {seq.seq_id: seq.num_computed_tokens for seq in _stage.scheduler.running}
        _stage.step()
    [_victim] = _stage.steps[-1].preempted
    _name, _number = _stage.names[_victim.seq_id], len(_stage.steps)
    _pool = f"{len(_stage.manager.blocks)} blocks of {_stage.manager.block_size} tokens"
    story.say(f"{_pool}, three sequences with prompts of 7, 7 and 5 tokens. Before step {_number}:")
    story.show(_before)
    story.say(f"After step {_number}, which preempted {_name}:")
    story.show(Group(draw_sequences(_stage), draw_memory(_stage)))
    story.say(
        f"{_name} keeps its {len(_victim.tokens)} tokens, {_victim.num_generated_tokens} of them generated, and "
        f"nothing else: num_computed_tokens={_victim.num_computed_tokens}, block_table={_victim.block_table}."
    )
    while not _victim.block_table:
        _stage.step()
    _chunk = _stage.steps[-1].chunks[-1]
    story.say(
        f"Step {len(_stage.steps)} admits {_name} again: {_victim.num_cached_tokens} tokens found cached, "
        f"{_chunk.start}..{_chunk.end} computed, {_num_computed[_victim.seq_id] - _chunk.start} of them for the "
        "second time."
    )
    _stage.run()
    story.show(draw_timeline(_stage))
    story.show(draw_trace(_stage, _number - 2, _number + 3))
    assert [seq.num_generated_tokens for seq in _stage.seqs.values()] == [4, 8, 8]
    story.say("Each sequence got the answer that it would have got alone; C's came later.")
    return


@app.cell(expand_output=True)
def tell_head_of_the_line(story):
    story.part("The first that does not fit holds up the line")
    _stage = Stage(8)
    _stage.add(14, 4)
    _stage.step()
    _stage.add(20, 2)
    _stage.add(3, 2)
    _stage.step()
    story.say("A runs in 4 of 8 blocks. B needs 5 blocks. C needs 1, would fit, and stands behind B:")
    story.show(Group(draw_sequences(_stage), draw_memory(_stage)))
    _stage.run()
    story.show(draw_trace(_stage))
    return


@app.cell(expand_output=True)
def tell_price_of_preemption(story):
    story.part("What a small pool costs")
    _table = Table(
        "blocks", "prefix cache", "steps", "preemptions", "tokens computed", "a second time", show_edge=False
    )
    for _num_blocks in (40, 20, 16, 12, 8):
        for _caching in (True, False):
            _stage = Stage(_num_blocks, max_num_batched_tokens=64, max_num_seqs=8, enable_prefix_caching=_caching)
            for _num_prompt_tokens, _num_answer_tokens in REQUESTS:
                _stage.add(_num_prompt_tokens + 4, _num_answer_tokens + 6)
            _stage.run()
            _num_needed = sum(len(seq.tokens) - 1 for seq in _stage.seqs.values())
            _again = num_computed_tokens(_stage) - _num_needed
            _counts = len(_stage.steps), _stage.scheduler.num_preemptions, num_computed_tokens(_stage), _again
            _table.add_row(str(_num_blocks), "on" if _caching else "off", *map(str, _counts))
    story.say(
        "Eight requests with longer prompts and answers run, at most eight at a time, in smaller and smaller pools:"
    )
    story.show(_table)
    story.say("The tokens of every sequence are the same in all ten rows. Only the work differs.")
    return


@app.cell(expand_output=True)
def tell_endings(story):
    story.part("How a sequence ends")
    _stage = Stage(16, max_model_len=12)
    _cases: list[tuple[str, list[int], dict]] = [
        ("EOS", [11, EOS], {}),
        ("ignore_eos=True, max_tokens=4", [11, EOS], {"ignore_eos": True, "max_tokens": 4}),
        ("stop_token_ids=[99]", [11, 12, 99], {"stop_token_ids": [99]}),
        ("min_tokens=2", [EOS, EOS, EOS, EOS], {"min_tokens": 2}),
        ("EOS is the last one allowed", [11, EOS], {"max_tokens": 2}),
        ("max_model_len=12", list(range(11, 30)), {}),
    ]
    _table = Table("", "rule", "generated", "finish_reason", "stop_reason", show_edge=False)
    for _, _answer, _params in _cases:
        _stage.add(8, _answer, **_params)
    _stage.run()
    for _seq, (_rule, _, _) in zip(_stage.seqs.values(), _cases, strict=True):
        _shown = " ".join("EOS" if token == EOS else str(token) for token in _seq.generated_token_ids)
        _table.add_row(_stage.names[_seq.seq_id], _rule, _shown, str(_seq.finish_reason), str(_seq.stop_reason))
    story.say("The prompts have 8 tokens. The table shows what the lab sampled, and why the scheduler ended each:")
    story.show(_table)
    return


if __name__ == "__main__":
    app.run()
