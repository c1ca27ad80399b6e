import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium", app_title="Lab 7: Prefix caching")

with app.setup(hide_code=True):
    import statistics
    import time
    from pathlib import Path
    from tempfile import TemporaryDirectory
    from typing import Any

    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from chapters.ch07_prefix_caching import faults, page
    from chapters.ch07_prefix_caching.beyond import ORDERS, PLACES, played
    from chapters.ch07_prefix_caching.beyond_drawing import draw_visits
    from chapters.ch07_prefix_caching.beyond_story import (
        GIB,
        MAX_ROUNDS,
        NUM_BLOCKS,
        SHAPES,
        costs_of,
        drop_from_memory,
        first_token,
        tiers_below,
    )
    from chapters.ch07_prefix_caching.drawing import (
        draw_chart,
        draw_counters,
        draw_map,
        draw_memory,
        draw_requests,
        draw_tree,
    )
    from chapters.ch07_prefix_caching.lab_parts import ask
    from chapters.ch07_prefix_caching.policies import POLICIES, POOL_TOKENS, bursts, num_hits, play_conversations
    from chapters.ch07_prefix_caching.scenes import SEA
    from chapters.ch07_prefix_caching.simulator import Simulator
    from chapters.ch07_prefix_caching.traps import BLOCK_SIZE, FAMILY, Prompts, play, tell_trap
    from chapters.ch07_prefix_caching.workloads import SYSTEM, WORKLOADS
    from chapters.lab_notebook import the_story
    from chapters.playing import playground_of, start_button, title
    from chapters.stage import compute
    from chapters.story import one_core
    from nanovllm.core.block_manager import BlockManager
    from nanovllm.core.sequence import Sequence
    from nanovllm.features.tiers.pool_data import PoolData


@app.cell(hide_code=True)
def _():
    title(7)
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
    start = start_button("half a minute")
    start
    return (start,)


@app.cell(hide_code=True)
def begin(start):
    story = the_story(start)
    story.enter(one_core())
    return (story,)


@app.cell
def settings():
    RULES = (
        "You answer questions of visitors at the lighthouse of Cape Farewell. The tower was built in 1871 of grey "
        "granite and stands forty metres above the sea. It is open from April to October, every day from nine to five, "
        "and closed in storms. A ticket costs six euros; children under ten come in free. There are two hundred and "
        "twelve steps, and no lift. Dogs may come along on a lead, but not up the tower. The lamp was lit with whale "
        "oil, then with petrol, and since 1954 by electricity; it is seen from thirty kilometres away. The last keeper "
        "left in 1988. In the shop there are maps, candles and hot soup. The bus from the harbour leaves every "
        "hour. Be short, and be kind. "
    )
    VISITORS = ("May I bring my dog?", "How much is a ticket for two?", "When was the tower built?", "Is there a lift?")
    LETTERS = (
        "Dear Ms Green, thank you for your patience. We are glad to say that the board has agreed to your plan, and "
        "that the sum you asked for will be paid in May. The first part is for the roof of the old boathouse, the "
        "second for two new boats and the pay of a teacher. Please send us the bills as they come in, and a "
        "picture when it is done.",
        "Dear Ms Green, thank you for your patience. We are sorry to say that the board could not agree to your plan, "
        "and that no sum will be paid this year. The roof of the old boathouse is thought to be past mending, and "
        "there is no teacher to be had. Please do not lose heart: you may ask again in spring, with another plan "
        "and other figures.",
    )
    return LETTERS, RULES, VISITORS


@app.cell
def _(story):
    llm = story.load(dtype="float32", block_size=BLOCK_SIZE, max_model_len=512, num_gpu_blocks_override=256)
    return (llm,)


@app.cell(expand_output=True)
def tell_saving(RULES, VISITORS, llm, story):
    story.part("The same beginning, four times")
    story.say(
        f"A real model behind a counter: four visitors, and before each question the same house rules. Blocks of "
        f"{BLOCK_SIZE} tokens. The cache is empty when the first one asks."
    )
    ask(llm, "Warm up. " * 40)
    llm.reset_prefix_cache()
    _table = Table("question", "prompt tokens", "found", "computed", "first token after (measured)")
    _answers, _times = [], []
    for _visitor in VISITORS:
        _ttft_ms, _num_tokens, _num_cached, _text = ask(llm, f"{RULES}{_visitor}")
        _answers.append(_text)
        _times.append(_ttft_ms)
        _numbers = map(str, (_num_tokens, _num_cached, _num_tokens - _num_cached))
        _table.add_row(_visitor, *_numbers, f"{_ttft_ms:.0f} ms (measured)")
    story.show(_table)
    _later = statistics.mean(_times[1:])
    story.say(f"With the rules found, the first token comes {_times[0] / _later:.1f} times as early.", measured=True)
    _same = []
    for _visitor, _answer in zip(VISITORS, _answers, strict=True):
        llm.reset_prefix_cache()
        _same.append(ask(llm, f"{RULES}{_visitor}")[3] == _answer)
    story.say(
        f"Asked again, each with an empty cache: {sum(_same)} of {len(_same)} answers are the same, word for word."
    )
    block_s = _times[0] / 1e3 / (_num_tokens / BLOCK_SIZE)
    return (block_s,)


@app.cell(expand_output=True)
def tell_names(story):
    story.part("A hash for a block")
    story.say(
        "In the simulator every word is a token, and a block holds four. The table shows three texts and the hashes of "
        "their full blocks. The second differs from the first in its last word, the third in its first:"
    )
    _world = Simulator()
    _table = Table("text", "block 0", "block 1", "block 2")
    for _text in (
        "the lamp is lit when the night comes down over the sea",
        "the lamp is lit when the night comes down over the town",
        "one lamp is lit when the night comes down over the sea",
    ):
        _seq = Sequence(_world.ids(_text))
        _table.add_row(_text, *(_world.manager.hash_block(_seq, index)[0].hex()[:6] for index in range(3)))
    story.show(_table)
    story.say(
        "A hash depends on its parent's, so one word changes the hashes of its own block and of all that follow, and "
        "of none before. Blocks 1 of the second and the third text hold the same four words and have different hashes."
    )
    return


@app.cell(expand_output=True)
def tell_requests(story):
    story.part("Requests that share a beginning")
    _world = Simulator()
    story.log(*(_world.send() for _ in range(4)))
    for _ in range(3):
        _world.grow()
    story.say(
        "Each then gets three words of an answer. The signs: = was found, + computed and now findable, · its "
        "own, not full:"
    )
    story.show(draw_requests(_world, 4))
    story.say(
        "The pool shows each block's number and who holds it. D+3 means D and three more requests. Below it is the "
        "free queue, whose first block is taken next:"
    )
    story.show(draw_memory(_world))
    story.show(draw_counters(_world))
    for _ in range(4):
        _world.end_oldest()
    story.say("They end one after another. The pool now holds K/V that nobody uses and anybody can find:")
    story.show(draw_memory(_world))
    story.say("The hash map is flat. Each entry also knows its parent's hash, so it holds a tree all the same:")
    story.show(draw_tree(_world))
    _world = Simulator(48, "a conversation")
    story.log(*(_world.send() for _ in range(10)))
    story.say(
        "In a conversation each turn sends all that was said before, the answers too. The chart shows the prompt "
        "tokens computed (█) and saved (░), summed over the turns:"
    )
    story.show(draw_chart(_world))
    story.show(draw_counters(_world))
    return


@app.cell(expand_output=True)
def tell_example(story):
    story.part("The worked example of vLLM's document, step by step")
    _world = Simulator()
    for _ in range(9):
        story.say(_world.example())
        story.show(Group(*[draw_requests(_world, 3)] * bool(_world.requests), draw_memory(_world)))
    story.show(draw_map(_world, 12))
    story.show(draw_counters(_world))
    return


@app.cell(expand_output=True)
def tell_forgetting(story):
    story.part("Uncached blocks are taken first: what is that worth?")
    story.say(
        "Sixteen conversations with one system prompt have six turns each, four at a time, on the real scheduler; the "
        "pool holds 60 % of all they say. They are played twice: once every freed block goes to the tail of the queue "
        "(release), and once uncached blocks go to its head, which is the engine's order (uncached first):"
    )
    _table = Table("block size", "hits: release", "uncached first", "tokens computed: release", "uncached first")
    for _block_size in (16, 64, 256):
        _orders = ("release", "uncached_first")
        (_rate, _num), (_our_rate, _our_num) = (
            play_conversations(order, _block_size, POOL_TOKENS) for order in _orders
        )
        _numbers = f"{_rate:.1%}", f"{_our_rate:.1%}", f"{_num:,}", f"{_our_num:,} ({_our_num / _num - 1:+.0%})"
        _table.add_row(str(_block_size), *_numbers)
    story.show(_table)
    story.part("What is evicted first")
    story.say(
        "The pool has 8 blocks. Requests A, C and F begin with the system prompt; B, D and E share nothing. Each ends "
        "before the next one comes. A block that is evicted is named with its words."
    )
    _world = Simulator(8)
    _said = []
    for _workload in (0, 3, 0, 3, 3, 0):
        _world.workload = WORKLOADS[_workload]
        _said.append(_world.send())
        _world.end_oldest()
    story.log(*_said)
    story.show(draw_map(_world, 8))
    story.say(
        "D and E, two strangers in a row, push out the end of a prompt that others use as well: the queue knows when a "
        "block was released, and not how often it was wanted. Would a different order save more? A system prompt of 4 "
        "blocks with a question of 2 comes twenty times, to a pool of 24 blocks. Between two of these come strangers, "
        "each with 6 blocks of its own. A column says which block is evicted first (the first one is the engine's), "
        "and how many blocks are then found, of 76:"
    )
    _table = Table("strangers between two", *POLICIES)
    for _num_strangers in range(1, 7):
        _seqs = bursts(20, _num_strangers)
        _table.add_row(str(_num_strangers), *(str(num_hits(policy, _seqs, 24)) for policy in POLICIES))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_copies(story):
    story.part("Two blocks, one hash")
    story.say("Two requests with the same text run side by side and generate the same words:")
    _world = Simulator()
    _said = [_world.typed("how far does the light reach") for _ in range(2)]
    for _ in range(4):
        _world.grow()
    story.log(*_said)
    story.show(draw_requests(_world, 2))
    story.show(draw_map(_world, 4))
    story.say(
        "The first block was found; the second was filled by both at the same time, so it exists twice, under one "
        "hash. Either serves the next request, and either can be evicted alone."
    )
    return


@app.cell(expand_output=True)
def tell_salts(LETTERS, llm, story):
    story.part("Salts")
    story.say("The same text comes from two tenants, then from the first again:")
    _world = Simulator()
    _said = []
    for _salt in ("alice", "bob", "alice"):
        _world.salt = _salt
        _said.append(f"{_salt}: {_world.typed(f'{SYSTEM} may I visit')}")
    story.log(*_said)
    story.show(draw_map(_world, 6))
    story.say(
        "Why would anybody want that? Because a hit can be noticed. Alice has one of two letters summarized. Mallory "
        "knows both texts, sends them to the same engine, and holds a stopwatch:"
    )
    _table = Table("Mallory sends", "salts", "found", "first token after (measured)")
    for _salts in ((None, None), ("alice", "mallory")):
        for _letter in LETTERS:
            llm.reset_prefix_cache()
            ask(llm, f"{LETTERS[0]} Summary:", _salts[0])  # Alice
            _ttft_ms, _num_tokens, _num_cached, _ = ask(llm, f"{_letter} Hello.", _salts[1])
            _title, _kind = "Alice's letter" if _letter == LETTERS[0] else "the other", "two" if _salts[0] else "none"
            _table.add_row(_title, _kind, f"{_num_cached} of {_num_tokens}", f"{_ttft_ms:.0f} ms (measured)")
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_pictures(story):
    story.part("A picture in the prompt")
    story.say(
        "A word in brackets is a picture. Whatever it shows, it becomes six placeholders with the same id, <P>. A asks "
        "about a boat, B asks the same about a gull, and C asks something else about the boat:"
    )
    _world = Simulator()
    _asked = "[boat] what is it", "[gull] what is it", "[boat] who is aboard"
    story.log(*(_world.typed(f"{SEA} {question}") for question in _asked))
    story.show(draw_requests(_world, 3))
    story.say("The hashes of their blocks, with the extra keys in brackets:")
    story.show(draw_map(_world, 8))
    story.say(
        "The first block lies before the picture, and all three requests share it. From the second block on, hashes "
        "contain the picture's hash and say where it begins relative to the block."
    )
    return


@app.cell(expand_output=True)
def tell_traps(llm, story):
    story.part("Six traps")
    _prompts = Prompts(llm)
    _japan, _wuhan, _reader = _prompts.japan, _prompts.wuhan, _prompts.reader
    story.say(
        "The engine runs the same requests with one fault at a time, and without it. There are three prompts, each of "
        "one block of its own, four blocks that are the same in all, and one more token:"
    )
    _beginnings = "I come from Japan.", "I come from Wuhan.", "I like to read."
    story.show(Text("".join(f"  {beginning} ...\n" for beginning in _beginnings) + f"  ...{FAMILY} called"))
    story.say(
        "[bold]1. Tokens are hashed without their parent.[/] First comes Japan. The reader has only said thank you so "
        "far, and its first block is known; now it sends its prompt, too."
    )
    _waves = [[_japan], [_prompts.greeting("I like to read.")], [_reader]]
    tell_trap(story, llm, ["reader"], _waves, faults.without_parent)

    story.say("[bold]2. The hash is made of bytes(token_ids).[/] One prompt is enough:")
    story.say(f"  {play(llm, [[_japan]], faults.bytes_of_ids)[-1].error}")
    _pair = next(_pair for _pair in zip(_japan, _wuhan, strict=True) if _pair[0] != _pair[1])
    _ids = ", ".join(f"{llm.get_tokenizer().decode([i])!r} is {i} = 256 * {i // 256} + {i % 256}" for i in _pair)
    story.say(f"The first fix that comes to mind is i % 256, and it runs. {_ids}.")
    tell_trap(story, llm, ["Wuhan"], [[_japan], [_wuhan]], faults.low_bytes_of_ids)

    story.say(
        "[bold]3. References stay raised when there is no room.[/] The pool has 16 blocks, and three waves of "
        "prompts come:"
    )
    _table = Table("wave", "answered", "free blocks afterwards", "references that nobody holds")
    _waves = [[_japan, _wuhan, _reader], [_japan, _wuhan, _reader], [list(range(1000, 1060))]]
    _played = play(llm, _waves, faults.references_stay, num_blocks=16)
    for _number, (_wave, _outcome) in enumerate(zip(_waves, _played, strict=True), start=1):
        _answered, _counts = f"{_outcome.num_finished} of {len(_wave)}", " ".join(map(str, _outcome.ref_counts))
        _table.add_row(str(_number), _answered, str(_outcome.num_free), _counts)
    story.show(_table)
    _outcomes = _played[-1].error, play(llm, _waves, num_blocks=16)[-1].error or "it is answered"
    story.say(
        "The third wave is one prompt of 60 tokens, 8 blocks, that shares nothing. With the fault: {} (after the "
        "failed step the pool is forgotten, and all references with it). Without: {}.".format(*_outcomes)
    )

    story.say(
        "[bold]4. Hits are left in the free queue.[/] The pool has 10 blocks; the reader comes again, with Japan "
        "beside it:"
    )
    tell_trap(story, llm, ["reader", "Japan"], [[_reader], [_reader, _japan]], faults.hits_stay_free, num_blocks=10)

    story.say(
        "[bold]5. A block that is taken keeps its old hash.[/] The pool has 8 blocks; Japan comes, then the "
        "reader, then:"
    )
    tell_trap(story, llm, ["Japan"], [[_japan], [_reader], [_japan]], faults.names_stay, num_blocks=8)

    story.say(
        "[bold]6. Of a fully cached prompt nothing is computed.[/] The prompts come without their last token, so they "
        "have 5 blocks."
    )
    story.say(f"  Alone: {play(llm, [[_japan[:-1]]] * 2, faults.nothing_left)[-1].error}")
    story.say("Beside another request, Japan's first token is sampled from the row before its own, the reader's last:")
    _waves = [[_japan[:-1]], [_reader, _japan[:-1]]]
    tell_trap(story, llm, ["reader", "Japan"], _waves, faults.nothing_left)
    return


@app.cell(expand_output=True)
def tell_cost(block_s, story):
    story.part("What it costs when nothing is shared")
    _num_tokens, _times = 32_000, []
    for _seed in range(5):
        _manager = BlockManager(_num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE)
        _seq = Sequence([(_seed + 1) * 1_000_000 + i for i in range(_num_tokens)])
        _started = time.perf_counter()
        _manager.allocate_with_prefix(_seq)
        compute(_manager, _seq)
        _times.append((time.perf_counter() - _started) / (_num_tokens // BLOCK_SIZE))
    _cost_s = statistics.median(_times)
    story.say(f"A prompt of {_num_tokens:,} tokens that nobody has sent before, {_num_tokens // BLOCK_SIZE:,} blocks.")
    story.say(f"Hashing, probing and registering a block: {_cost_s * 1e6:.1f} microseconds.", measured=True)
    story.say(
        f"Computing its {BLOCK_SIZE} tokens, as fast as in the first part: {block_s * 1e3:.1f} milliseconds.",
        measured=True,
    )
    story.say(f"The cache costs {_cost_s / block_s:.2%} of the prefill that it may save.", measured=True)
    _seq = Sequence(list(range(_num_tokens)))
    _manager = BlockManager(_num_tokens // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=False)
    _manager.allocate_with_prefix(_seq)
    compute(_manager, _seq)
    story.say(f"With enable_prefix_caching=False the same prompt has {len(_seq.block_hashes)} hashes made for it.")
    return


@app.cell(expand_output=True)
def tell_tiers(story):
    story.part("Beyond memory: who still has it?")
    _order, _half = next(iter(ORDERS)), 12
    story.say(
        "Four people talk with a model in turn, six times each, and each time send all that was said before. The pool "
        "has room for 20 blocks of 4 tokens, memory for 20, a disk for 80; all that they say takes 59. After twelve "
        "requests the process ends and another begins. The last requests: = found in the pool, m in memory, d on the "
        "disk, + computed, · not full."
    )
    story.show(draw_visits(played(_order, _half), 14))
    story.say(
        "The table shows where the K/V of the prompt tokens of all 24 requests came from, with different sizes "
        "in blocks:"
    )
    _table = Table("below a pool of 20", *PLACES, "computed if the process goes on")
    for _title, _sizes in SHAPES.items():
        _totals, _going_on = played(_order, _half, **_sizes).totals(), played(_order, **_sizes).totals()
        _table.add_row(_title, *(str(_totals[place]) for place in PLACES), str(_going_on["computed"]))
    story.show(_table)
    return


@app.cell(expand_output=True)
def tell_costs(llm, story):
    story.part("Beyond memory: when reading beats computing")
    _size, _num_blocks = llm.engine.block_manager.block_size, len(llm.engine.block_manager.blocks)
    with TemporaryDirectory() as _folder, tiers_below(llm, Path(_folder), NUM_BLOCKS + 1) as _tiers:
        _prompt, _other = ([first + i for i in range(NUM_BLOCKS * _size + 1)] for first in (1000, 5000))
        _waits = {
            "computed": [first_token(llm, [7 + r, *_prompt[1:]]) for r in range(MAX_ROUNDS)]
        }  # no beginning alike
        _waits |= {_medium: [] for _medium in _tiers.hit_tokens}
        first_token(llm, _prompt)
        _stores: Any = _tiers.stores
        _memory, _disk = _stores
        for _ in range(MAX_ROUNDS):
            _waits["pool"].append(first_token(llm, _prompt))
            first_token(llm, _other)  # evicts it, so memory gets it
            _waits["memory"].append(first_token(llm, _prompt))
            _disk.flush()
            _memory.reset()
            _tiers.manager.reset_prefix_cache()
            drop_from_memory(Path(_folder))
            _waits["disk"].append(first_token(llm, _prompt))
        first_token(llm, _other)
        _costs = {store.medium: costs_of(_tiers, store, _prompt, Path(_folder)) for store in _tiers.stores}
        _block_bytes: int = PoolData(llm.engine.model_runner).block_bytes
    _computing = min(_waits["computed"]) / len(_prompt)
    _token_bytes = _block_bytes // _size
    story.say(
        f"The same model, blocks of {_size} tokens. K and V of a token take {_token_bytes:,} bytes in float32. A "
        f"prompt of {len(_prompt)} tokens, {NUM_BLOCKS} full blocks and a token more, by where these blocks are found; "
        "the shortest of five times:"
    )
    _table = Table("found", "first token after (measured)")
    for _medium, _times in _waits.items():
        _name = "nowhere" if _medium == "computed" else _medium
        _table.add_row(_name, f"{min(_times) * 1e3:.0f} ms (measured)")
    story.show(_table)
    story.say(
        "The table shows a tier's room, in bytes and in tokens; how long a token's K and V take from there into the "
        "pool; and how many are read while one is computed. The network's times come from its rate, without the wait "
        "for the first byte:"
    )
    _table = Table("tier", "room", "tokens", "ms a token", "read while one is computed (measured)")
    _rows: list[tuple[str, int, float]] = [
        ("memory", GIB, _costs["memory"].further / _size),
        ("disk", 10 * GIB, _costs["disk"].further / _size),
        ("network, 10 Gbit/s", 0, _token_bytes * 8 / 10e9),
        ("network, 100 Mbit/s", 0, _token_bytes * 8 / 100e6),
    ]
    _room = f"{_num_blocks * _block_bytes / GIB:.2f} GiB"
    _table.add_row("pool", _room, f"{_num_blocks * _size:,}", "0", "all (measured)")
    for _name, _num_bytes, _seconds in _rows:
        _sizes = (f"{_num_bytes / GIB:.2f} GiB", f"{_num_bytes // _token_bytes:,}") if _num_bytes else ("", "")
        _table.add_row(_name, *_sizes, f"{_seconds * 1e3:.3f}", f"{_computing / _seconds:,.1f} (measured)")
    story.show(_table)
    _of_disk = _costs["disk"]
    story.say(f"Computing takes {_computing * 1e3:.2f} milliseconds a token.", measured=True)
    story.say(f"Reading from the disk takes {_of_disk.further / _size * 1e3:.3f} milliseconds a token.", measured=True)
    story.say(f"The first block of a run takes {_of_disk.first * 1e3:.2f} milliseconds.", measured=True)
    _rate = _token_bytes / _computing / 1e6
    story.say(f"Break-even: a store that delivers {_rate:.0f} MB a second is as fast as computing.", measured=True)
    _rate = 10_000 * (128 << 10) / 1e9
    story.say(f"A GPU that computes 10,000 tokens a second, at 128 KiB of K and V a token: {_rate:.2f} GB a second.")
    return


if __name__ == "__main__":
    app.run()
