"""Lab of chapter 7: a simulator on the engine's own BlockManager, a real model, and six traps put into the engine."""

import statistics
import time
from typing import Any

from rich.console import Group
from rich.table import Table

from chapters.app import explorer
from chapters.ch07_prefix_caching import page
from chapters.ch07_prefix_caching.beyond_story import tell_costs, tell_tiers
from chapters.ch07_prefix_caching.drawing import (
    draw_chart,
    draw_counters,
    draw_map,
    draw_memory,
    draw_requests,
    draw_tree,
    panels,
)
from chapters.ch07_prefix_caching.policies import POLICIES, POOL_TOKENS, bursts, num_hits, play_conversations
from chapters.ch07_prefix_caching.scenes import SEA
from chapters.ch07_prefix_caching.simulator import Simulator
from chapters.ch07_prefix_caching.traps import BLOCK_SIZE, tell_traps
from chapters.ch07_prefix_caching.workloads import SYSTEM, WORKLOADS
from chapters.ch07_prefix_caching.world import ACTIONS, World
from chapters.stage import compute
from chapters.story import Story, one_core
from nanovllm import LLM, SamplingParams
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence


def make_app(model: str | None = None) -> Any:
    title = "7. Prefix caching: = found, + now cached, · its own, ! wrong"
    return explorer(title, World(), panels, ACTIONS, ask=page.ASK, page=page)


# -- the story --------------------------------------------------------------------------------------------------------

RULES = (
    "You answer questions of visitors at the lighthouse of Cape Farewell. The tower was built in 1871 of grey granite "
    "and stands forty metres above the sea. It is open from April to October, every day from nine to five, and closed "
    "in storms. A ticket costs six euros; children under ten come in free. There are two hundred and twelve steps, and "
    "no lift. Dogs may come along on a lead, but not up the tower. The lamp was lit with whale oil, then with petrol, "
    "and since 1954 by electricity; it is seen from thirty kilometres away. The last keeper left in 1988. In the shop "
    "there are maps, candles and hot soup. The bus from the harbour leaves every hour. Be short, and be kind. "
)
VISITORS = ("May I bring my dog?", "How much is a ticket for two?", "When was the tower built?", "Is there a lift?")
LETTERS = (
    "Dear Ms Green, thank you for your patience. We are glad to say that the board has agreed to your plan, and that "
    "the sum you asked for will be paid in May. The first part is for the roof of the old boathouse, the second for "
    "two new boats and the pay of a teacher. Please send us the bills as they come in, and a picture when it is done.",
    "Dear Ms Green, thank you for your patience. We are sorry to say that the board could not agree to your plan, and "
    "that no sum will be paid this year. The roof of the old boathouse is thought to be past mending, and there is no "
    "teacher to be had. Please do not lose heart: you may ask again in spring, with another plan and other figures.",
)


def tell(story: Story) -> None:
    llm = story.load(dtype="float32", block_size=BLOCK_SIZE, max_model_len=512, num_gpu_blocks_override=256)
    with one_core():
        block_s = tell_saving(story, llm)
        tell_names(story)
        tell_requests(story)
        tell_example(story)
        tell_forgetting(story)
        tell_copies(story)
        tell_salts(story, llm)
        tell_pictures(story)
        tell_traps(story, llm)
        tell_cost(story, block_s)
        tell_tiers(story)
        tell_costs(story, llm)


def ask(llm: LLM, prompt: str, salt: str | None = None) -> tuple[float, int, int, str]:
    """Milliseconds to the first token, prompt tokens, how many of them were found, and the answer."""
    params = SamplingParams(temperature=0, max_tokens=8)
    [output] = llm.generate([{"prompt": prompt, "cache_salt": salt} if salt else prompt], params, use_tqdm=False)
    ttft_s = output.metrics.ttft_s or 0.0
    return ttft_s * 1e3, len(output.prompt_token_ids), output.num_cached_tokens, output.outputs[0].text


def tell_saving(story: Story, llm: LLM) -> float:
    """Returns the seconds that the prefill of one block takes."""
    story.part("The same beginning, four times")
    story.say(
        f"A real model behind a counter: four visitors, and before each question the same house rules. Blocks of "
        f"{BLOCK_SIZE} tokens. The cache is empty when the first one asks."
    )
    ask(llm, "Warm up. " * 40)
    llm.reset_prefix_cache()
    table = Table("question", "prompt tokens", "found", "computed", "first token after (measured)")
    answers, times = [], []
    for visitor in VISITORS:
        ttft_ms, num_tokens, num_cached, text = ask(llm, f"{RULES}{visitor}")
        answers.append(text)
        times.append(ttft_ms)
        numbers = map(str, (num_tokens, num_cached, num_tokens - num_cached))
        table.add_row(visitor, *numbers, f"{ttft_ms:.0f} ms (measured)")
    story.show(table)
    later = statistics.mean(times[1:])
    story.say(f"With the rules found, the first token comes {times[0] / later:.1f} times as early.", measured=True)
    same = []
    for visitor, answer in zip(VISITORS, answers, strict=True):
        llm.reset_prefix_cache()
        same.append(ask(llm, f"{RULES}{visitor}")[3] == answer)
    story.say(f"Asked again, each with an empty cache: {sum(same)} of {len(same)} answers are the same, word for word.")
    return times[0] / 1e3 / (num_tokens / BLOCK_SIZE)


def tell_names(story: Story) -> None:
    story.part("A hash for a block")
    story.say(
        "In the simulator every word is a token, and a block holds four. The table shows three texts and the hashes of "
        "their full blocks. The second differs from the first in its last word, the third in its first:"
    )
    world = Simulator()
    table = Table("text", "block 0", "block 1", "block 2")
    for text in (
        "the lamp is lit when the night comes down over the sea",
        "the lamp is lit when the night comes down over the town",
        "one lamp is lit when the night comes down over the sea",
    ):
        seq = Sequence(world.ids(text))
        table.add_row(text, *(world.manager.hash_block(seq, index)[0].hex()[:6] for index in range(3)))
    story.show(table)
    story.say(
        "A hash depends on its parent's, so one word changes the hashes of its own block and of all that follow, and "
        "of none before. Blocks 1 of the second and the third text hold the same four words and have different hashes."
    )


def tell_requests(story: Story) -> None:
    story.part("Requests that share a beginning")
    world = Simulator()
    story.log(*(world.send() for _ in range(4)))
    for _ in range(3):
        world.grow()
    story.say(
        "Each then gets three words of an answer. The signs: = was found, + computed and now findable, · its "
        "own, not full:"
    )
    story.show(draw_requests(world, 4))
    story.say(
        "The pool shows each block's number and who holds it. D+3 means D and three more requests. Below it is the "
        "free queue, whose first block is taken next:"
    )
    story.show(draw_memory(world))
    story.show(draw_counters(world))
    for _ in range(4):
        world.end_oldest()
    story.say("They end one after another. The pool now holds K/V that nobody uses and anybody can find:")
    story.show(draw_memory(world))
    story.say("The hash map is flat. Each entry also knows its parent's hash, so it holds a tree all the same:")
    story.show(draw_tree(world))
    world = Simulator(48, "a conversation")
    story.log(*(world.send() for _ in range(10)))
    story.say(
        "In a conversation each turn sends all that was said before, the answers too. The chart shows the prompt "
        "tokens computed (█) and saved (░), summed over the turns:"
    )
    story.show(draw_chart(world))
    story.show(draw_counters(world))


def tell_example(story: Story) -> None:
    story.part("The worked example of vLLM's document, step by step")
    world = Simulator()
    for _ in range(9):
        story.say(world.example())
        story.show(Group(*[draw_requests(world, 3)] * bool(world.requests), draw_memory(world)))
    story.show(draw_map(world, 12))
    story.show(draw_counters(world))


def tell_forgetting(story: Story) -> None:
    story.part("Uncached blocks are taken first: what is that worth?")
    story.say(
        "Sixteen conversations with one system prompt have six turns each, four at a time, on the real scheduler; the "
        "pool holds 60 % of all they say. They are played twice: once every freed block goes to the tail of the queue "
        "(release), and once uncached blocks go to its head, which is the engine's order (uncached first):"
    )
    table = Table("block size", "hits: release", "uncached first", "tokens computed: release", "uncached first")
    for block_size in (16, 64, 256):
        orders = ("release", "uncached_first")
        (rate, num), (our_rate, our_num) = (play_conversations(order, block_size, POOL_TOKENS) for order in orders)
        numbers = f"{rate:.1%}", f"{our_rate:.1%}", f"{num:,}", f"{our_num:,} ({our_num / num - 1:+.0%})"
        table.add_row(str(block_size), *numbers)
    story.show(table)
    story.part("What is forgotten first")
    story.say(
        "The pool has 8 blocks. Requests A, C and F begin with the system prompt; B, D and E share nothing. Each ends "
        "before the next one comes. What is forgotten is a block that is taken for a new request, with its words."
    )
    world = Simulator(8)
    said = []
    for workload in (0, 3, 0, 3, 3, 0):
        world.workload = WORKLOADS[workload]
        said.append(world.send())
        world.end_oldest()
    story.log(*said)
    story.show(draw_map(world, 8))
    story.say(
        "D and E, two strangers in a row, push out the end of a prompt that others use as well: the queue knows when a "
        "block was released, and not how often it was wanted. Would a different order save more? A system prompt of 4 "
        "blocks with a question of 2 comes twenty times, to a pool of 24 blocks. Between two of these come strangers, "
        "each with 6 blocks of its own. A column says which block is forgotten first (the first one is the engine's), "
        "and how many blocks are then found, of 76:"
    )
    table = Table("strangers between two", *POLICIES)
    for num_strangers in range(1, 7):
        seqs = bursts(20, num_strangers)
        table.add_row(str(num_strangers), *(str(num_hits(policy, seqs, 24)) for policy in POLICIES))
    story.show(table)


def tell_copies(story: Story) -> None:
    story.part("Two blocks, one hash")
    story.say("Two requests with the same text run side by side and generate the same words:")
    world = Simulator()
    said = [world.typed("how far does the light reach") for _ in range(2)]
    for _ in range(4):
        world.grow()
    story.log(*said)
    story.show(draw_requests(world, 2))
    story.show(draw_map(world, 4))
    story.say(
        "The first block was found; the others were filled by both at the same time, so they exist twice, under one "
        "hash. Either serves the next request, and either can be forgotten alone."
    )


def tell_salts(story: Story, llm: LLM) -> None:
    story.part("Salts")
    story.say("The same text comes from two tenants, then from the first again:")
    world = Simulator()
    said = []
    for salt in ("alice", "bob", "alice"):
        world.salt = salt
        said.append(f"{salt}: {world.typed(f'{SYSTEM} may I visit')}")
    story.log(*said)
    story.show(draw_map(world, 6))
    story.say(
        "Why anybody wants that: a hit can be felt. Alice has one of two letters summarized. Mallory knows both texts, "
        "sends them to the same engine, and holds a stopwatch:"
    )
    table = Table("Mallory sends", "salts", "found", "first token after (measured)")
    for salts in ((None, None), ("alice", "mallory")):
        for letter in LETTERS:
            llm.reset_prefix_cache()
            ask(llm, f"{LETTERS[0]} Summary:", salts[0])  # Alice
            ttft_ms, num_tokens, num_cached, _ = ask(llm, f"{letter} Hello.", salts[1])
            title, kind = "Alice's letter" if letter == LETTERS[0] else "the other", "two" if salts[0] else "none"
            table.add_row(title, kind, f"{num_cached} of {num_tokens}", f"{ttft_ms:.0f} ms (measured)")
    story.show(table)


def tell_pictures(story: Story) -> None:
    story.part("A picture in the prompt")
    story.say(
        "A word in brackets is a picture. Whatever it shows, it becomes six placeholders with the same id, <P>. A asks "
        "about a boat, B asks the same about a gull, and C asks something else about the boat:"
    )
    world = Simulator()
    asked = "[boat] what is it", "[gull] what is it", "[boat] who is aboard"
    story.log(*(world.typed(f"{SEA} {question}") for question in asked))
    story.show(draw_requests(world, 3))
    story.say("The hashes of their blocks, with the extra keys in brackets:")
    story.show(draw_map(world, 8))
    story.say(
        "The first block lies before the picture, and all three requests share it. From the second block on, hashes "
        "contain the picture's hash and say where it begins relative to the block."
    )


def tell_cost(story: Story, block_s: float) -> None:
    story.part("What it costs when nothing is shared")
    num_tokens, times = 32_000, []
    for seed in range(5):
        manager = BlockManager(num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE)
        seq = Sequence([(seed + 1) * 1_000_000 + i for i in range(num_tokens)])
        started = time.perf_counter()
        manager.allocate_with_prefix(seq)
        compute(manager, seq)
        times.append((time.perf_counter() - started) / (num_tokens // BLOCK_SIZE))
    cost_s = statistics.median(times)
    story.say(f"A prompt of {num_tokens:,} tokens that nobody has sent before, {num_tokens // BLOCK_SIZE:,} blocks.")
    story.say(f"Hashing, probing and registering a block: {cost_s * 1e6:.1f} microseconds.", measured=True)
    story.say(f"Its prefill, from the first part: {block_s * 1e3:.1f} milliseconds.", measured=True)
    story.say(f"The cache costs {cost_s / block_s:.2%} of the prefill that it may save.", measured=True)
    seq = Sequence(list(range(num_tokens)))
    manager = BlockManager(num_tokens // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=False)
    manager.allocate_with_prefix(seq)
    compute(manager, seq)
    story.say(f"With enable_prefix_caching=False the same prompt has {len(seq.block_hashes)} hashes made for it.")
