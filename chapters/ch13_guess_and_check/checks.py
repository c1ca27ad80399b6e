"""Grading of the exercises of chapter 13: on small examples, then in the engine. (resume: checks_resume.py)"""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, product
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from chapters.ch13_guess_and_check import checks_resume
from chapters.ch13_guess_and_check.again import BLOCK_SIZE, Cache
from chapters.ch13_guess_and_check.float32_bench import REPEATING, Float32Bench, compare_answers, engine_of
from chapters.ch13_guess_and_check.world import Always, Proposes, drafting, steps_watched
from chapters.expect import cases, expect, expect_sane, read_again, unchanged
from chapters.grading import Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm import SamplingParams
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus
from nanovllm.features.speculation import choose as speculation_module
from nanovllm.features.speculation.choose import Speculation

Guess = Callable[[dict[Any, Any], list[int], int, int, int], list[int]]
AcceptTokens = Callable[[Scheduler, ScheduledChunk, list[int]], None]
ShareGuesses = Callable[[list[float], list[int], list[float], float], list[int]]

CACHE_SECTION = "What a cache must not keep"
AGAIN = [1, 2, 3, 50, 9, 2, 3, 60, 1, 2, 3]


# -- guess ------------------------------------------------------------------------------------------------------------


def search(tokens: list[int], num_draft_tokens: int, longest: int, shortest: int) -> list[int]:
    """The slow way: go through the text, from the end to the beginning, once for each length."""
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[-n:]:
                repeated = tokens[place:] * (num_draft_tokens + 1)
                return repeated[:num_draft_tokens]
    return []


class Counted(list):
    """A list of tokens that counts how many are read."""

    num_read = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_read += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        for token in super().__iter__():
            self.num_read += 1
            yield token

    def _whole(name: str) -> Any:  # pyrefly: ignore[invalid-annotation]
        def method(self: "Counted", *args: Any) -> Any:
            self.num_read += len(self)
            return getattr(list, name)(self, *args)

        return method

    for _name in ("__add__", "__mul__", "__contains__", "__eq__", "__reversed__", "copy", "count", "index"):
        locals()[_name] = _whole(_name)


def ask_guess(
    function: Guess,
    tokens: list[int],
    sizes: tuple[int, int, int],
    hint: str = "return what a search through the text finds",
    memory: dict[Any, Any] | None = None,
    most_read: float = 1e9,
) -> None:
    given = Counted(tokens) if most_read < 1e9 else list(tokens)
    got: Any = function({} if memory is None else memory, given, *sizes)
    num_read = given.num_read if isinstance(given, Counted) else 0
    if list.__ne__(given, tokens):
        raise Wrong("tokens, which you were given, have been changed")
    expected = search(tokens, *sizes)
    if not isinstance(got, list) or got != expected:
        shown = f"{'..., ' * (len(tokens) > 16)}{', '.join(map(str, tokens[-16:]))}"
        sizes_shown = "{} draft tokens, n-grams of {} to {}".format(*sizes)
        raise Wrong(f"after [{shown}], {sizes_shown}: {hint}", expected=expected, got=got)
    if num_read > most_read:
        hint = "a call reads what is new, and a few tokens more; it does not go through the text again"
        raise Wrong(hint, expected=f"at most {most_read:.0f} tokens read", got=f"{num_read} of {len(tokens)}")


def check_growing(function: Guess, bench: Bench) -> None:
    """300 growing texts, several tokens at a time, agree with a search"""
    rng = random.Random(13)
    for _ in range(300):
        shortest = rng.randint(1, 3)
        sizes = rng.randint(1, 6), rng.randint(shortest, 5), shortest
        memory: dict[Any, Any] = {}
        tokens: list[int] = rng.choices(range(rng.choice([2, 3, 8])), k=rng.randint(1, 12))
        for _ in range(12):
            ask_guess(function, list(tokens), sizes, memory=memory)
            tokens += rng.choices(range(3), k=rng.randint(1, 4))


@read_again(CACHE_SECTION)
def check_fails(function: Guess, bench: Bench) -> None:
    """A step has failed: the last tokens are gone, and different ones come"""
    hint = "there are fewer tokens than last time: forget what was noted about those that are gone"
    for tokens, shortest in (([1, 2, 3, 5, 1, 8, 1, 2], 1), ([1, 2, 3, 5, 1, 8, 2, 4], 2)):
        memory: dict[Any, Any] = {}
        ask_guess(function, [1, 2, 3, 5, 1, 2, 4, 9, 9], (2, 2, shortest), memory=memory)
        ask_guess(function, tokens, (2, 2, shortest), hint, memory)


def check_reads_little(function: Guess, bench: Bench) -> None:
    """A text of 4,000 tokens is read once, and not again"""
    rng = random.Random(1)
    memory: dict[Any, Any] = {}
    tokens, sizes = rng.choices(range(300), k=4000), (5, 4, 2)
    ask_guess(function, list(tokens), sizes, memory=memory)
    for _ in range(30):
        at, num_new = rng.randrange(3900), rng.randint(1, 4)
        tokens += tokens[at : at + num_new]
        ask_guess(function, list(tokens), sizes, memory=memory, most_read=200)


def check_guess_generates(function: Guess, bench: Bench) -> None:
    """The engine generates with your draft tokens: the same tokens, in fewer steps"""
    memories = WeakKeyDictionary[Sequence, dict]()

    def draft_for(seq: Sequence, num_draft_tokens: int) -> list[int]:
        draft = function(memories.setdefault(seq, {}), Counted(seq.tokens), num_draft_tokens, 3, 1)
        expect(search(seq.tokens, num_draft_tokens, 3, 1), draft, "in the engine, beside other sequences")
        return draft

    with engine_of(bench) as other:
        expected = other.expected
        with drafting(other.llm, Proposes(draft_for), 4), steps_watched(other.llm) as steps:
            compare_answers(other, expected)
        if sum(step.num_accepted for step in steps) == 0:
            raise Wrong("not one draft token was accepted, in texts that repeat themselves")


GUESS_CHECKS = (
    *cases(
        ask_guess,
        {
            "The text goes on as it did before": [
                ([1, 2, 3, 9, 1, 2], (2, 3, 1), "1, 2 was followed by 3, 9"),
                ([1, 2, 3, 4], (2, 3, 1), "nothing occurs twice: return []"),
                ([4], (2, 3, 1), "a single token has no earlier place"),
            ],
            "The longest n-gram counts, then the newest place": [
                (AGAIN, (1, 3, 1), "1, 2, 3 counts more than 2, 3, although it is older"),
                (AGAIN, (1, 2, 1), "with n-grams of at most two tokens, the newest 2, 3 counts"),
                (AGAIN, (1, 8, 4), "no n-gram of four tokens occurs twice"),
                ([7, 1, 8, 7, 2, 9, 7], (1, 3, 1), "of several places the newest counts"),
            ],
            "A text that repeats itself goes on repeating": [
                ([5, 7, 8, 7, 8], (5, 3, 1), "the tokens from that place to the end come again and again"),
                ([3, 3, 3], (4, 2, 1), "3, 3 overlaps itself, one place before"),
                ([1, 2, 3, 1, 2], (7, 2, 1), "beyond the end of the text the same tokens come again"),
            ],
        },
    ),
    check_growing,
    check_fails,
    check_reads_little,
    check_guess_generates,
)


# -- accept_tokens ----------------------------------------------------------------------------------------------------

EOS = 99


def use_accept_tokens(function: AcceptTokens) -> AbstractContextManager[None]:
    def accept_tokens(self: Scheduler, chunk: ScheduledChunk, token_ids: list[int]) -> None:
        function(self, chunk, token_ids)

    return replaced(Scheduler, "accept_tokens", accept_tokens)


def make(num_blocks: int = 40, **options: Any) -> Scheduler:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 60, **options}
    return Scheduler(BlockManager(num_blocks, BLOCK_SIZE), eos_token_ids=frozenset({EOS}), **options)


def one_step(
    function: AcceptTokens, draft: list[int], sampled: list[int], hint: str, num_prompt: int = 6, **params: Any
) -> Scheduler:
    """A prompt 0, 1, 2, ..., a first token 20, then a step with this draft in which this is sampled. Compares."""
    scheduler, stop_checker = make(), params.pop("stop_checker", None)
    seq = Sequence(list(range(num_prompt)), SamplingParams(max_tokens=params.pop("max_tokens", 30), **params))
    scheduler.add(seq)
    scheduler.update(scheduler.schedule(), [[20]])
    output = scheduler.schedule({seq.seq_id: draft})
    [chunk] = output.chunks
    sampled = sampled[: chunk.num_logits]
    before, taken = list(seq.tokens), list[int]()
    copy = Sequence(seq.tokens[:num_prompt], seq.sampling_params)
    copy.tokens = list(seq.tokens)
    seq.stop_checker, copy.stop_checker = stop_checker, stop_checker and type(stop_checker)()
    for token_id, draft_token_id in zip(sampled, [*chunk.draft_token_ids, None], strict=True):
        if token_id != NO_TOKEN:
            taken.append(token_id)
            copy.append(token_id)
        reason, stop_reason = scheduler.check_stop(copy, token_id)
        if reason is not None or token_id != draft_token_id:
            break
    function(scheduler, chunk, sampled)
    said = f"draft tokens {chunk.draft_token_ids}, sampled {sampled}: {hint}"
    expect(taken, seq.tokens[len(before) :], f"{said} (the tokens appended)")
    expect(reason, seq.finish_reason, f"{said} (the finish reason)")
    expect(
        stop_reason, seq.stop_reason, f"{said} (the stop reason: what a client hears of a stop token or stop string)"
    )
    if reason is None:
        expect(SequenceStatus.DECODE, seq.status, "the sequence's status")
        said = f"draft tokens {chunk.draft_token_ids}, sampled {sampled}, so {len(taken)} appended"
        counted = "num_computed_tokens: K and V are right for every token but the one sampled last"
        expect(len(seq.tokens) - 1, seq.num_computed_tokens, f"{said}. {counted}", CACHE_SECTION)
        num_cached = sum(block.block_hash is not None for block in scheduler.block_manager.blocks)
        cached = "blocks that are cached: those full of right K and V; register_prefix goes by num_computed_tokens"
        expect(seq.num_computed_tokens // BLOCK_SIZE, num_cached, f"{said}. {cached}", CACHE_SECTION)
    expect_sane(scheduler, f"{said}: ")
    return scheduler


@read_again(CACHE_SECTION)
def check_ends(function: AcceptTokens, bench: Bench) -> None:
    """The sequence ends within an accepted run"""
    hint = "EOS ends the sequence, even where the draft tokens after it are right"
    one_step(function, [21, EOS, 23], [21, EOS, 23, 24], hint)
    one_step(
        function, [21, 22, 23], [21, 22, 23, 24], "the draft is cut, so max_tokens ends its last row", max_tokens=3
    )
    one_step(function, [21, 22], [21, 55, 23], "a stop token ends it", stop_token_ids=[55])
    one_step(function, [21, EOS, 23], [21, EOS, 23, 24], "EOS may be ignored", ignore_eos=True)


@read_again(CACHE_SECTION)
def check_blocks_back(function: AcceptTokens, bench: Bench) -> None:
    """A sequence that ends gives its blocks back, and what was right can be found"""
    scheduler = one_step(function, [21, 22, 23, 24, EOS], [21, 22, 23, 24, EOS, 1], "it ends", num_prompt=5)
    expect(False, scheduler.has_unfinished(), "the sequence has ended: call scheduler.finish")
    again = Sequence([0, 1, 2, 3, 4, 20, 21, 22, 23, 24, 7, 8, 9])
    scheduler.add(again)
    scheduler.schedule()
    hint = "full blocks are registered before the sequence gives them back"
    expect(8, again.num_cached_tokens, hint)


class Text:
    """A request's stop checker: notes the tokens of its text. Token 55 completes the stop string "end"."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def append(self, token_ids: list[int]) -> str | None:
        self.token_ids += token_ids
        return "end" if 55 in token_ids else None


@read_again(CACHE_SECTION)
def check_stop_strings(function: AcceptTokens, bench: Bench) -> None:
    """A stop string ends among the draft tokens"""
    for draft, sampled, heard in (
        ([21, 22], [21, 22, 23], [21, 22, 23]),
        ([21, 55, 23], [21, 55, 23, 24], [21, 55]),
        ([21, 31, 55], [21, 22, 55, 24], [21, 22]),
        ([21, 55], [21, 22, 23], [21, 22]),
        ([55, 22], [55, 22, 23], [55]),
        ([21, 22], [21, 22, 55], [21, 22, 55]),
    ):
        text = Text()
        hint = "55 completes the stop string, and token ids after it do not count, whatever was drafted"
        scheduler = one_step(function, draft, sampled, hint, stop_checker=text)
        said = f"draft tokens {draft}, sampled {sampled}: what the stop checker has heard. It hears of each token that "
        expect(heard, text.token_ids, f"{said}counts, once, and of no other: nothing can be taken out of a text")
        expect(heard[-1] != 55, scheduler.has_unfinished(), f"{said}counts, and 55 ends the sequence")


def check_no_token(function: AcceptTokens, bench: Bench) -> None:
    """A row without a token ends the sequence with an error"""
    hint = "NO_TOKEN is not appended, and check_stop says that the sequence has ended with an error"
    one_step(function, [], [NO_TOKEN], hint)
    one_step(function, [21, 22], [21, NO_TOKEN, 23], hint)
    one_step(function, [21, 22], [NO_TOKEN, 22, 23], hint)


def next_token(tokens: list[int]) -> int:
    """A rule for how a text goes on; EOS now and then."""
    return EOS if sum(tokens) % 23 == 0 else (7 * sum(tokens) + len(tokens)) % 19


@read_again(CACHE_SECTION)
def check_many(function: AcceptTokens, bench: Bench) -> None:
    """40 requests, right and wrong draft tokens, a pool that is too small: every step reads the K/V that it should"""
    rng = random.Random(3)
    scheduler, cache_model = make(num_blocks=20), Cache(lambda seq: next_token(seq.tokens))

    def mostly_right(seq: Sequence, num_draft_tokens: int) -> list[int]:
        tokens = list(seq.tokens)
        for _ in range(num_draft_tokens):
            tokens.append(next_token(tokens) if rng.random() < 0.7 else rng.randrange(19))
        return tokens[len(seq.tokens) :]

    speculation = Always(Proposes(mostly_right), 5, 10**6)
    seqs = []
    for _ in range(40):
        start = rng.randrange(3)
        seqs.append(Sequence(list(range(start, start + rng.randint(1, 20))), SamplingParams(max_tokens=25)))
        scheduler.add(seqs[-1])
    for _ in range(3000):
        if not scheduler.has_unfinished():
            break
        output = scheduler.schedule(speculation.propose(scheduler))
        scheduler.update(output, cache_model.run(output))
        expect_sane(scheduler)
    for seq in seqs:
        tokens = seq.tokens[: seq.num_prompt_tokens]
        while len(tokens) < seq.num_prompt_tokens + 25 and (len(tokens) == seq.num_prompt_tokens or tokens[-1] != EOS):
            tokens.append(next_token(tokens))
        expect(tokens[seq.num_prompt_tokens :], seq.generated_token_ids, "a request's tokens")


@read_again("Why the output is exactly the same")
def check_accept_generates(function: AcceptTokens, bench: Bench) -> None:
    """The engine generates: the same tokens with draft tokens as without"""
    with engine_of(bench) as other:
        with replaced(Scheduler, "accept_tokens", OUR_ACCEPT_TOKENS):
            expected = other.expected
        with drafting(other.llm, remembers(other), 4), steps_watched(other.llm) as steps:
            compare_answers(other, expected)
        if sum(step.num_accepted for step in steps) < 20:
            raise Wrong("hardly a draft token was accepted, although three of four are right")


OUR_ACCEPT_TOKENS = Scheduler.accept_tokens


def remembers(other: Float32Bench) -> Proposes:
    """Knows what the engine answers; every fourth draft token is wrong."""
    texts = [other.llm.get_tokenizer()(p).input_ids + e for p, e in zip(REPEATING, other.expected, strict=True)]

    def draft_for(seq: Sequence, num_draft_tokens: int) -> list[int]:
        known = len(seq.tokens)
        rest: list[int] = next((text[known:] for text in texts if text[:known] == seq.tokens), [])[:num_draft_tokens]
        return [7 if (known + i) % 4 == 0 else token for i, token in enumerate(rest)]

    return Proposes(draft_for)


ACCEPT_CHECKS = (
    *cases(
        one_step,
        {
            "No draft tokens: the one token is appended": [([], [21], "append what was sampled")],
            "All draft tokens are right: they are accepted, and the token after them is appended, too": [
                ([21, 22], [21, 22, 23], "the last row gives a token, too, although there was no draft token for it"),
                (
                    [21, 22, 23, 24, 25],
                    [21, 22, 23, 24, 25, 26],
                    "accepted tokens may fill a block, which is then registered",
                ),
            ],
            "A draft token is wrong: what was sampled in its place is appended, and nothing after it": [
                ([31], [21, 22], "what was sampled takes the place of the wrong draft token"),
                ([21, 32, 23], [21, 22, 23, 24], "row 2 was computed with 32 before it: what it says does not count"),
                (
                    [21, 22, 23, 34, 35],
                    [21, 22, 23, 24, 25, 26],
                    "three are accepted, so the K/V of those three is right",
                ),
            ],
        },
    ),
    check_ends,
    check_stop_strings,
    check_no_token,
    check_blocks_back,
    check_many,
    check_accept_generates,
)


# -- share_guesses ----------------------------------------------------------------------------------------------------


def rate(acceptances: list[float], counts: list[int], step_s: list[float], draft_s: float) -> float:
    num_tokens = sum(sum(a**j for j in range(n + 1)) for a, n in zip(acceptances, counts, strict=True))
    return num_tokens / (step_s[sum(counts)] + max(counts) * draft_s)


def compare_shares(
    function: ShareGuesses,
    acceptances: list[float],
    limits: list[int],
    step_s: list[float],
    hint: str,
    draft_s: float = 0.0,
) -> list[int]:
    with unchanged("the lists that you were given have been changed", acceptances, limits, step_s):
        got: Any = function(acceptances, limits, step_s, draft_s)
    said = f"acceptances {acceptances}, limits {limits}, step_s {[round(s, 4) for s in step_s]}"
    said += f", draft_s {draft_s}" if draft_s else ""
    if not isinstance(got, list) or len(got) != len(limits) or not all(isinstance(n, int) for n in got):
        raise Wrong(f"return a list of ints, one for each sequence ({said})", got=repr(got)[:80])
    most = len(step_s) - 1
    if any(not 0 <= n <= limit for n, limit in zip(got, limits, strict=True)) or sum(got) > most:
        raise Wrong(f"{said}: no sequence may go above its limit, nor all of them above {most}", got=got)
    possible = product(*(range(limit + 1) for limit in limits))
    choices = [list(counts) for counts in possible if sum(counts) <= most]
    best = max(rate(acceptances, counts, step_s, draft_s) for counts in choices)
    as_good = [counts for counts in choices if rate(acceptances, counts, step_s, draft_s) >= best * (1 - 1e-9)]
    expected = min(as_good, key=sum)
    found = rate(acceptances, got, step_s, draft_s)
    if found < best * (1 - 1e-9):
        what = f"{expected}: {best:.5g} tokens a second"
        raise Wrong(f"{said}: {hint}", expected=what, got=f"{got}: {found:.5g} tokens a second")
    if sum(got) > sum(expected):
        raise Wrong(f"{said}: just as good with fewer draft tokens", expected=expected, got=got)
    return got


def random_steps(num: int) -> Iterator[tuple]:
    rng = random.Random(5)
    for _ in range(num):
        acceptances = [round(rng.random(), 2) for _ in range(rng.randint(1, 4))]
        limits = [rng.randint(0, 4) for _ in acceptances]
        costs = [rng.choice([0.0, 0.05, 0.1, 0.2, 0.5]) for _ in range(rng.randint(0, sum(limits) + 2))]
        draft_s = rng.choice([0.0, 0.0, 0.05, 0.2])
        yield (
            acceptances,
            limits,
            [*accumulate(costs, initial=1.0)],
            "compare all possible numbers of draft tokens",
            draft_s,
        )


def seconds(num: int, first: float, more: float) -> list[float]:
    return [first + more * n for n in range(num)]


class GivenTimes:
    """In place of StepTimes: a machine on which a step takes the time given here, whatever the clock says."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds = seconds

    def add(self, num_rows: int, seconds: float, has_drafts: bool) -> None:
        pass

    def plain(self, num_rows: int) -> float:
        return self.seconds(num_rows)

    def with_drafts(self) -> Callable[[int], float]:
        return self.seconds

    def num_rows_to_try(self, num_rows: int) -> int:
        return 10**6


def check_share_generates(function: ShareGuesses, bench: Bench) -> None:
    """The engine decides with your function: the same tokens, and draft tokens where they pay"""
    num_asked = 0

    def choose(acceptances: list[float], limits: list[int], step_s: list[float], draft_s: float = 0.0) -> list[int]:
        nonlocal num_asked
        num_asked += 1
        return compare_shares(function, acceptances, limits, step_s, "asked by the engine", draft_s)

    with engine_of(bench) as other, replaced(speculation_module, "choose_num_draft_tokens", choose):
        expected = other.expected
        speculation = Speculation(remembers(other), 3, 10**6)
        speculation.times = GivenTimes(lambda num_rows: 10 + 0.5 * num_rows)  # pyrefly: ignore[bad-assignment]
        with patch.dict(other.llm.engine.wings, speculation=speculation), steps_watched(other.llm) as steps:
            compare_answers(other, expected)
        if not num_asked or not any(step.draft_token_ids for step in steps):
            raise Wrong("the engine checked no draft token at all", got=f"it asked {num_asked} times")


ALL = "do not stop at the first number that is no better: look at all"
LARGEST = "the j-th draft token of a sequence adds a**j tokens; take the largest first, of whichever sequence"
DRAFTING = "the time is that of the step and of the draft model's steps: as many as the longest draft has tokens"
TOGETHER = "a step of the draft model makes a token for every sequence that wants one: decide how many steps it takes"
EXPECTED = "expected tokens: 1 + a + a**2 + ..., divided by the seconds of that step"
SHARE_CHECKS = (
    *cases(
        compare_shares,
        {
            ("One sequence: the example, and a step that costs nothing more", "How long a run is"): [
                ([0.5], [3], seconds(4, 10.0, 1.0), EXPECTED),
                ([0.9], [4], seconds(5, 10.0, 0.1), EXPECTED),
            ],
            "Draft tokens that do not pay are left out": [
                ([0.4], [3], seconds(4, 1.0, 0.5), "0.4 tokens more cost half a step's time more"),
                ([0.0, 0.0], [2, 2], seconds(5, 1.0, 0.0), "a draft token that is never accepted adds nothing"),
                ([0.9], [0], [1.0, 1.1], "its limit is 0"),
            ],
            "Seconds that jump: the first draft token does not pay, and three do": [
                ([0.9], [4], [10.0, 20.0, 20.0, 20.0, 21.0], ALL),
                ([0.95], [5], [1.0, 1.99, 2.0, 2.01], "the list of seconds ends before the limit"),
            ],
            "Several sequences: the most probable draft tokens first": [
                ([0.9, 0.3], [4, 4], seconds(9, 10.0, 0.5), LARGEST),
                ([0.5, 0.9, 0.7], [3, 3, 3], seconds(10, 10.0, 0.8), LARGEST),
                ([0.9, 0.9], [1, 5], seconds(5, 10.0, 0.8), "keep the limits"),
            ],
            "A draft model makes them, and its steps cost time, too": [
                ([0.5], [3], seconds(4, 10.0, 1.0), DRAFTING, 2.0),
                ([0.9], [4], seconds(5, 10.0, 0.0), DRAFTING, 1.0),
                ([0.9, 0.8], [4, 4], seconds(9, 10.0, 0.0), TOGETHER, 1.0),
                ([0.95, 0.3, 0.3], [6, 6, 6], seconds(19, 10.0, 0.1), TOGETHER, 2.0),
                ([0.9, 0.5, 0.5, 0.5], [4, 1, 1, 1], seconds(8, 10.0, 0.05), TOGETHER, 3.0),
            ],
            "200 random steps": random_steps(200),
        },
    ),
    check_share_generates,
)

TASKS = [
    Task("guess", "Where draft tokens come from", nullcontext, GUESS_CHECKS),
    Task("accept_tokens", "A draft token is checked by doing the work", use_accept_tokens, ACCEPT_CHECKS),
    Task("share_guesses", "How many draft tokens?", nullcontext, SHARE_CHECKS),
    Task("resume", "Computed again, and the same answer", checks_resume.use_resume, checks_resume.CHECKS),
]
