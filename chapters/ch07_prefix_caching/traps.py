"""The lab's six traps: the faults of faults.py in the real engine with a real model, and what it answers then."""

import textwrap
from contextlib import nullcontext
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from chapters.ch07_prefix_caching import faults
from chapters.ch07_prefix_caching.faults import Fault
from chapters.patching import use_manager
from chapters.story import Story
from nanovllm import LLM, SamplingParams
from nanovllm.core.block_manager import BlockManager

BLOCK_SIZE = 8
NUM_TOKENS = 10
LARGE = 64  # blocks of a pool that has room for all waves
FAMILY = (
    " My family comes from the same country as I do, and the capital of that country is a very large city with many "
    "people. The name of that city is"
)


class Prompts:
    """Texts as token ids: a beginning of one block, four blocks that everybody shares, and one token or none more."""

    def __init__(self, llm: LLM) -> None:
        self._encode = llm.get_tokenizer().encode
        self.japan = self.told("I come from Japan.")
        self.wuhan = self.told("I come from Wuhan.")
        self.reader = self.told("I like to read.")

    def told(self, beginning: str) -> list[int]:
        return self._block(beginning) + self._encode(FAMILY) + self._encode(" called")

    def greeting(self, beginning: str) -> list[int]:
        return self._block(beginning) + self._encode(" Thank you.")

    def _block(self, text: str) -> list[int]:
        ids = self._encode(text)
        return self._encode("\n") * (BLOCK_SIZE - len(ids)) + ids


Waves = list[list[list[int]]]  # prompts as token ids; those of a wave arrive together


@dataclass(frozen=True)
class Outcome:
    """What the engine did with a wave of prompts."""

    texts: list[str]
    cached: list[int]  # num_cached_tokens of each
    num_finished: int
    error: str
    num_free: int  # blocks in the free queue afterwards
    ref_counts: list[int]


def play(llm: LLM, waves: Waves, fault: Fault = nullcontext, num_blocks: int = LARGE) -> list[Outcome]:
    """One wave after another, greedy; the pool is empty at the beginning."""
    engine, outcomes = llm.engine, []
    with fault():
        manager = BlockManager(num_blocks, BLOCK_SIZE)
        with use_manager(llm, manager):
            for number, wave in enumerate(waves, start=1):
                # Where there is room, the waves before the last one only leave their prompts in the cache.
                is_asked = number == len(waves) or num_blocks < LARGE
                params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS if is_asked else 1, ignore_eos=True)
                before, error = engine.stats.num_finished_requests, ""
                texts, cached = [], []
                try:
                    outputs = llm.generate(wave, params, use_tqdm=False)
                    texts = [output.outputs[0].text for output in outputs]
                    cached = [output.num_cached_tokens for output in outputs]
                except Exception as problem:
                    error = f"{type(problem).__name__}: {problem}"
                ref_counts = [block.ref_count for block in manager.blocks]
                num_finished = engine.stats.num_finished_requests - before
                outcomes.append(Outcome(texts, cached, num_finished, error, len(manager.free_blocks), ref_counts))
    return outcomes


def tell_traps(story: Story, llm: LLM) -> None:
    story.part("Six traps")
    prompts = Prompts(llm)
    japan, wuhan, reader = prompts.japan, prompts.wuhan, prompts.reader
    story.say(
        "The engine runs the same requests with one fault at a time, and without it. There are three prompts, each of "
        "one block of its own, four blocks that are the same in all, and one token more:"
    )
    beginnings = "I come from Japan.", "I come from Wuhan.", "I like to read."
    story.show(Text("".join(f"  {beginning} ...\n" for beginning in beginnings) + f"  ...{FAMILY} called"))
    story.say(
        "[bold]1. Tokens are hashed without their parent.[/] First comes Japan. The reader has only said thank you so "
        "far, and its first block is known; now it sends its prompt, too."
    )
    waves = [[japan], [prompts.greeting("I like to read.")], [reader]]
    tell_trap(story, llm, ["reader"], waves, faults.without_parent)

    story.say("[bold]2. The hash is made of bytes(token_ids).[/] One prompt is enough:")
    story.say(f"  {play(llm, [[japan]], faults.bytes_of_ids)[-1].error}")
    pair = next(pair for pair in zip(japan, wuhan, strict=True) if pair[0] != pair[1])
    ids = ", ".join(f"{llm.get_tokenizer().decode([i])!r} is {i} = 256 * {i // 256} + {i % 256}" for i in pair)
    story.say(f"The first fix that comes to mind is i % 256, and it runs. {ids}.")
    tell_trap(story, llm, ["Wuhan"], [[japan], [wuhan]], faults.low_bytes_of_ids)

    story.say(
        "[bold]3. References stay raised when there is no room.[/] The pool has 16 blocks, and three waves of "
        "prompts come:"
    )
    table = Table("wave", "answered", "free blocks afterwards", "references that nobody holds")
    waves = [[japan, wuhan, reader], [japan, wuhan, reader], [list(range(1000, 1060))]]
    played = play(llm, waves, faults.references_stay, num_blocks=16)
    for number, (wave, outcome) in enumerate(zip(waves, played, strict=True), start=1):
        answered, counts = f"{outcome.num_finished} of {len(wave)}", " ".join(map(str, outcome.ref_counts))
        table.add_row(str(number), answered, str(outcome.num_free), counts)
    story.show(table)
    outcomes = played[-1].error, play(llm, waves, num_blocks=16)[-1].error or "it is answered"
    story.say(
        "The third wave is one prompt of 60 tokens, 8 blocks, that shares nothing. With the fault: {} (after the "
        "failed step the pool is forgotten, and all references with it). Without: {}.".format(*outcomes)
    )

    story.say(
        "[bold]4. Hits are left in the free queue.[/] The pool has 10 blocks; the reader comes again, with Japan "
        "beside it:"
    )
    tell_trap(story, llm, ["reader", "Japan"], [[reader], [reader, japan]], faults.hits_stay_free, num_blocks=10)

    story.say(
        "[bold]5. A block that is taken keeps its old hash.[/] The pool has 8 blocks; Japan comes, then the "
        "reader, then:"
    )
    tell_trap(story, llm, ["Japan"], [[japan], [reader], [japan]], faults.names_stay, num_blocks=8)

    story.say(
        "[bold]6. Of a fully cached prompt nothing is computed.[/] The prompts come without their last token, so they "
        "have 5 blocks."
    )
    story.say(f"  Alone: {play(llm, [[japan[:-1]]] * 2, faults.nothing_left)[-1].error}")
    story.say("Beside another request, Japan's first token is sampled from the row before its own, the reader's last:")
    waves = [[japan[:-1]], [reader, japan[:-1]]]
    tell_trap(story, llm, ["reader", "Japan"], waves, faults.nothing_left)


def tell_trap(story: Story, llm: LLM, names: list[str], waves: Waves, fault: Fault, num_blocks: int = LARGE) -> None:
    """The answers to the last wave, right and wrong, as much of them as fits on a line."""
    right, wrong = (play(llm, waves, mode, num_blocks)[-1] for mode in (nullcontext, fault))
    table = Table("who asks", "found", "the answer", "found", "with the fault")
    for name, *columns in zip(names, right.cached, right.texts, wrong.cached, wrong.texts, strict=False):
        table.add_row(name, *(textwrap.shorten(str(column), 33, placeholder="") for column in columns))
    story.show(wrong.error or table)
