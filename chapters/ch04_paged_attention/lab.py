import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 4: PagedAttention")

with app.setup(hide_code=True):
    import torch
    from rich.table import Table

    from chapters.ch04_paged_attention import page
    from chapters.ch04_paged_attention.attending import attend
    from chapters.ch04_paged_attention.drawing import draw_contiguous, draw_counters, draw_paged
    from chapters.ch04_paged_attention.memories import (
        BLOCK_SIZE,
        LONGEST,
        MAX_MODEL_LEN,
        NUM_BLOCKS,
        POOL_SLOTS,
        SYSTEM_PROMPT,
        Request,
        TwoMemories,
        make_jobs,
        requests,
        run_contiguous,
        run_paged,
        slots_of,
    )
    from chapters.draw import draw_pool, draw_sequences
    from chapters.lab_notebook import the_story
    from chapters.playing import playground_of, title
    from chapters.stage import Stage
    from nanovllm.core.block_manager import BlockManager
    from nanovllm.core.sequence import Sequence
    from nanovllm.worker.batch import Batch


@app.cell(hide_code=True)
def _():
    title(4)
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
def tell_reserving(story):
    story.part("The same requests, the same memory")
    story.say(
        f"Two memories of {NUM_BLOCKS * BLOCK_SIZE} slots, each slot for the K and V of one token. Requests come one "
        f"after another; the model allows {MAX_MODEL_LEN} tokens, prompt and output together, and nobody knows when an "
        f"answer will end. The contiguous memory reserves {MAX_MODEL_LEN} slots in one piece for each. The paged one "
        f"is the engine's BlockManager with {NUM_BLOCKS} blocks of {BLOCK_SIZE}: blocks for what is there."
    )
    _world = TwoMemories()
    story.log(*(_world.admit() for _ in range(10)))
    story.say(
        "This is the contiguous memory. A capital letter is a stored token, a small one a slot reserved and empty:"
    )
    story.show(draw_contiguous(_world))
    story.say("This is the paged memory:")
    story.show(draw_paged(_world))
    story.say(
        "The columns from tokens to fits count slots. Taken slots belong to a request; empty ones are taken but hold "
        "no token. Fits is the longest request that would still be admitted, and stalls counts how often append_slots "
        "said False."
    )
    story.show(draw_counters(_world))
    return


@app.cell(expand_output=True)
def tell_growing(story):
    story.part("A sequence grows, its table now and then")
    story.say(
        "One sequence of 7 tokens is in a pool that other sequences have used before. Each new token needs a slot, and "
        "every fourth one a new block:"
    )
    _manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE, enable_prefix_caching=False)
    _others = [Sequence([1] * num_tokens) for num_tokens in (4, 48, 8, 20, 4, 40)]
    for _other in _others:
        _manager.allocate_with_prefix(_other)
    for _index in (1, 3, 5, 2, 0, 4):
        _manager.free(_others[_index])
    _seq = Sequence([1] * 7)
    _manager.allocate_with_prefix(_seq)
    _table = Table("what happens", "tokens stored", "block table", "slot of the newest", "head of the free queue")
    for _step in range(7):
        if _step:
            _seq.append(1)
            assert _manager.append_slots(_seq)
        _seq.num_computed_tokens = len(_seq.tokens)
        _block, _offset = divmod(slots_of(_seq)[_seq.num_computed_tokens - 1], BLOCK_SIZE)
        _slot = f"{_block} x {BLOCK_SIZE} + {_offset} = {_block * BLOCK_SIZE + _offset}"
        _blocks, _head = (" ".join(map(str, ids)) for ids in (_seq.block_table, _manager.eviction_candidates(4)))
        _what = "append_slots" if _step else "allocate_with_prefix"
        _table.add_row(_what, str(_seq.num_computed_tokens), _blocks, _slot, _head)
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_holes(story):
    story.part("Reserving less, and the holes that it leaves")
    story.say(
        "A request says how long its answer may become: max_tokens. So contiguous could reserve the prompt and that, "
        "and more fit. Five requests come, and six tokens later two of them have reached their limits:"
    )
    _world = TwoMemories(reserve_longest=False)
    _said = [_world.admit() for _ in range(5)]
    for _ in range(6):
        _world.grow()
    story.log(*_said)
    story.show(draw_contiguous(_world))
    story.say("The next request:")
    story.log(_world.admit())
    story.show(draw_counters(_world))
    _numbers = _world.counters()["contiguous"]
    story.say(
        f"{_numbers['free']} slots are free, but the longest piece has {_numbers['fits']}. A free block has no such "
        "problem: any block will do. More requests come, and the paged memory takes the blocks that the others left, "
        "wherever they lie:"
    )
    story.log(*(_world.admit() for _ in range(5)))
    story.show(draw_paged(_world))
    story.show(draw_sequences(_world.seqs.values(), _world.names))
    return


@app.cell(expand_output=True)
def tell_dry(story):
    story.part("The price: a pool can run dry in the middle")
    story.say(
        "A reservation is a promise that a sequence can grow to its end. The paged memory promised nothing. Nine "
        "requests are in, 3 blocks are free; everybody grows:"
    )
    _world = TwoMemories()
    for _ in range(9):
        _world.admit()

    def _grow(what: str) -> str:
        said = _world.grow() or "everybody has a slot"
        return f"{what}: {said} ({len(_world.manager.free_blocks)} free)"

    story.log(*(_grow(f"token {step}") for step in range(1, 5)))
    story.say(
        "append_slots changed nothing where it said False, so those sequences are as they were, with one token waiting "
        "for its slot. The oldest ends, and its blocks serve the others:"
    )
    story.log(_world.end_oldest(), _grow("one token"), _world.end_oldest(), _grow("one token"))
    story.say("In the engine nobody waits for that: the scheduler takes the blocks of the youngest (chapter 5).")
    return


@app.cell(expand_output=True)
def tell_totals(story):
    _jobs = make_jobs()
    story.part(f"{len(_jobs)} requests to the end")
    _num_tokens = [len(request.prompt) for request, _ in _jobs]
    story.say(
        f"A pool of {POOL_SLOTS:,} slots, max_model_len {LONGEST:,}, {len(_jobs)} requests at once. Prompts have "
        f"{min(_num_tokens)} to {max(_num_tokens):,} tokens, {sum(_num_tokens) / len(_jobs):.0f} on average; answers "
        f"{sum(n for _, n in _jobs) / len(_jobs):.0f} on average, and max_tokens is 128, 256 or 512. In a step "
        "everybody gets a token. The paged rows are the engine's Scheduler and BlockManager, without a model. Shares "
        "of the pool are averages over the steps in which somebody waits."
    )
    _table = Table("", "at once", "tokens", "taken, empty", "free", "steps", "preempted")
    for _title, _totals in (
        ("contiguous, max_model_len", run_contiguous(_jobs, lambda request: LONGEST)),
        ("contiguous, prompt + max_tokens", run_contiguous(_jobs, lambda request: request.limit)),
        ("paged, blocks of 16", run_paged(_jobs, 16)),
    ):
        _table.add_row(_title, *_totals.row(), str(_totals.preempted))
    story.show(_table)
    story.say("This is what the size of a block changes:")
    _table = Table("block size", "at once", "tokens", "taken, empty", "free", "steps", "blocks in a table")
    for _block_size in (1, 4, 16, 64, 256):
        _totals = run_paged(_jobs, _block_size)
        _table.add_row(str(_block_size), *_totals.row(), _totals.blocks_in_a_table())
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_attention(story):
    story.part("Attention does not mind")
    story.say(
        "The same 11 tokens (random q, k, v; 4 query heads, 2 KV heads of 8) are written into a KV tensor of 16 blocks "
        "by the engine's rotary_and_write and read by its paged_attention: the prompt of 10 in one step, then the next."
    )
    _generator = torch.Generator().manual_seed(4)
    _q, _k, _v = (torch.randn(11, heads, 8, generator=_generator) for heads in (4, 2, 2))
    _tables = {"in order": [0, 1, 2], "scattered": [13, 2, 7], "backwards": [15, 14, 13]}
    _results = {_name: attend(block_table, _q, _k, _v) for _name, block_table in _tables.items()}
    _table = Table("block table", "slots of tokens 0 to 9", "of token 10", "same bits")
    for _name, (_out, _prompt, _decode) in _results.items():
        _same = str(torch.equal(_out, _results["in order"][0]))
        _slots = [" ".join(map(str, batch.slot_mapping.tolist())) for batch in (_prompt, _decode)]
        _table.add_row(f"{_name}: {_tables[_name]}", *_slots, _same)
    story.show(_table)
    _wrong = attend([13, 2, 7], _q, _k, _v)[0], attend([2, 13, 7], _q, _k, _v)[0]
    story.say(
        "The numbers are the same to the last bit: first the blocks are gathered in the order of the table, and from "
        "there on nobody can tell where they lay. Even a table in a different order gives the same, as long as writing "
        f"and reading go by the same table: [13, 2, 7] and [2, 13, 7] are equal: {torch.equal(*_wrong)}."
    )
    return


@app.cell(expand_output=True)
def tell_sharing(story):
    story.part("Shared blocks are counted")
    story.say(
        "Prefix caching is on. A and B have the same prompt of 10 tokens; C begins with the same 8 and goes on in its "
        "own way. Only full blocks are shared; +2 means that two more sequences have the block in their tables:"
    )
    _first = requests()[0]
    _world = TwoMemories(12, caching=True, source=[_first, _first, Request([*SYSTEM_PROMPT, 70, 71, 72], 9)])
    for _ in range(3):
        _world.admit()
    story.show(draw_pool(_world.manager, _world.seqs.values(), _world.names))
    story.show(draw_sequences(_world.seqs.values(), _world.names))
    _table = Table("", *(f"block {i}" for i in range(5)), "free queue", title="reference counts", title_style="dim")
    for _what in ("all three run", "A ends", "B ends", "C ends"):
        if _what.endswith("ends"):
            _world.end_oldest()
        _refs = [str(block.ref_count) for block in _world.manager.blocks[:5]]
        _table.add_row(_what, *_refs, " ".join(map(str, _world.manager.free_blocks)))
    story.show(_table)
    story.say(
        "Blocks 0 and 1 still have their hashes: a later request can find them. So they went to the tail, to be taken "
        "last; the others have no hash, and went to the head."
    )
    story.show(draw_pool(_world.manager, [], _world.names))
    return


@app.cell(expand_output=True)
def tell_no_copies(story):
    story.part("Nobody writes into a shared block")
    story.say(
        "The engine's Scheduler and Batch work with blocks of 4. Y repeats X's prompt of 10 tokens, Z only its first "
        "8. The table shows the slots that a step writes; -1 is not written:"
    )
    _stage, _prompt = Stage(16, max_model_len=MAX_MODEL_LEN), list(range(10))
    _table = Table("", "block table", "found", "computes", "slots written")
    for _name, _tokens in (("X", _prompt), ("Y", _prompt), ("Z", _prompt[:8])):
        _seq = _stage.add(_tokens)
        _output = _stage.schedule()
        _chunk = _output.chunks[-1]
        _slots = Batch.from_scheduler_output(_output, BLOCK_SIZE).slot_mapping[-(_chunk.end - _chunk.start) :].tolist()
        _positions = f"{_chunk.start}" if _chunk.end - _chunk.start == 1 else f"{_chunk.start} to {_chunk.end - 1}"
        _blocks = " ".join(map(str, _seq.block_table))
        _table.add_row(_name, _blocks, str(_seq.num_cached_tokens), _positions, " ".join(map(str, _slots)))
        _stage.finish(_output)
    story.show(_table)
    story.say(
        "Y computes positions 8 and 9 again and writes them into a block of its own. Z has nothing left to write: it "
        "computes its last token once more, for the logits, and leaves the block as it is."
    )
    return


if __name__ == "__main__":
    app.run()
