import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 3: The KV cache")

with app.setup(hide_code=True):
    import torch
    from rich.text import Text

    from chapters.ch03_kv_cache.lab_parts import (
        ACTIONS,
        BLOCK_SIZE,
        NUM_BLOCKS,
        CacheWorld,
        draw_bytes,
        draw_step,
        draw_steps,
        load_world,
        time_contexts,
        time_generation,
        timing_llm,
    )
    from chapters.lab_notebook import the_story
    from chapters.playing import playground, start_button, title
    from chapters.slots import in_slots


@app.cell(hide_code=True)
def _():
    title(3)
    return


@app.cell(hide_code=True)
def play_it():
    player, turn = playground(lambda: load_world(the_story().load), CacheWorld.panels, ACTIONS)
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
    return (story,)


@app.cell
def _(story):
    world = load_world(story.load)
    config, data = world.engine.model_config, world.cache.data
    k_cache, v_cache = world.cache.layers[0]
    return config, data, k_cache, v_cache, world


@app.cell(expand_output=True)
def _(config, data, k_cache, story, v_cache):
    story.part("One tensor")
    story.say(
        f"The model has {config.num_hidden_layers} layers. In each a token has {config.num_attention_heads} query "
        f"heads and {config.num_key_value_heads} key and value heads of {config.head_dim} numbers. The pool of this "
        f"lab has {NUM_BLOCKS} blocks of {BLOCK_SIZE} slots, and all of it is one tensor of {data.dtype}:"
    )
    _shapes = {"kv_cache.data": data, "layers[0], K": k_cache, "layers[0], V": v_cache}
    story.show(Text("\n".join(f"{name}   {list(x.shape)} = {x.nbytes:,} bytes" for name, x in _shapes.items())))
    _per_token = config.kv_bytes_per_token(data.dtype.itemsize)
    story.say(
        f"kv_bytes_per_token says {_per_token:,}; times {NUM_BLOCKS * BLOCK_SIZE} slots that is "
        f"{_per_token * NUM_BLOCKS * BLOCK_SIZE:,} bytes."
    )
    return


@app.cell(expand_output=True)
def _(k_cache, story, v_cache, world):
    story.part("A prompt goes in")
    _prompt = world.engine.tokenizer.decode(world.seqs[0].tokens)
    story.say(f"Request A asks {_prompt!r}. One step computes all of its tokens:")
    world.step()
    story.show(draw_step(world.last))
    _layer_0, _rows = world.layer_0, world.last.rows
    story.say("The table shows what layer 0 made of these tokens, and what of it is in the tensor afterwards:")
    story.show(Text("\n".join(f"{name}   {list(x.shape)}" for name, x in _layer_0.items())))
    _row = _rows[-1]
    _block_id, _offset = divmod(_row.slot, BLOCK_SIZE)
    _stored = (cache[_block_id, _offset] for cache in in_slots((k_cache, v_cache), world.runner.kernels))
    _same = all(torch.equal(x, _layer_0[name][-1]) for name, x in zip("kv", _stored, strict=True))
    story.say(
        f"k and v of {_row.token!r} lie in slot {_row.slot}, that is block {_block_id}, offset {_offset}, number for "
        f"number: {_same}. q was used once and is gone."
    )
    return


@app.cell(expand_output=True)
def _(story, world):
    story.part("One token, one slot")
    while len(world.last.tables["A"]) < 3:
        world.step()
    story.say("From here on each step computes the token that the step before it has sampled, and writes one slot:")
    story.show(draw_steps(world.steps[1:]))
    _now = f"The pool now, a line for each block (* written in step {world.last.number}):"
    story.say(f"The last of them begins a block. {_now}")
    story.show(world.draw_slots())
    return


@app.cell(expand_output=True)
def _(story, world):
    story.part("Another prompt with the same beginning")
    story.say(world.prompt())
    world.step()
    story.show(draw_step(world.last))
    _found = world.seqs[-1].num_cached_tokens
    story.say(
        f"The first {_found} tokens of B were found in a block of A. They are not computed, so they are no rows of "
        "this Batch and have no slots in it. B's table names A's block, and B's own tokens go elsewhere: after "
        "those that they share, A and B have the same positions and different slots."
    )
    story.show(world.draw_slots())
    return


@app.cell(expand_output=True)
def _(story, world):
    story.part("A prompt that is all there: slot -1")
    story.say(world.prompt())
    world.step()
    story.show(draw_step(world.last))
    story.say(
        "All of C's tokens are in the cache. Its last one is computed all the same, because the model must say what "
        "comes next, and only a computed row has logits. Its K and V are in a shared block already: slot -1, write "
        "nothing."
    )
    world.step()
    story.show(draw_step(world.last))
    story.say(f"One step later C writes into a block of its own. {len(world.last.rows)} sequences, as many slots.")
    return


@app.cell(expand_output=True)
def _(story):
    story.part("With the cache and without it")
    _llm = timing_llm(story.model)
    _table, _same = time_generation(_llm)
    story.say(
        "The same generation runs twice, on one core. Without the cache, every token is a fresh request over "
        "all tokens so far."
    )
    story.show(_table)
    story.say(f"Both gave the same tokens: {_same}.", measured=True)
    story.say(
        "The table shows what one more token after a context costs, in tokens that are computed and in milliseconds:"
    )
    story.show(time_contexts(_llm))
    return


@app.cell(expand_output=True)
def _(config, story):
    story.part("Bytes for one token")
    story.say(
        "The table shows the bytes that K and V of one token take over all layers, at 2 bytes a number. Heads: query "
        "heads and KV heads, as the model is. MHA: if each query head had a KV head of its own. MQA: if all shared "
        "one. The last column is what one sequence of 8,192 tokens takes."
    )
    story.show(draw_bytes(config, story.model))
    return


if __name__ == "__main__":
    app.run()
