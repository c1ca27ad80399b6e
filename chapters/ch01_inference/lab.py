import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 1: What is LLM inference?")

with app.setup(hide_code=True):
    import math

    import torch
    from rich.markup import escape
    from torch import Tensor

    from chapters.ch01_inference.lab_parts import (
        H100_BYTES_PER_S,
        H100_FLOPS,
        ONE_TOKEN,
        attend,
        attention_watched,
        count_parameters,
        next_logits_of,
        piece,
        table,
        weights_read,
    )
    from chapters.lab_notebook import the_story
    from chapters.playing import title
    from chapters.published import PUBLISHED, published_config
    from chapters.story import stopwatch
    from nanovllm import SamplingParams
    from nanovllm.checkpoint import ModelConfig


@app.cell(hide_code=True)
def _():
    title(1, playable=False)
    return


@app.cell(hide_code=True)
def begin():
    story = the_story()
    return (story,)


@app.cell
def settings():
    PROMPT = "Tokenization splits unbelievable words"
    QUESTION = "The capital of France is"
    NUM_TOKENS = 7
    BF16 = 2  # bytes
    BYTES_TO_TRAIN = 16  # a parameter: weight and gradient in bf16, and in float32 a copy and Adam's two averages
    BATCH_SIZES = (1, 4, 16, 64)
    CONTEXTS = (1_024, 8_192, 32_768, 131_072)
    BAR = 44
    return (BAR, BATCH_SIZES, BF16, BYTES_TO_TRAIN, CONTEXTS, NUM_TOKENS, PROMPT, QUESTION)


@app.cell
def _(story):
    llm = story.load(dtype="float32", max_model_len=256, num_gpu_blocks_override=32, enable_prefix_caching=False)
    name = story.model.rstrip("/").rsplit("/", 1)[-1]
    config: ModelConfig = llm.engine.model_config
    return config, llm, name


@app.cell(expand_output=True)
def tell_tokens(PROMPT, config: ModelConfig, llm, story):
    story.part("Text in pieces")
    _token_ids = llm.get_tokenizer()(PROMPT).input_ids
    story.say(
        f"The model never sees text. The tokenizer cuts it into pieces of a vocabulary of {config.vocab_size:,}, and "
        "each piece has a number, its token id. A space belongs to the piece that follows it."
    )
    _shown = table("position", "piece", "token id", left=2)
    for _position, _token_id in enumerate(_token_ids):
        _shown.add_row(str(_position), piece(llm, _token_id), str(_token_id))
    story.show(_shown)
    story.say(f"{len(PROMPT.split())} words, {len(PROMPT)} characters, {len(_token_ids)} tokens.")
    return


@app.cell(expand_output=True)
def tell_loop(NUM_TOKENS, PROMPT, llm, story):
    story.part("One token at a time")
    story.say(
        "At each step the model gives every token of the vocabulary a score. Here are the five best, as probabilities. "
        "Greedy decoding takes the first, appends it, and asks again."
    )
    _shown = table("step", "the five best, with their probabilities", left=2)
    _before = llm.stats()
    for _output in llm.stream(PROMPT, SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=5)):
        _completion = _output.outputs[0]
        assert _completion.logprobs is not None
        _best = sorted(_completion.logprobs[-1].items(), key=lambda item: item[1].rank)
        _first, *_others = (f"{piece(llm, t)} {math.exp(entry.logprob):.0%}" for t, entry in _best)
        _shown.add_row(str(len(_completion.token_ids)), "  ".join([f"[bold]{_first}[/]", *_others]))
    story.show(_shown)
    _after = llm.stats()
    story.say(f"The text is now: {escape(PROMPT)}[bold]{escape(_completion.text)}[/]")
    _num_prompt, _num_decoded = (_after[n] - _before[n] for n in ("num_prefill_tokens", "num_decode_tokens"))
    story.say(
        f"The engine sent {_num_prompt} prompt tokens through the model at once, then {_num_decoded} tokens one by "
        f"one: {_num_prompt + _num_decoded} in all. The last token that it chose was never sent through."
    )
    generated = _completion.token_ids
    return (generated,)


@app.cell(expand_output=True)
def tell_loop_without_memory(NUM_TOKENS, PROMPT, generated, llm, story):
    story.part("The same loop, with nothing remembered")
    _next_logits, _token_ids = next_logits_of(llm), llm.get_tokenizer()(PROMPT).input_ids
    _num_prompt, _before = len(_token_ids), llm.stats()
    for _ in range(NUM_TOKENS):
        _token_ids.append(int(_next_logits(_token_ids).argmax()))
    _num_sent = llm.stats()["num_prefill_tokens"] - _before["num_prefill_tokens"]
    _same = "the same tokens" if _token_ids[_num_prompt:] == generated else "different tokens"
    _lengths = " + ".join(str(_num_prompt + i) for i in range(3))
    story.say(
        "Now a loop of three lines: it asks the engine's model for the scores of the whole text so far, takes the best "
        f"and appends it. It gets {_same}, and sent {_lengths} + ... = {_num_sent} tokens through the model. "
        "Chapter 3 explains what the engine remembers between steps, and where."
    )
    return


@app.cell(expand_output=True)
def tell_heads(BAR, QUESTION, config: ModelConfig, llm, story):
    story.part("What the last token looks at")
    _token_ids = llm.get_tokenizer()(QUESTION).input_ids
    with attention_watched(llm) as _layers:
        llm.generate([QUESTION], ONE_TOKEN, False)
    _group, _last = config.num_attention_heads // config.num_key_value_heads, len(_token_ids) - 1
    _found: dict[tuple[int, int], tuple[list[float], ...]] = {}
    for _number, (_q, _k, _v, *_) in enumerate(_layers):
        for _head in range(config.num_attention_heads):
            _of_head = (x[:, _head // _group].tolist() for x in (_k, _v))
            _found[_number, _head] = attend(_q[_last, _head].tolist(), *_of_head)
    story.say(
        f'"{escape(QUESTION)}" has {len(_token_ids)} tokens, and the model {config.num_hidden_layers} layers of '
        f"{config.num_attention_heads} heads. When the last token, {piece(llm, _token_ids[_last])}, goes through, each "
        "head spreads its attention over the tokens so far. The table shows, for each of these tokens, the head that "
        "looks at it most:"
    )
    _shown = table("looks at", "layer", "head", *(piece(llm, t) for t in _token_ids))
    _looks_at = {}
    for _position in range(len(_token_ids)):
        _looks_at[_position] = max(_found, key=lambda at: _found[at][1][_position])
        _number, _head = _looks_at[_position]
        _shares = (f"{_weight:.1%}" for _weight in _found[_number, _head][1])
        _shown.add_row(piece(llm, _token_ids[_position]), str(_number), str(_head), *_shares)
    story.show(_shown)

    story.part("One head, by hand")
    _number, _head = _looks_at[_last - 1]
    _dots, _weights, _mix = _found[_number, _head]
    _q, _k, _v, _by_torch, _by_engine = _layers[_number]
    story.say(
        f"Layer {_number}, head {_head}: a query of {config.head_dim} numbers, {len(_token_ids)} keys and as many "
        f"values. {_group} neighboring query heads share a KV head: query head {_head} reads KV head {_head} // "
        f"{_group} = {_head // _group}. Each dot product is divided by the square root of {config.head_dim}, and a "
        "softmax turns them into shares."
    )
    _shown = table("position", "token", "q · k", "divided", "weight", "", left=2)
    _shown.columns[-1].justify = "left"
    for _position, (_dot, _weight) in enumerate(zip(_dots, _weights, strict=True)):
        _scaled = _dot / math.sqrt(config.head_dim)
        _numbers = f"{_dot:.1f}", f"{_scaled:.2f}", f"{_weight:.1%}"
        _shown.add_row(str(_position), piece(llm, _token_ids[_position]), *_numbers, "█" * round(_weight * BAR))
    story.show(_shown)
    story.say("The output is the sum of the values with these weights. Its first numbers, and the engine's:")
    _shown = table("computed by", "number 0", "number 1", "number 2", "gap in any head")
    _mixes = torch.tensor([[_found[n, h][2] for h in range(config.num_attention_heads)] for n in range(len(_layers))])
    _shown.add_row("hand, in Python", *(f"{x:.3f}" for x in _mix[:3]), "")
    _engines: tuple[tuple[str, Tensor, int], ...] = (
        ("attention.py", _by_torch, 3),
        ("the engine, here", _by_engine, 4),
    )
    for _by, _out, _index in _engines:
        _gap = float((torch.stack([layer[_index][_last] for layer in _layers]).cpu() - _mixes).abs().max())
        _first = (f"{x:.3f}" for x in _out[_last, _head, :3].tolist())
        _shown.add_row(_by, *_first, "below 0.0001" if _gap < 1e-4 else f"{_gap:.4f}")
    story.show(_shown)
    return


@app.cell(expand_output=True)
def tell_weights(BF16, BYTES_TO_TRAIN, config: ModelConfig, name, story):
    story.part("Where the weights are")
    _counts = count_parameters(config)
    _total = sum(_counts.values())
    _shown = table("part", "numbers", "share", "MB in bf16")
    for _part, _count in _counts.items():
        if _count:
            _shown.add_row(_part, f"{_count:,}", f"{_count / _total:.1%}", f"{_count * BF16 / 1e6:,.1f}")
    _shown.add_row("[bold]all[/]", f"{_total:,}", "100.0%", f"{_total * BF16 / 1e6:,.1f}")
    story.show(_shown)
    story.say(
        f"These numbers never change while {name} answers: inference needs {_total * BF16 / 1e6:,.0f} MB for them. "
        f"To train it with Adam takes {BYTES_TO_TRAIN} bytes a parameter instead of {BF16}: "
        f"{_total * BYTES_TO_TRAIN / 1e6:,.0f} MB, before a single intermediate result is kept for the gradients."
    )
    return


@app.cell(expand_output=True)
def tell_bottlenecks(BATCH_SIZES, BF16, config: ModelConfig, llm, name, story):
    story.part("Two bottlenecks: reading weights, multiplying them")
    _num_read = weights_read(config)
    story.say(
        "One step reads every weight once, however many tokens it computes. For each token it does one multiplication "
        "and one addition per weight (in the last product, which gives the logits, for the last token only). "
        f"{name} in float32, one step through the engine, the better of two runs:"
    )
    _shown = table("tokens in the step", "weights read, MB", "arithmetic, GFLOP", "the step took", "a token took")
    _vocab_size, _num_head = config.vocab_size, config.vocab_size * config.hidden_size
    for _num_tokens in BATCH_SIZES:
        _prompt = [(i * 7919 + 11) % _vocab_size for i in range(_num_tokens)]
        _step_ms = 1e3 * min(stopwatch(lambda: llm.generate([_prompt], ONE_TOKEN, False)) for _ in range(2))  # noqa: B023
        _sizes = f"{_num_read * 4 / 1e6:,.0f}", f"{2 * ((_num_read - _num_head) * _num_tokens + _num_head) / 1e9:,.1f}"
        _times = f"{_step_ms:8.1f} ms (measured)", f"{_step_ms / _num_tokens:.2f} ms"
        _shown.add_row(str(_num_tokens), *_sizes, *_times)
    story.show(_shown)
    story.say(
        "The same two numbers for one token of well-known models in bf16, on an H100, which by its data sheet reads "
        f"{H100_BYTES_PER_S / 1e12:.2f} TB/s and computes {H100_FLOPS / 1e12:.0f} TFLOP/s:"
    )
    _shown = table("model", "parameters", "read, GB", "reading takes", "GFLOP", "arithmetic takes", "ratio")
    for _other, _sizes_of in {name: config, **{n: published_config(n) for n in PUBLISHED}}.items():
        _total, _num_read = sum(count_parameters(_sizes_of).values()), weights_read(_sizes_of)
        _read_ms, _compute_ms = _num_read * BF16 / H100_BYTES_PER_S * 1e3, 2 * _num_read / H100_FLOPS * 1e3
        _read = f"{_num_read * BF16 / 1e9:.2f}", f"{_read_ms:.3f} ms"
        _compute = f"{2 * _num_read / 1e9:.2f}", f"{_compute_ms:.4f} ms"
        _shown.add_row(_other, f"{_total / 1e9:.3f} B", *_read, *_compute, f"{_read_ms / _compute_ms:.0f}")
    story.show(_shown)
    story.say(
        "Reading takes longer by the same factor for all models: the ratio of the machine's two rates. Not counted as "
        "read is an embedding table that does not also give the logits: a token needs only one row of it."
    )
    return


@app.cell(expand_output=True)
def tell_context(BAR, BF16, CONTEXTS, config: ModelConfig, llm, name, story):
    story.part("What a long context costs")
    _pool = llm.stats()["kv_pool"]
    _num_tokens, _per_token = _pool["num_blocks"] * _pool["block_size"], config.kv_bytes_per_token(4)
    story.say(
        "Each token leaves a key and a value in every layer, for the tokens that come after it. This engine has room "
        f"for {_num_tokens} tokens: {_num_tokens} x {_per_token:,} bytes = {_num_tokens * _per_token:,}, and the "
        f"tensor that it made has {_pool['num_bytes']:,} bytes. In bf16 a token takes half of that. In GB:"
    )
    _shown = table("model", "bytes/token", *(f"{_context // 1024}k" for _context in CONTEXTS), "weights", "equal at")
    for _other, _sizes_of in {name: config, **{n: published_config(n) for n in PUBLISHED}}.items():
        _per_token, _weights = _sizes_of.kv_bytes_per_token(BF16), sum(count_parameters(_sizes_of).values()) * BF16
        _cells = (f"{_context * _per_token / 1e9:.2f}" for _context in CONTEXTS)
        _shown.add_row(_other, f"{_per_token:,}", *_cells, f"{_weights / 1e9:.2f}", f"{_weights // _per_token:,}")
    story.show(_shown)
    story.say(
        "Equal at: the number of tokens, of one user or of many, whose keys and values take as much memory as the "
        "model. Whether a model has learned to use so long a text is another matter.\n\n"
        f"{name}, one conversation that grows (█ weights, ▒ keys and values):"
    )
    _per_token, _weights = config.kv_bytes_per_token(BF16), sum(count_parameters(config).values()) * BF16
    _unit = (_weights + CONTEXTS[-1] * _per_token) / (BAR + 30)
    _shown = table("tokens", "MB", "", left=0)
    _shown.columns[-1].justify = "left"
    for _context in (0, *CONTEXTS):
        _kv_bytes = _context * _per_token
        _bar = "█" * max(1, round(_weights / _unit)) + "▒" * round(_kv_bytes / _unit)
        _shown.add_row(f"{_context:,}", f"{(_weights + _kv_bytes) / 1e6:,.0f}", _bar)
    story.show(_shown)
    return


if __name__ == "__main__":
    app.run()
