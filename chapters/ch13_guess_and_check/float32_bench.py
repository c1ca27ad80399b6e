"""The engine that grades chapter 13: in float32, where no token depends on how many rows a step has."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property

from chapters.expect import Wrong
from chapters.grading import PROMPTS, Bench
from nanovllm import SamplingParams

REPEATING = [*PROMPTS, "one two three four one two three four one two", "a b a b a b a b"]
PARAMS = [
    SamplingParams(temperature=t, seed=s, max_tokens=24, ignore_eos=s != 3, frequency_penalty=0.2 * (s == 1))
    for t, s in ((0.0, 0), (0.9, 1), (0.0, 2), (1.2, 3), (0.0, 4))
]


class Float32Bench(Bench):
    """Answers REPEATING. Blocks of four tokens: draft tokens often cross a border."""

    def __init__(self, model: str) -> None:
        super().__init__(model, dtype="float32", max_num_seqs=4, num_gpu_blocks_override=160, block_size=4)

    def answers(self) -> list[list[int]]:
        self.llm.reset_prefix_cache()
        outputs = self.llm.generate(REPEATING, PARAMS, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    @cached_property
    def expected(self) -> list[list[int]]:
        """Without draft tokens."""
        return self.answers()


@cache
def float32_bench(model: str) -> Float32Bench:
    return Float32Bench(model)


@contextmanager
def engine_of(bench: Bench) -> Iterator[Float32Bench]:
    other = float32_bench(bench.model)
    try:
        yield other
    finally:
        other.clean()


def compare_answers(other: Float32Bench, expected: list[list[int]], than: str = "without draft tokens") -> None:
    text = other.llm.get_tokenizer().decode
    for prompt, ours, theirs in zip(REPEATING, expected, other.answers(), strict=True):
        if ours != theirs:
            raise Wrong(f"{prompt!r} is not answered as {than}", expected=text(ours), got=text(theirs))
