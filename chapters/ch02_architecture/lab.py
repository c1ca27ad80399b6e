import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 2: Architecture")

with app.setup(hide_code=True):
    import signal
    import subprocess
    import sys
    from contextlib import suppress
    from itertools import count
    from typing import Any

    from rich.markup import escape
    from rich.pretty import pretty_repr
    from rich.table import Table

    from chapters.ch02_architecture.lab_parts import CONTROL_PLANE_ALONE, ROOT, Tap, repr_of, spaced, steps_table
    from chapters.lab_notebook import the_story
    from chapters.patching import replaced
    from chapters.playing import title
    from chapters.story import WIDTH
    from nanovllm import SamplingParams
    from nanovllm.core import sequence


@app.cell(hide_code=True)
def _():
    title(2, playable=False)
    return


@app.cell(hide_code=True)
def begin():
    story = the_story()
    story.enter(replaced(sequence, "_next_seq_id", count()))
    return (story,)


@app.cell
def settings():
    PROMPT = "The capital of France is"
    OTHER_PROMPT = "Once upon a time"
    return OTHER_PROMPT, PROMPT


@app.cell
def _(story):
    llm = story.load(dtype="float32", max_model_len=128, max_num_seqs=8, num_gpu_blocks_override=64, block_size=16)
    return (llm,)


@app.cell(expand_output=True)
def show_layers(llm, story):
    story.part("Four layers, as objects")
    _engine, _manager, _runner = llm.engine, llm.engine.block_manager, llm.engine.model_runner
    _config = _engine.model_config
    _table = Table("layer", "object", "its file", "what it holds", show_edge=False)
    _queues = f"waiting: {len(_engine.scheduler.waiting)}, running: {len(_engine.scheduler.running)}"
    _layers = (
        ("1 API", llm, "calls of threads, one after another"),
        ("2 engine loop", _engine, f"requests: {len(_engine.requests)}; a tokenizer"),
        ("3 scheduler", _engine.scheduler, _queues),
        ("  block manager", _manager, f"{len(_manager.blocks)} blocks of {_manager.block_size} tokens, as numbers"),
        ("4 model runner", _runner, f"{_config.num_hidden_layers} layers, a vocabulary of {_config.vocab_size:,}"),
    )
    for _layer, _thing, _holds in _layers:
        _file = type(_thing).__module__.replace("nanovllm.", "").replace(".", "/") + ".py"
        _table.add_row(_layer, type(_thing).__name__, _file, _holds)
    story.show(_table)
    _weights, _pool = _runner.weight_bytes / 1e6, _engine.kv_pool.num_bytes / 1e6
    story.say(
        f"Only the last one holds tensors: {_weights:,.0f} MB of weights and {_pool:,.1f} MB of KV cache, in float32 "
        "for this lab. The block manager speaks of the same blocks, and to it they are numbers in a list."
    )
    return


@app.cell(expand_output=True)
def show_request(PROMPT, llm, story):
    story.part("A prompt becomes a request")
    _engine = llm.engine
    _params = SamplingParams(temperature=0, stop=["\n"])
    _request = _engine.make_request(PROMPT, _params, stream=True)
    _tokenizer = llm.get_tokenizer()
    story.say(
        f"make_request({PROMPT!r}, {escape(repr_of(_params))}) checks everything, then cuts the text into tokens:"
    )
    _table = Table("token id", "text", show_edge=False)
    for _token_id in _request.prompt_token_ids:
        _table.add_row(str(_token_id), escape(repr(_tokenizer.decode([_token_id]))))
    story.show(_table)
    [_sample] = _request.samples
    _seq = _sample.seq
    story.say(
        f"The Request has {len(_request.samples)} Sample, which has a Sequence and a Detokenizer (one of each for "
        f"every sample, n={_params.n}):\n\n  {escape(repr(_seq))}\n\n"
        f"In the scheduler's queue so far: {len(_engine.scheduler.waiting)} sequences."
    )
    [_request_id] = _engine.enqueue([_request])
    story.say(
        f"enqueue() gives it the id {_request_id!r}, writes this id into sequence {_seq.seq_id}, and puts the "
        f"sequence into the queue: {len(_engine.scheduler.waiting)} waiting. Nothing has been computed."
    )
    request = _request
    return (request,)


@app.cell(expand_output=True)
def show_first_step(llm, request, story):
    story.part("The first step, hand-off by hand-off")
    _step, _tokenizer = Tap(llm.engine).step(), llm.get_tokenizer()
    story.say("[bold]engine.step()[/] is called once. Inside it:")
    story.say("[bold]a. scheduler.schedule()[/] chooses the work. The whole prompt fits into one step:")
    story.say(escape(_step.scheduled))
    story.say(
        f"chunk.reaches_end is {_step.samples[0]}: it ends where the known tokens end, so a token will come of it."
    )
    story.say(
        "[bold]b. pack()[/] turns that into arrays. From here on there are no requests and no sequences, only numbers:"
    )
    story.say(escape(pretty_repr(_step.batch, max_width=WIDTH)))
    story.say(escape(pretty_repr(_step.sampling, max_width=WIDTH)))
    _shape = list(_step.logits.shape)
    story.say(
        f"[bold]c. model_runner.run()[/] computes the model for all {len(_step.batch.input_ids)} tokens at once. "
        f"Logits are made for the rows in logits_rows only, so their shape is {escape(str(_shape))}. These are the "
        "highest of the row:"
    )
    _table = Table("token id", "text", "logit", show_edge=False)
    _values, _ids = _step.logits[0].topk(3)
    for _token_id, _value in zip(_ids.tolist(), _values.tolist(), strict=True):
        _table.add_row(str(_token_id), escape(repr(_tokenizer.decode([_token_id]))), f"{_value:.2f}")
    story.show(_table)
    story.say(
        f"temperature is 0, so the sampler takes the highest. run() returns the token ids of each chunk: "
        f"{escape(str(_step.sampled_token_ids))}."
        "\n\n[bold]d. scheduler.update()[/] appends it to the sequence and asks whether that was the end. The "
        "detokenizer, which looks for the stop string, is asked, too:"
    )
    story.say(f"  {escape(_step.after_update[0])}")
    [_sample] = request.samples
    _seq = _sample.seq
    story.say(
        f"Sequences that ended: {escape(str(_step.ended))}. {len(_seq.tokens)} tokens are known now and "
        f"{_seq.num_computed_tokens} are computed: one behind. As text the token is "
        f"{escape(repr(_sample.detokenizer.text))}.\n\n[bold]e. request.add_tokens()[/] counts the token, and takes in "
        "its logprobs if the request asks for them. Without a stop string, only this gives it to the detokenizer."
    )
    [_output] = _step.outputs
    story.say("[bold]f.[/] The request is streamed, so the step returns an output for it, with this CompletionOutput:")
    story.say(escape(pretty_repr(_output.outputs[0], max_width=WIDTH)))
    _metrics = _output.metrics
    story.say(
        f"It waited {1e3 * (_metrics.queue_time_s or 0):.1f} ms for its first step; its first token was there after "
        f"{1e3 * (_metrics.ttft_s or 0):.1f} ms.",
        measured=True,
    )
    return


@app.cell(expand_output=True)
def show_other_steps(llm, story):
    story.part("The other steps: the same hand-offs, different numbers")
    _engine, _tap = llm.engine, Tap(llm.engine)
    while _engine.has_unfinished_requests():
        _tap.step()
    story.show(steps_table(llm, _tap.steps, 2))
    story.say(
        "Each step computes one token, the one sampled before: its K and V go into the next slot, and it attends to "
        "all tokens so far (seqlens_k). The prompt is not computed again."
    )
    _last = _tap.steps[-1]
    _completion = _last.outputs[0].outputs[0]
    _found = "its text, which ends with the stop string" if isinstance(_completion.stop_reason, str) else "its tokens"
    story.say(f"Sequences that ended in the last update(): {escape(str(_last.ended))}. The end was seen in {_found}.")
    story.say(escape(pretty_repr(_completion, max_width=WIDTH)))
    _free, _num_blocks = len(_engine.block_manager.free_blocks), len(_engine.block_manager.blocks)
    story.say(
        f"The engine has forgotten the request: {len(_engine.requests)} requests, {_free} of {_num_blocks} blocks free."
    )
    return


@app.cell(expand_output=True)
def show_two_requests(OTHER_PROMPT, PROMPT, llm, story):
    story.part("Two requests in one batch")
    _engine, _tap = llm.engine, Tap(llm.engine)
    _engine.add_request("A", OTHER_PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), stream=False)
    _tap.step()
    story.say(
        f"Request A, {OTHER_PROMPT!r}, has made its first step. Now B, {PROMPT!r}, comes in, with temperature 0.8:"
    )
    _params = SamplingParams(temperature=0.8, seed=1, max_tokens=2, ignore_eos=True)
    _engine.add_request("B", PROMPT, _params, stream=False)
    while _engine.has_unfinished_requests():
        _tap.step()
    _beside_b = _tap.steps[-1].outputs[0].outputs[0].token_ids
    story.show(steps_table(llm, _tap.steps, 1))
    _both = _tap.steps[1]
    story.say("Step 2 has a decode of A and the whole prompt of B, one after another in the same arrays:")
    story.say(escape(pretty_repr(_both.batch, max_width=WIDTH)))
    story.say(
        f"Two rows are sampled, of these row {spaced(_both.sampling.random_rows.tolist())} at random, with the number "
        f"{_both.sampling.noise.item():.4f}, which follows from seed, sample and position alone. B ended before A, "
        "though it came later, and left the batch."
    )
    [_alone] = llm.generate(OTHER_PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    _tokens = _alone.outputs[0].token_ids
    story.say(f"Alone, A gets the tokens {escape(str(_tokens))}; beside B it got {escape(str(_beside_b))}.")
    return


@app.cell(expand_output=True)
def show_errors(llm, story):
    story.part("A mistake in a request")
    _prompts: list[Any] = ["fine", "", [5] * 200, {"promt": "hello"}]
    try:
        llm.generate(_prompts, SamplingParams(max_tokens=4), use_tqdm=False)
    except ValueError as _error:
        story.say(f"generate() of four prompts, three of them wrong, raises one ValueError:\n\n{escape(str(_error))}")
    story.say(f"Requests queued: {len(llm.engine.requests)}, the good one included.")
    return


@app.cell(expand_output=True)
def show_failure(OTHER_PROMPT, PROMPT, llm, story):
    story.part("A step that fails")
    _engine = llm.engine
    _engine.add_request("C", OTHER_PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), stream=False)
    _engine.step()
    [_seq] = _engine.scheduler.running
    story.say(f"After step 1, running:  {escape(repr(_seq))}")

    def _fails(*work: Any) -> Any:
        raise RuntimeError("the data plane is out of order")

    with replaced(_engine.model_runner, "run", _fails):
        try:
            _engine.step()
        except RuntimeError as _error:
            story.say(f"Step 2 raises RuntimeError: {_error}")
    [_seq] = _engine.scheduler.waiting
    story.say(f"After step 2, waiting:  {escape(repr(_seq))}")
    _engine.scheduler.check_integrity()
    _tap = Tap(_engine)
    while _engine.has_unfinished_requests():
        _tap.step()
    story.say(
        "It keeps its tokens and has given back its blocks. check_integrity() finds nothing wrong. The next steps "
        "follow:"
    )
    story.show(steps_table(llm, _tap.steps, 3))

    _params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    _engine.add_request("D", OTHER_PROMPT, _params, stream=False)
    with (
        replaced(_engine, "restart", lambda: None),
        replaced(_engine.model_runner, "run", _fails),
        suppress(RuntimeError),
    ):
        _engine.step()
    _engine._needs_restart = False  # otherwise the next change would begin with restart()
    [_seq] = _engine.scheduler.running
    story.say("Now an experiment: the same failure in the first step of D, with restart() taken out. Then E comes in.")
    story.say(f"After step 1, running:  {escape(repr(_seq))}")
    _engine.add_request("E", PROMPT, _params, stream=False)
    _tap = Tap(_engine)
    _tap.step()
    story.show(steps_table(llm, _tap.steps, 2))
    story.say(
        "D counts as computed, so its chunk is empty, and the row before the end of an empty chunk is somebody else's: "
        f"D, {OTHER_PROMPT!r}, is given the token of E. No error, and a wrong answer."
    )
    assert llm.reset_prefix_cache()
    return


@app.cell(expand_output=True)
def show_ctrl_c(OTHER_PROMPT, PROMPT, llm, story):
    story.part("Ctrl-C in the middle of a step")
    _engine, _run = llm.engine, llm.engine.model_runner.run
    _num_steps, _began = _engine.stats.num_steps, []

    def _interrupted_run(*work: Any) -> Any:
        _began.append(work)
        if len(_began) == 2:
            signal.raise_signal(signal.SIGINT)  # what Ctrl-C sends
        return _run(*work)

    _handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with replaced(_engine.model_runner, "run", _interrupted_run):
            llm.generate([PROMPT, OTHER_PROMPT], SamplingParams(temperature=0, ignore_eos=True), use_tqdm=False)
    except KeyboardInterrupt:
        story.say(
            f"The signal came while step {len(_began)} computed. Steps begun: {len(_began)}, steps completed: "
            f"{_engine.stats.num_steps - _num_steps}. Then generate() raised KeyboardInterrupt."
        )
    finally:
        signal.signal(signal.SIGINT, _handler)
    _engine.scheduler.check_integrity()
    _free, _num_blocks = len(_engine.block_manager.free_blocks), len(_engine.block_manager.blocks)
    story.say(f"Its requests are gone: {len(_engine.requests)} left, {_free} of {_num_blocks} blocks free.")
    [_output] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    story.say(f"And the engine answers the next one: {_output.outputs[0].text!r}")
    return


@app.cell(expand_output=True)
def show_control_plane_alone(story):
    story.part("The control plane where there is no torch")
    story.say("A fresh Python process in which torch cannot be imported runs the real scheduler, with made-up tokens:")
    _command = [sys.executable, "-c", CONTROL_PLANE_ALONE]
    _result = subprocess.run(_command, capture_output=True, text=True, cwd=ROOT, check=True)
    story.say(escape(_result.stdout.strip()))
    story.say(
        "Each line but the last is a step: the chunks (start, end, does it sample), and the sequence after it. A "
        "budget of 8 tokens cuts the prompt of 10 in two. The last line says that the model runner "
        "cannot even be imported."
    )
    return


if __name__ == "__main__":
    app.run()
