"""Lab of chapter 7: a simulator on the engine's own BlockManager, a real model, and six traps put into the engine."""

import statistics
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from chapters.ch07_prefix_caching import traps
from chapters.ch07_prefix_caching.simulator import BLOCK_SIZE, SYSTEM, WORKLOADS, Simulator
from chapters.patching import replaced
from chapters.story import Story, one_core
from nanovllm import LLM, SamplingParams
from nanovllm.core import block_manager
from nanovllm.core.block_manager import Block, BlockManager, FreeBlockQueue
from nanovllm.core.sequence import Sequence

if TYPE_CHECKING:
    from chapters.explorer import Explorer


def make_app(model: str | None = None) -> "Explorer":
    from chapters.explorer import Action, Explorer

    actions = [
        Action("n", "send", "send"),
        Action("g", "word", "grow"),
        Action("e", "end", "end_oldest"),
        Action("x", "demo", "example"),
        Action("w", "kind", "next_workload"),
        Action("s", "salt", "next_salt"),
        Action("m", "less", "shrink"),
        Action("f", "trap", "next_fault"),
        Action("r", "new", "reset"),
    ]
    return Explorer(
        "7. Prefix caching: = found, + now cached, · its own, ! wrong",
        Simulator(),
        Simulator.panels,
        actions,
        ask="a prompt of yours",
    )


# -- other orders of forgetting ---------------------------------------------------------------------------------------


class ByRank(FreeBlockQueue):
    """A free queue that gives the block of lowest rank instead of its head, unnamed ones before all others.

    Only blocks without a cached child are given, so that a cached block's parent stays cached.
    """

    manager: BlockManager
    rank: Callable[[bytes], float]  # of a name

    def popleft(self) -> Block:
        blocks = [self.manager.blocks[block_id] for block_id in self]
        parents = {block.parent_hash for block in self.manager.blocks if block.block_hash is not None}
        leaves = [block for block in blocks if block.block_hash not in parents - {None}]
        block = min(leaves, key=lambda b: float("-inf") if b.block_hash is None else self.rank(b.block_hash))
        self.remove(block)
        return block


def bursts(num_rounds: int, num_strangers: int) -> list[Sequence]:
    """A system prompt of 4 blocks again and again, each time with a question of its own, and strangers between."""
    fresh, seqs = count(1000), []
    for _ in range(num_rounds):
        seqs.append(Sequence([*range(16), *(next(fresh) for _ in range(8))]))
        seqs += [Sequence([next(fresh) for _ in range(24)]) for _ in range(num_strangers)]
    return seqs


POLICIES = ("released longest ago (the engine's)", "fewest uses so far", "next use farthest away")


def hits_of(policy: str, seqs: list[Sequence], num_blocks: int) -> int:
    """Blocks found when the requests come one after another and this block is forgotten first."""
    with replaced(block_manager, "FreeBlockQueue", FreeBlockQueue if policy == POLICIES[0] else ByRank):
        manager = BlockManager(num_blocks, BLOCK_SIZE)
    uses: dict[bytes, list[int]] = {}  # name -> numbers of the requests that ask for it
    for number, seq in enumerate(seqs):
        for index in range(len(seq.tokens) // BLOCK_SIZE):
            uses.setdefault(manager.name_block(seq, index)[0], []).append(number)
    now = 0

    def rank(name: bytes) -> float:
        if policy == POLICIES[1]:
            return sum(use < now for use in uses[name])
        return -min((use for use in uses[name] if use > now), default=len(seqs))

    if isinstance(manager.free_blocks, ByRank):
        manager.free_blocks.manager, manager.free_blocks.rank = manager, rank
    for now, seq in enumerate(seqs):  # noqa: B007  rank() looks at it
        assert manager.allocate_with_prefix(seq)
        seq.num_computed_tokens = len(seq.tokens)
        manager.register_prefix(seq)
        manager.free(seq)
    manager.check_integrity()
    return manager.stats.hits


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
    llm = story.load(dtype="float32", block_size=traps.BLOCK_SIZE, max_model_len=512, num_gpu_blocks_override=256)
    with one_core():
        block_s = tell_saving(story, llm)
        tell_names(story)
        tell_requests(story)
        tell_example(story)
        tell_forgetting(story)
        tell_copies(story)
        tell_salts(story, llm)
        tell_traps(story, llm)
        tell_cost(story, block_s)


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
        f"{traps.BLOCK_SIZE} tokens. The cache is empty when the first one asks."
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
    return times[0] / 1e3 / (num_tokens / traps.BLOCK_SIZE)


def tell_names(story: Story) -> None:
    story.part("A name for a block")
    story.say(
        "The simulator: every word is a token, a block holds four. Three texts and the names of their full blocks. The "
        "second differs from the first in its last word, the third in its first:"
    )
    world = Simulator()
    table = Table("text", "block 0", "block 1", "block 2")
    for text in (
        "the lamp is lit when the night comes down over the sea",
        "the lamp is lit when the night comes down over the town",
        "one lamp is lit when the night comes down over the sea",
    ):
        seq = Sequence(world.ids(text))
        table.add_row(text, *(world.manager.name_block(seq, index)[0].hex()[:6] for index in range(3)))
    story.show(table)
    story.say(
        "A name contains its parent's, so one word changes the names of its own block and of all that follow, and of "
        "none before. Blocks 1 of the second and the third text hold the same four words and have different names."
    )


def tell_requests(story: Story) -> None:
    story.part("Requests that share a beginning")
    world = Simulator()
    for _ in range(4):
        story.console.print(world.send(), style="dim")
    for _ in range(3):
        world.grow()
    story.say(
        "\nEach then gets three words of an answer. = was found, + computed and now findable, · its own, not full:"
    )
    story.show(world.draw_requests(4))
    story.say("The pool (+1: one more request holds it), and the free queue from its head:")
    story.show(world.draw_memory())
    story.show(world.draw_counters())
    for _ in range(4):
        world.end_oldest()
    story.say("They end one after another. The pool now holds K/V that nobody uses and anybody can find:")
    story.show(world.draw_memory())
    story.say("The hash map is flat. Each name contains its parent's, so a tree is in it all the same:")
    story.show(world.draw_tree())
    world = Simulator(48, "a conversation")
    for _ in range(10):
        story.console.print(world.send(), style="dim")
    story.console.print()
    story.say(
        "A conversation: each turn sends all that was said before, the answers too. Prompt tokens computed (█) and "
        "saved (░), summed over the turns:"
    )
    story.show(world.draw_chart())
    story.show(world.draw_counters())


def tell_example(story: Story) -> None:
    story.part("The worked example of vLLM's document, step by step")
    world = Simulator()
    for _ in range(7):
        story.say(world.example())
        if world.requests:
            story.console.print(world.draw_requests(3))
        story.show(world.draw_memory())
    story.show(world.draw_map(12))
    story.show(world.draw_counters())


def tell_forgetting(story: Story) -> None:
    story.part("What is forgotten first")
    story.say("The system prompt again, in a pool of 8 blocks; after each answer the request ends.")
    world = Simulator(8)
    for workload in (0, 3, 0, 3, 3, 0):
        world.workload = WORKLOADS[workload]
        story.console.print(world.send(), style="dim")
        world.end_oldest()
    story.console.print()
    story.show(world.draw_map(8))
    story.say(
        "Two strangers in a row push out the end of a prompt that everybody uses: the queue knows when a block was "
        "released, and not how often it was wanted. How much would another order save? A system prompt of 4 blocks "
        "with a question of 2, twenty times, and strangers of 6 blocks between; a pool of 24. Found, of 76 blocks:"
    )
    table = Table("what is forgotten first; strangers between:", *map(str, range(1, 7)))
    for policy in POLICIES:
        table.add_row(policy, *(str(hits_of(policy, bursts(20, n), 24)) for n in range(1, 7)))
    story.show(table)


def tell_copies(story: Story) -> None:
    story.part("Two blocks, one name")
    story.say("Two requests with the same text run side by side and generate the same words:")
    world = Simulator()
    for _ in range(2):
        story.console.print(world.typed("how far does the light reach"), style="dim")
    for _ in range(4):
        world.grow()
    story.console.print()
    story.show(world.draw_requests(2))
    story.show(world.draw_map(4))
    story.say(
        "The first block was found; the others were filled by both at the same time, so they exist twice, under one "
        "name. Either serves the next request, and either can be forgotten alone."
    )


def tell_salts(story: Story, llm: LLM) -> None:
    story.part("Salts")
    story.say("The same text from two tenants, then from the first again:")
    world = Simulator()
    for salt in ("alice", "bob", "alice"):
        world.salt = salt
        story.console.print(f"{salt}: {world.typed(f'{SYSTEM} may I visit')}", style="dim")
    story.console.print()
    story.show(world.draw_map(6))
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


def tell_traps(story: Story, llm: LLM) -> None:
    story.part("Six traps")
    prompts = traps.Prompts(llm)
    japan, wuhan, reader = prompts.japan, prompts.wuhan, prompts.reader
    story.say(
        "The engine with one fault at a time, and the same requests without it. There are three prompts, each of one "
        "block of its own, four blocks that are the same in all, and one token more:"
    )
    beginnings = "I come from Japan.", "I come from Wuhan.", "I like to read."
    story.show(Text("".join(f"  {beginning} ...\n" for beginning in beginnings) + f"  ...{traps.FAMILY} called"))
    story.say(
        "[bold]1. Tokens are named without their parent.[/] First comes Japan. The reader has only said thank you so "
        "far, and its first block is known; now it sends its prompt, too."
    )
    waves = [[japan], [prompts.greeting("I like to read.")], [reader]]
    tell_trap(story, llm, ["reader"], waves, lambda: traps.named(traps.without_parent))

    story.say("[bold]2. The name is made of bytes(token_ids).[/] One prompt is enough:")
    story.say(f"  {traps.play(llm, [[japan]], traps.named(traps.as_bytes))[-1].error}")
    pair = next(pair for pair in zip(japan, wuhan, strict=True) if pair[0] != pair[1])
    ids = ", ".join(f"{llm.get_tokenizer().decode([i])!r} is {i} = 256 * {i // 256} + {i % 256}" for i in pair)
    story.say(f"The first mend that comes to mind is i % 256, and it runs. {ids}.")
    tell_trap(story, llm, ["Wuhan"], [[japan], [wuhan]], lambda: traps.named(traps.as_low_bytes))

    story.say("[bold]3. References stay raised when there is no room.[/] A pool of 16 blocks, and three waves:")
    table = Table("wave", "answered", "free blocks afterwards", "references that nobody holds")
    letter = llm.get_tokenizer().encode(LETTERS[0])[:60]
    waves = [[japan, wuhan, reader], [japan, wuhan, reader], [letter]]
    played = traps.play(llm, waves, traps.references_stay(), num_blocks=16)
    for number, (wave, outcome) in enumerate(zip(waves, played, strict=True), start=1):
        answered, counts = f"{outcome.num_finished} of {len(wave)}", " ".join(map(str, outcome.ref_counts))
        table.add_row(str(number), answered, str(outcome.num_free), counts)
    story.show(table)
    outcomes = played[-1].error, traps.play(llm, waves, num_blocks=16)[-1].error or "it is answered"
    story.say("The third wave is one letter of 60 tokens, 8 blocks. With the fault: {}. Without: {}.".format(*outcomes))

    story.say(
        "[bold]4. Hits are left in the free queue.[/] A pool of 10 blocks; the reader again, and Japan beside it:"
    )
    tell_trap(story, llm, ["reader", "Japan"], [[reader], [reader, japan]], traps.hits_stay_free, num_blocks=10)

    story.say("[bold]5. A block that is taken keeps its old name.[/] A pool of 8 blocks; Japan, then the reader, then:")
    tell_trap(story, llm, ["Japan"], [[japan], [reader], [japan]], traps.names_stay, num_blocks=8)

    story.say(
        "[bold]6. Of a fully cached prompt nothing is computed.[/] The prompts without their last token: 5 blocks."
    )
    story.say(f"  Alone: {traps.play(llm, [[japan[:-1]]] * 2, traps.nothing_left())[-1].error}")
    story.say("Beside another request, Japan's first token comes from the row that happens to be the last before it:")
    waves = [[japan[:-1]], [reader, japan[:-1]]]
    tell_trap(story, llm, ["reader", "Japan"], waves, traps.nothing_left)


def tell_trap(
    story: Story,
    llm: LLM,
    names: list[str],
    waves: list[list[list[int]]],
    fault: Callable[[], AbstractContextManager],
    num_blocks: int = 64,
) -> None:
    """The answers to the last wave, right and wrong, as much of them as fits on a line."""
    right, wrong = (traps.play(llm, waves, *faults, num_blocks=num_blocks)[-1] for faults in ([], [fault()]))
    table = Table("who asks", "found", "the answer", "found", "with the fault")
    for name, *columns in zip(names, right.cached, right.texts, wrong.cached, wrong.texts, strict=False):
        table.add_row(name, *(textwrap.shorten(str(column), 33, placeholder="") for column in columns))
    story.show(wrong.error or table)


def tell_cost(story: Story, block_s: float) -> None:
    story.part("What it costs when nothing is shared")
    num_tokens, times = 32_000, []
    for seed in range(5):
        manager = BlockManager(num_tokens // traps.BLOCK_SIZE + 1, traps.BLOCK_SIZE)
        seq = Sequence([(seed + 1) * 1_000_000 + i for i in range(num_tokens)])
        started = time.perf_counter()
        manager.allocate_with_prefix(seq)
        seq.num_computed_tokens = num_tokens
        manager.register_prefix(seq)
        times.append((time.perf_counter() - started) / (num_tokens // traps.BLOCK_SIZE))
    cost_s = statistics.median(times)
    story.say(
        f"A prompt of {num_tokens:,} tokens that nobody has sent before, {num_tokens // traps.BLOCK_SIZE:,} blocks."
    )
    story.say(f"Naming, probing and registering a block: {cost_s * 1e6:.1f} microseconds.", measured=True)
    story.say(f"Its prefill, from the first part: {block_s * 1e3:.1f} milliseconds.", measured=True)
    story.say(f"The cache costs {cost_s / block_s:.2%} of the prefill that it may save.", measured=True)
    seq = Sequence(list(range(num_tokens)))
    manager = BlockManager(num_tokens // traps.BLOCK_SIZE, traps.BLOCK_SIZE, enable_prefix_caching=False)
    manager.allocate_with_prefix(seq)
    seq.num_computed_tokens = num_tokens
    manager.register_prefix(seq)
    story.say(f"With enable_prefix_caching=False the same prompt has {len(seq.block_hashes)} names made for it.")
