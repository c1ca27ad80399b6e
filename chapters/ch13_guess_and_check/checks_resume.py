"""Grading of `resume`: a sequence that is preempted, or whose step fails, goes on with what it returns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from chapters.ch13_guess_and_check.again import Played, answer_alone
from chapters.ch13_guess_and_check.float32_bench import compare_answers, engine_of
from chapters.ch13_guess_and_check.world import Proposes, drafting
from chapters.expect import Wrong, cases, expect
from chapters.grading import Bench
from chapters.patching import replaced, use_manager
from nanovllm.core.block_hash import MMSpan
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

Resume = Callable[[Sequence], Sequence]
OUR_RESET = Sequence.reset
KEPT = "seq_id", "request_id", "stop_checker"  # by which the engine knows it

ALL_TOKENS = "clients have the generated tokens already, and what comes next depends on them: all tokens are kept"
POSITION = (
    "the position in the output is counted from the end of the prompt. If generated tokens become part of the "
    "prompt, the next token is drawn with the number of another position, and max_tokens starts over"
)
SEED = "the next number is made from the seed, and a new Sequence has another one if its sampling_params have none"
SAMPLE = "with n samples of a request, the sample index tells their numbers apart"
ASKED = "keep what the request has asked for, and what the hashes of its blocks are made of"
LOST = "its blocks belong to others by now: it has nothing computed any more, and holds no block"


@contextmanager
def use_resume(function: Resume) -> Iterator[None]:
    """A sequence that is reset becomes what the function returns. The object stays: the engine's requests know it."""

    def reset(seq: Sequence) -> None:
        there = resumed(function, seq)
        vars(seq).update(vars(there) | {name: getattr(seq, name) for name in KEPT})

    with replaced(Sequence, "reset", reset):
        yield


def resumed(function: Resume, seq: Sequence) -> Sequence:
    with replaced(Sequence, "reset", OUR_RESET):  # which the function may call
        got: Any = function(seq)
    if not isinstance(got, Sequence) or got is seq:
        what = "the old one" if got is seq else repr(got)
        raise Wrong("return a new Sequence: the old one is thrown away", expected="a Sequence", got=what)
    return got


# -- one sequence -----------------------------------------------------------------------------------------------------


def running(num_prompt: int = 6, num_generated: int = 5, **params: Any) -> Sequence:
    """A sequence in the middle of its answer, with K/V of all tokens but the last."""
    salt_and_adapter: dict[str, Any] = {"cache_salt": "a tenant", "lora_id": 3, "mm_spans": (MMSpan(1, 2, "picture"),)}
    seq = Sequence(list(range(40, 40 + num_prompt)), SamplingParams(**params), **salt_and_adapter)
    for token_id in range(num_generated):
        seq.append(70 + token_id)
    if seq.sampling_params.seed is None:
        seq.seed = 987654321  # as the engine chooses one
    seq.sample_index, seq.status = 2, SequenceStatus.DECODE
    seq.num_computed_tokens, seq.num_cached_tokens = len(seq.tokens) - 1, 4
    seq.block_table, seq.num_registered_blocks = [5, 1, 8], 2
    return seq


def compare_tokens(function: Resume, num_prompt: int, num_generated: int) -> None:
    seq = running(num_prompt, num_generated)
    tokens = list(seq.tokens)
    there = resumed(function, seq)
    expect(tokens, there.tokens, f"{num_prompt} prompt tokens, {num_generated} generated: {ALL_TOKENS}")
    expect(num_prompt, there.num_prompt_tokens, f"num_prompt_tokens: {POSITION}")


def compare_attributes(function: Resume, params: dict[str, Any], names: tuple[str, ...], hint: str) -> None:
    seq = running(**params)
    there = resumed(function, seq)
    for name in names:
        expect(getattr(seq, name), getattr(there, name), f"{name}: {hint}")


def compare_counts(function: Resume, num_computed_tokens: int, when: str) -> None:
    seq = running()
    seq.num_computed_tokens = num_computed_tokens
    there, fresh = resumed(function, seq), Sequence([1])
    for name in ("block_table", "num_computed_tokens", "num_cached_tokens", "num_registered_blocks", "status"):
        expect(getattr(fresh, name), getattr(there, name), f"{name}, {when}: {LOST}")


# -- many, in an engine -----------------------------------------------------------------------------------------------


def compare_played(function: Resume, options: dict[str, Any]) -> None:
    expected = [answer_alone(seq, 20) for seq in Played().seqs]
    played = Played(**options)
    for number, (ours, theirs) in enumerate(zip(expected, played.answers(), strict=True)):
        happened = f"{played.num_preemptions} preemptions, {played.num_failures} failed steps"
        who = f"sample {number % 2} of request {number // 2}"
        expect(ours, theirs, f"{happened}: {who} gets a different answer from the one it gets alone")


def check_resume_generates(function: Resume, bench: Bench) -> None:
    """A real model, with draft tokens, in a pool that is too small: the same tokens as with room for all"""
    with engine_of(bench) as other:
        expected, scheduler = other.expected, other.llm.engine.scheduler
        before = scheduler.num_preemptions
        wrong = Proposes(lambda seq, num_draft_tokens: [7] * num_draft_tokens)
        with use_manager(other.llm, BlockManager(num_blocks=18, block_size=4)), drafting(other.llm, wrong, 2):
            compare_answers(other, expected, than="where no request is preempted")
        assert scheduler.num_preemptions > before, "the pool is too large"


CHECKS = (
    *cases(compare_tokens, {"Its tokens, and where its prompt ends": [(6, 5), (1, 9), (8, 0)]}),
    *cases(
        compare_attributes,
        {
            "What its next number is made from": [
                ({}, ("seed",), SEED),
                ({"seed": 5}, ("seed",), SEED),
                ({}, ("sample_index",), SAMPLE),
            ],
            "What was asked for": [
                ({"temperature": 0.7, "max_tokens": 9}, ("sampling_params",), ASKED),
                ({}, ("cache_salt", "lora_id", "mm_spans"), ASKED),
            ],
        },
    ),
    *cases(
        compare_counts,
        {
            "What is gone": [
                (10, "all tokens but the last were computed"),
                (13, "a step has failed, and the three tokens that it gave are taken back"),
            ]
        },
    ),
    *cases(
        compare_played,
        {
            "A pool that is too small: every request is answered as if alone": [({"num_blocks": 18},)],
            "Steps that fail, with draft tokens in them": [({"num_draft_tokens": 3, "fails": True},)],
            "All of it at once": [({"num_blocks": 18, "num_draft_tokens": 3, "fails": True},)],
        },
    ),
    check_resume_generates,
)
