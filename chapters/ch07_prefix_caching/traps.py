"""The lab's six traps: the faults of faults.py in the real engine with a real model, and what it answers then."""

import textwrap
from contextlib import nullcontext
from dataclasses import dataclass

from rich.table import Table

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


def tell_trap(story: Story, llm: LLM, names: list[str], waves: Waves, fault: Fault, num_blocks: int = LARGE) -> None:
    """The answers to the last wave, right and wrong, as much of them as fits on a line."""
    right, wrong = (play(llm, waves, mode, num_blocks)[-1] for mode in (nullcontext, fault))
    table = Table("who asks", "found", "the answer", "found", "with the fault")
    for name, *columns in zip(names, right.cached, right.texts, wrong.cached, wrong.texts, strict=False):
        table.add_row(name, *(textwrap.shorten(str(column), 33, placeholder="") for column in columns))
    story.show(wrong.error or table)
