import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 9: Tensor parallelism")

with app.setup(hide_code=True):
    import os
    import pickle
    from typing import Any

    import torch
    from torch import Tensor

    from chapters.ch09_tensor_parallelism import ranks
    from chapters.ch09_tensor_parallelism.lab_parts import (
        NUM_TIMED_STEPS,
        NUM_TOKENS,
        PROMPT,
        World,
        add,
        decode_s,
        load_share,
        numbers,
        read_of,
        run,
        span,
    )
    from chapters.ch09_tensor_parallelism.ranks import ThreadGroup
    from chapters.draw import make_table
    from chapters.lab_notebook import the_story
    from chapters.patching import replaced
    from chapters.playing import title
    from nanovllm.features.parallel.group import RankGroup
    from nanovllm.features.parallel.parallel_layers import RowParallelLinear
    from nanovllm.worker.kernels import gated_linear
    from nanovllm.worker.layers import Linear


@app.cell(hide_code=True)
def _():
    title(9, playable=False)
    return


@app.cell(hide_code=True)
def begin():
    story = the_story()
    story.enter(ranks.on_the_cpu())
    return (story,)


@app.cell
def settings():
    SHARED = "Question: what is the capital of"
    COUNTRIES = ("France", "Italy", "Japan", "Egypt")
    return COUNTRIES, SHARED


@app.cell(expand_output=True)
def tell_pair(story):
    story.part("Columns, then rows: one pair of layers by hand")
    _first = torch.tensor([[1.0, 2], [3, -1], [0, 1], [-2, 1]])  # [4, 2]
    _second, _bias = torch.tensor([[1.0, 0, 2, 1], [2, 1, 0, 3]]), torch.tensor([10.0, 20])  # [2, 4], [2]
    _x = torch.tensor([[3.0, 1]])  # one token
    story.say(
        "There are two linear layers with a function between them, here max(0, h). The first makes 4 numbers of 2, the "
        "second 2 of 4. They are the engine's Linear and RowParallelLinear. The rows of the first weight are "
        f"{' '.join(f'({numbers(row)})' for row in _first)}, those of the second "
        f"{' '.join(f'({numbers(row)})' for row in _second)}. The second has a bias, ({numbers(_bias)}). On one rank "
        "they compute:"
    )

    def _pair(_group: ThreadGroup) -> tuple[Tensor, Tensor, Tensor]:
        """This rank's rows of the first weight, its columns of the second, and the layers run with them."""
        share = slice(_group.rank * 4 // _group.size, (_group.rank + 1) * 4 // _group.size)
        columns = Linear(2, 4 // _group.size, bias=False)
        rows = RowParallelLinear(4 // _group.size, 2, bias=True, group=_group)
        columns.weight, rows.weight = torch.nn.Parameter(_first[share]), torch.nn.Parameter(_second[:, share])
        rows.bias = torch.nn.Parameter(_bias)
        _h = columns(_x)
        return _h, _h.relu(), rows(_h.relu())

    [(_h, _activated, _y)] = ranks.together(ranks.make_groups(1), _pair)
    story.show(f"x = {numbers(_x)}    h = {numbers(_h)}    max(0, h) = {numbers(_activated)}    y = {numbers(_y)}")
    story.say(
        "Now come two ranks. Rank 0 has rows 0 and 1 of the first weight, so it gets h's first two numbers, and "
        "columns 0 and 1 of the second, which is all that those two numbers meet. The bias (10 20) is in rank 0's part:"
    )
    _groups = ranks.make_groups(2)
    _answers = ranks.together(_groups, _pair)
    _table = make_table("rank", "its h", "its max(0, h)", "its partial sum", "after all_reduce")
    for _group, (_h, _activated, _y) in zip(_groups, _answers, strict=True):
        _partial = _group.meeting.last_round[_group.rank]
        _table.add_row(str(_group.rank), *(numbers(each) for each in (_h, _activated, _partial, _y)))
    story.show(_table)
    _halves = [_x[:, [i]] @ _first[:, [i]].T for i in (0, 1)]
    _early, _late = _halves[0].relu() + _halves[1].relu(), (_halves[0] + _halves[1]).relu()
    story.say(
        f"The same y, on both ranks. All-reduces for the two layers: {_groups[0].num_reduces}. Between them neither "
        "rank needed a number from the other: the function works on each number alone.\n\n"
        "The other way round, with the first weight cut into columns, each rank would have a part of the sum for each "
        f"number of h: a = {numbers(_halves[0])} and b = {numbers(_halves[1])}. They would have to meet before the "
        "function, too, since it cannot be applied to halves:\n\n"
        f"max(0, a) + max(0, b) is {numbers(_early)}, but max(0, a + b) is {numbers(_late)}."
    )
    return


@app.cell
def _(story):
    world = World(story)
    _end = story.contexts.callback(world.ranks._end)
    return (world,)


@app.cell(expand_output=True)
def tell_shares(story, world):
    story.part("Who holds what")
    _config, _local, _size = world.config, world.local, world.size
    story.say(
        f"The model in float32 on {_size} ranks, each in a process of its own: {_size + 1} processes with this one. "
        "All numbers count from 0:"
    )
    _table = make_table("rank", "query heads", "KV heads", "MLP columns", "words", "MB of weights", "MB of KV")
    for _rank, _usage in enumerate(world.ranks.usage()):
        _shares = [
            span(RankGroup(_rank, _size).share(getattr(_config, name), getattr(_local, name)), 10**9)
            for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
        ]
        _table.add_row(str(_rank), *_shares, *(f"{_usage[key] / 1e6:.1f}" for key in ("weights", "kv_cache")))
    _runner = world.alone.engine.model_runner
    _wholes = _config.num_attention_heads, _config.num_key_value_heads, _config.intermediate_size, _config.vocab_size
    _megabytes = (f"{count / 1e6:.1f}" for count in (_runner.weight_bytes, world.alone.engine.kv_pool.num_bytes))
    _table.add_section()
    _table.add_row("1 of 1", *(f"{whole:,} in all" for whole in _wholes), *_megabytes)
    story.show(_table)
    _copies = sum(_usage["weights"] for _usage in world.ranks.usage()) - _runner.weight_bytes
    _num_norms = 2 * _config.num_hidden_layers + 1
    story.say(
        f"Together the ranks hold {_copies / 1e6:.2f} MB more than one does alone: each rank has all {_num_norms} "
        f"norms. One more copy of them is {_num_norms} x {_config.hidden_size} x 4 bytes = "
        f"{_num_norms * _config.hidden_size * 4 / 1e6:.2f} MB."
    )
    return


@app.cell(expand_output=True)
def tell_reading(story, world):
    story.part("Who reads what")
    _groups = [RankGroup(_rank, world.size) for _rank in range(world.size)]
    _models, _reads = zip(*(load_share(world.directory, world.config, group) for group in _groups), strict=True)
    story.say(
        "The loader of each rank runs in this process with a file that notes what it is asked for. No tensor is cut "
        "after reading it; a slice of the file is asked for. The table shows the tensors outside the layers, and those "
        "of layer 0:"
    )
    _table = make_table("tensor", "in the file", "rank 0 reads", f"rank {world.size - 1} reads")
    _names = [_name for _name, _ in _models[0].checkpoint_tensors()]
    for _name in [_name for _name in _names if "layers." not in _name or _name.startswith("model.layers.0.")]:
        _first, _last = _reads[0][_name], _reads[-1][_name]
        _short = _name.removeprefix("model.").removesuffix(".weight")
        _table.add_row(_short, " x ".join(map(str, _first.get_shape())), read_of(_first), read_of(_last))
    story.show(_table)
    story.say("These are the numbers read from the file, over all layers:")
    _table = make_table("rank", "numbers read", "numbers that it holds")
    for _rank, (_model, _read) in enumerate(zip(_models, _reads, strict=True)):
        _num_read, _num_held = (
            sum(part.num_read for part in _read.values()),
            sum(p.numel() for p in _model.parameters()),
        )
        _table.add_row(str(_rank), f"{_num_read:,}", f"{_num_held:,}")
    _table.add_section()
    _table.add_row("1 of 1", "", f"{world.alone.engine.model_runner.weight_bytes // 4:,}")
    story.show(_table)
    _q, _k, _v = _models[-1].layers[0].self_attn.qkv_proj.out_sizes
    story.say(
        f"q_proj, k_proj and v_proj lie in the file one by one and in memory as one weight, qkv_proj. Rank "
        f"{world.size - 1} has {_q} + {_k} + {_v} rows of it: its own part of each of the three, one below the other."
    )
    models = list(_models)
    return (models,)


@app.cell(expand_output=True)
def tell_messages(story, world):
    story.part("One step: what the ranks are told, and what they answer")
    _sent, _answers, _ask = list[tuple](), list[list](), world.ranks._ask

    def _overhear(*message: Any, late: Any = None) -> list:
        _sent.append(message)
        _answers.append(_ask(*message, late=late))
        return _answers[-1]

    world.several.reset_prefix_cache()  # this cell may have run before
    add(world.several, PROMPT, 1)
    with replaced(world.ranks, "_ask", _overhear):
        world.several.engine.step()
    _method, _batch, _sampling = _sent[0]
    story.say(f"{PROMPT!r}, one step. The driver sends every rank the same message:")
    _fields = ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "seqlens_k", "block_tables", "logits_rows")
    _arrays = (f"    Batch.{name} = {getattr(_batch, name).tolist()}" for name in _fields)
    story.log(f"{_method}(", *_arrays, f"    SamplingBatch, for {_sampling.num_rows} row", ")")
    story.say("It has no request, no sequence and no scheduler in it. These are the answers:")
    _found = ((rank, result.sampled_token_ids[0], result.logprobs[0]) for rank, result in enumerate(_answers[0]))
    story.log(*(f"rank {rank}: token ids {token_ids}, logprobs {logprobs}" for rank, token_ids, logprobs in _found))
    story.say(
        "Every rank has computed the logits of its own words and handed them to rank 0. Rank 0 has sampled, and "
        "answers for the group. The other ranks only say that they are done."
    )
    story.say(f"The message was {len(pickle.dumps(_sent[0])):,} bytes long.", measured=True)
    return


@app.cell(expand_output=True)
def tell_generation(COUNTRIES, SHARED, story, world):
    story.part("The same tokens, a small pool, and ranks that do not know about it")
    _config, _pool = world.config, world.several.engine.kv_pool
    _num_reduces, _row_bytes = 2 * _config.num_hidden_layers + 1, _config.hidden_size * 4
    _prompts = [f"{SHARED} {country}? Answer:" for country in COUNTRIES]
    story.say(
        f"The {len(_prompts)} prompts begin alike and get answers of {NUM_TOKENS} tokens, in a pool of "
        f"{_pool.num_blocks} blocks of {_pool.block_size}. All-reduces in a step: one after the embedding, two in "
        f"each of {_config.num_hidden_layers} layers: {_num_reduces}. Each adds up {_row_bytes:,} bytes "
        f"({_config.hidden_size} numbers) for every token of the step. The bytes in the third column are those that "
        "rank 0 counted:"
    )
    _steps, _tokens = run(world.several, _prompts)
    _formula = f"{_num_reduces} x {_row_bytes:,} x tokens"
    _table = make_table("step", "tokens", "bytes all-reduced", _formula, "hits", "preempted")
    for _number, _step in enumerate(_steps, start=1):
        _num_bytes = _num_reduces * _row_bytes * _step.num_tokens
        _counts = (f"{count:,}" for count in (_step.num_tokens, _step.reduced_bytes, _num_bytes))
        _table.add_row(str(_number), *_counts, str(_step.num_hits or ""), str(_step.num_preempted or ""))
    story.show(_table)
    _alone_steps, _alone_tokens = run(world.alone, _prompts)
    _decode = world.several.get_tokenizer().decode
    _lines = []
    for _ours, _alone in zip(_tokens, _alone_tokens, strict=True):
        _same = "the same tokens" if _ours == _alone else "OTHER TOKENS"
        _lines.append(f"{_same} on 1 and {world.size} ranks: {_decode(_ours)!r}")
    story.log(*_lines)
    _alike = [_step.num_tokens for _step in _steps] == [_step.num_tokens for _step in _alone_steps]
    story.say(
        f"Hits in the prefix cache: {sum(_step.num_hits for _step in _steps)} blocks. Preemptions: "
        f"{sum(_step.num_preempted for _step in _steps)}. On one rank: {sum(_step.num_hits for _step in _alone_steps)} "
        f"and {sum(_step.num_preempted for _step in _alone_steps)}. Tokens of each step the same: "
        f"{'yes' if _alike else 'no'}. All of this was decided in the driver. A rank saw slots and block tables, "
        "and used "
        "them for its own heads."
    )
    return


@app.cell(expand_output=True)
def tell_last_bits(models, story):
    story.part("The last bits")
    _big, _one = torch.tensor(1e8), torch.tensor(1.0)
    story.say(
        "float32 keeps about 7 digits, so the order of an addition matters. Let a be 100,000,000 and b be 1: "
        f"(a + b) - a = {(_big + _one) - _big:g} and (a - a) + b = {(_big - _big) + _one:g}."
    )
    _mlps = [model.layers[0].mlp for model in models]
    torch.manual_seed(0)
    _x = torch.randn(64, _mlps[0].gate_up_proj.weight.shape[1])
    with torch.inference_mode():
        _parts = [gated_linear(_x, mlp.gate_up_proj) for mlp in _mlps]
        _whole = torch.nn.functional.linear(torch.cat(_parts, 1), torch.cat([mlp.down_proj.weight for mlp in _mlps], 1))
        _partial = [
            mlp.down_proj.product(part, mlp.down_proj.weight, None) for mlp, part in zip(_mlps, _parts, strict=True)
        ]
    _forward, _backward = sum(_partial[1:], _partial[0]), sum(_partial[-2::-1], _partial[-1])
    story.say(
        f"down_proj of layer 0 with the real weights, for 64 random rows: {_whole.numel():,} numbers, each a sum of "
        f"{sum(part.shape[1] for part in _parts):,} products. As one sum, and as {len(models)} partial sums, added up:"
    )
    _table = make_table("compared", "they differ in", "by at most", "largest number", "")
    for _name, _a, _b in (
        (f"one sum / {len(models)} partial sums", _whole, _forward),
        ("rank 0 first / rank 0 last", _forward, _backward),
    ):
        _sizes = f"{int((_a != _b).sum()):,}", f"{float((_a - _b).abs().max()):.1e}", f"{float(_a.abs().max()):.2f}"
        _table.add_row(_name, *_sizes, "(measured)")
    story.show(_table)
    story.say(
        "None of the results is the wrong one. A token changes only where two candidates are that close together. In "
        "bfloat16, which keeps 2 to 3 digits, that happens now and then, so this lab compares tokens in float32."
    )
    return


@app.cell(expand_output=True)
def tell_time(story, world):
    story.part("Is it faster?")
    _seconds = [decode_s(world.alone), decode_s(world.several)]
    _num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    story.say(f"One decode step with one token, the best of {NUM_TIMED_STEPS}, on {_num_cores} cores:")
    _table = make_table("ranks", "ms a step", "")
    for _size, _step_s in zip((1, world.size), _seconds, strict=True):
        _table.add_row(str(_size), f"{_step_s * 1e3:.1f}", "(measured)")
    story.show(_table)
    _num_reduces = 2 * world.config.num_hidden_layers + 1
    story.say(
        f"{world.size} ranks take {_seconds[1] / _seconds[0]:.1f} times as long as one. They meet {_num_reduces} times "
        f"in a step, every {_seconds[1] * 1e3 / _num_reduces:.1f} ms.",
        measured=True,
    )
    story.say(
        "No device was added. The ranks share the cores and the memory that one rank had to itself: the same number of "
        "weights comes out of the same memory, and the time for the meetings is added. (If your numbers say otherwise, "
        "something else is running on this machine.)"
    )
    return


@app.cell(expand_output=True)
def tell_loss(story, world):
    story.part("A rank is lost")
    _llm = world.load_several()  # its own, so that the other cells can run again
    _engine = _llm.engine
    _processes = _engine.model_runner._processes
    add(_llm, PROMPT, NUM_TOKENS)
    _engine.step()
    story.say("A request has made its first step. Then rank 1 is killed, and the engine makes the next one:")
    _processes[1].kill()
    _lines = []
    for _ in range(2):
        try:
            _engine.step()
        except RuntimeError as _error:
            _lines.append(f"step() raises RuntimeError: {_error}")
    _num_alive = sum(process.poll() is None for process in _processes)
    _engine.scheduler.check_integrity()  # would raise
    [_seq] = _engine.scheduler.waiting
    story.log(
        *_lines,
        f"ranks that still run: {_num_alive}",
        f"scheduler.check_integrity() finds nothing; waiting: a sequence with {_seq.num_prompt_tokens}+"
        f"{_seq.num_generated_tokens} tokens, {_seq.num_computed_tokens} computed",
    )
    story.say(
        "The scheduler's books are in order: they were rebuilt, as in chapter 2, and the sequence waits with "
        "its tokens. But a part of every layer has gone. The engine has ended, has said who was lost, and has taken "
        "the other ranks with it. To go on, build a new LLM and ask again."
    )
    return


if __name__ == "__main__":
    app.run()
