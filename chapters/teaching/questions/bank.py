"""What the exam's questions are made of, and what plays the engine for them. Needs no torch."""

import inspect
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from chapters.published import config_of
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from nanovllm.sampling_params import SamplingParams

T = TypeVar("T")
KINDS = ("compute", "trace", "fault", "explain", "decide")
Marks = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Question:
    """text and answer are Markdown. marks: (points, what they are given for), the marking scheme."""

    text: str
    answer: str
    marks: Marks

    @property
    def points(self) -> int:
        return sum(points for points, _ in self.marks)


class Draw:
    """Chance, the same on every machine: of random.Random, later Pythons keep the numbers of random() only."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return low + int(self._rng.random() * (high - low + 1))

    def numbers(self, count: int, low: int, high: int) -> list[int]:
        return [self.number(low, high) for _ in range(count)]

    def some(self, things: Iterable[T], count: int) -> list[T]:
        """So many different ones, in an order drawn by chance."""
        left = list(things)
        return [left.pop(self.number(0, len(left) - 1)) for _ in range(count)]

    def one_of(self, things: Iterable[T]) -> T:
        return self.some(things, 1)[0]

    def until(self, make: Callable[[], T], is_good: Callable[[T], object]) -> T:
        """Draw again as long as a person could not work with it: a tie, two answers, nothing to compute."""
        for _ in range(2000):
            if is_good(made := make()):
                return made
        raise AssertionError("this question's condition is never met")


@dataclass(frozen=True)
class Entry:
    """A question of the bank. is_fixed: without numbers of its own, the same in every exam."""

    name: str
    chapter: int
    kind: str
    is_fixed: bool
    make: Callable[[Draw], Question]

    def drawn(self, seed: str) -> Question:
        return self.make(Draw(f"{seed}/{self.name}"))


BANK: dict[str, Entry] = {}


def asks(chapter: int, kind: str, is_fixed: bool = False) -> Callable[[Callable], Callable]:
    """Put a function Draw -> Question into the bank."""
    assert kind in KINDS

    def register(make: Callable[[Draw], Question]) -> Callable[[Draw], Question]:
        BANK[make.__name__] = Entry(make.__name__, chapter, kind, is_fixed, make)
        return make

    return register


# -- texts ------------------------------------------------------------------------------------------------------------


def text(words: str, **blocks: str) -> str:
    """A question's Markdown: a line for each paragraph, so that no number begins one. blocks: put in for {name}."""
    paragraphs = [" ".join(paragraph.split()) for paragraph in words.strip().split("\n\n")]
    return "\n\n".join(blocks.get(paragraph.strip("{}"), paragraph) for paragraph in paragraphs)


def table(heads: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    lines = [[*map(str, heads)], *([*map(str, row)] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def code_of(function: Callable) -> str:
    """As a block of Markdown, without its docstring, which would give the fault away."""
    source = inspect.getsource(function)
    if function.__doc__:
        source = source.replace(f'    """{function.__doc__}"""\n', "")
    return f"```python\n{source.strip()}\n```"


def listed(things: Iterable[Any]) -> str:
    """a, b and c"""
    *first, last = map(str, things)
    return f"{', '.join(first)} and {last}" if first else last


# -- the engine -------------------------------------------------------------------------------------------------------


def model(layers: int, heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    """What else a checkpoint says changes no answer of an exam."""
    hidden_size = heads * head_dim
    return config_of(32_000, hidden_size, 4 * hidden_size, layers, heads, kv_heads, head_dim, False)


def scheduler(num_blocks: int, block_size: int, budget: int, caching: bool = False, **options: Any) -> Scheduler:
    manager = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
    options = {"max_num_seqs": 8, "max_model_len": num_blocks * block_size, **options}
    return Scheduler(manager, max_num_batched_tokens=budget, **options)


def request(num_prompt: int, max_tokens: int, first_id: int = 100, **options: Any) -> Sequence:
    """No two requests with first_ids that lie apart have a token in common."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(list(range(first_id, first_id + num_prompt)), params, **options)


@dataclass
class Step:
    """num_tokens and preempted are by the requests' names."""

    num_tokens: dict[str, int]
    preempted: list[str]
    num_logits: int


def one_step(engine: Scheduler, seqs: dict[str, Sequence]) -> Step:
    """The model answers the token 7, always."""
    names = {seq.seq_id: name for name, seq in seqs.items()}
    output = engine.schedule()
    num_logits = sum(chunk.num_logits for chunk in output.chunks)
    num_tokens = {names[chunk.seq.seq_id]: chunk.end - chunk.start for chunk in output.chunks}
    engine.update(output, output.per_chunk([7] * num_logits))
    engine.check_integrity()
    return Step(num_tokens, [names[seq.seq_id] for seq in output.preempted], num_logits)


def play(engine: Scheduler, seqs: dict[str, Sequence]) -> list[Step]:
    """Hand all requests in, and step until all have ended."""
    for seq in seqs.values():
        engine.add(seq)
    steps = []
    while engine.has_unfinished():
        steps.append(one_step(engine, seqs))
    return steps


def steps_table(steps: list[Step], names: Iterable[str]) -> str:
    names = [*names]
    rows = ([number, *(step.num_tokens.get(name, "-") for name in names)] for number, step in enumerate(steps, 1))
    return table(["step", *names], rows)
