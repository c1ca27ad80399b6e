"""Checks of chapter 5: a scheduler with the student's method, step by step beside one that is all ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

from chapters.expect import Table, cases, ensure, expect, read_again
from chapters.grading import PROMPTS, Bench, Task, answers_as_before, answers_in_a_small_pool
from chapters.patching import our_engine, replaced, yours_to_write
from chapters.stage import EOS, Stage, compare_with_ours
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import NO_TOKEN, Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

STEP_SECTION = "A step: running first, then newcomers"
DRY_SECTION = "When the paper runs out"


def random_workloads(function: Any, bench: Bench) -> None:
    """Random workloads in tiny pools: each step is the same as ours, and everybody's request ends"""
    for seed in range(40):
        rng = Random(seed)
        limits: dict[str, Any] = {"num_blocks": rng.randint(5, 11), "max_num_seqs": rng.randint(1, 5)}
        limits |= {"max_num_batched_tokens": rng.choice([1, 2, 3, 5, 8, 13, 21, 34]), "max_model_len": 20}
        limits |= {"long_prefill_token_threshold": rng.choice([0, 0, 3, 5])}
        compare_with_ours(Stage(**limits), Stage(**limits), seed, num_priorities=rng.choice([1, 3]))


# -- finish_reason ----------------------------------------------------------------------------------------------------


class Text:
    """A request's stop checker: notes the tokens of its text. Token 9 completes the stop string "end"."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def append(self, token_ids: list[int]) -> str | None:
        self.token_ids += token_ids
        return "end" if 9 in token_ids else None


def compare_reason(function: Any, hint: str, params: dict, token_id: int, num_generated: int, *expected: Any) -> None:
    """The answer for a sequence of 6 prompt tokens whose num_generated-th token is token_id.

    text: params have stop strings, and these tokens belong to the text.
    """
    given: dict[str, Any] = {"max_tokens": 8} | params
    shown = ", ".join(f"{name}={value}" for name, value in given.items() if name != "text")
    text = given.pop("text", None)
    scheduler = Stage(max_model_len=given.pop("max_model_len", 64)).scheduler
    seq = Sequence([11] * 6, SamplingParams(**given))
    seq.tokens += [12] * (num_generated - 1) + [token_id] * (token_id != NO_TOKEN)
    if text is not None:
        seq.stop_checker = Text()  # pyrefly: ignore[bad-assignment]
        shown += "; with stop strings"
    before = list(seq.tokens)
    got = function(scheduler, seq, token_id)
    only_answers = "finish_reason only answers: the token is in seq.tokens already, and update ends the sequence"
    ensure(seq.tokens == before and seq.status is SequenceStatus.WAITING, only_answers)
    ensure(isinstance(got, tuple), "return a tuple: finish_reason, stop_reason", got=got)
    call = f"token {token_id} as generated token {num_generated} of a prompt of 6; EOS is {EOS}; {shown}"
    expect(expected, got, f"{hint} ({call})")
    if text is not None:
        heard = seq.stop_checker.token_ids  # pyrefly: ignore[missing-attribute]
        expect(text, heard, f"what the stop checker was given: {hint} ({call})")


FIRST = "it is one of the first min_tokens: neither EOS nor a stop token id may end it"
ONCE = "the stop checker gets each token of the text, once"
NO_TEXT = "a token that ends the sequence as EOS or stop token is no part of the text: the stop checker does not get it"
HELD_BACK = "among the first min_tokens an EOS or stop token ends nothing, so it belongs to the text"
BEFORE_LENGTH = "a stop comes before a length: the text ended by itself"
COUNTS = "max_tokens counts generated tokens, the new one included"
LENGTH = "max_model_len counts prompt and output, the new token included"
REASONS: Table = {  # hint, params, token, its number, and what to answer
    "an ordinary token ends nothing": [
        ("nothing ends this sequence", {}, 7, 3, None, None),
        ("max_tokens=None is no limit", dict(max_tokens=None), 7, 30, None, None),
    ],
    "EOS stops, unless it is ignored": [
        ("EOS ends it, and is no stop_reason", {}, EOS, 3, "stop", None),
        ("this sequence ignores EOS", dict(ignore_eos=True), EOS, 3, None, None),
    ],
    "a stop token id stops, and is named": [
        ("a stop token id ends it, and is the stop_reason", dict(stop_token_ids=[5, 7]), 7, 3, "stop", 7),
        ("ignore_eos is about EOS only", dict(stop_token_ids=[7], ignore_eos=True), 7, 3, "stop", 7),
    ],
    "the last token that max_tokens allows ends it": [
        (COUNTS, {}, 7, 7, None, None),
        (COUNTS, {}, 7, 8, "length", None),
    ],
    "max_model_len ends it, prompt and output together": [
        (LENGTH, dict(max_tokens=None, max_model_len=20), 7, 13, None, None),
        (LENGTH, dict(max_tokens=None, max_model_len=20), 7, 14, "length", None),
    ],
    "the first rule that applies decides": [
        (BEFORE_LENGTH, {}, EOS, 8, "stop", None),
        (BEFORE_LENGTH, dict(stop_token_ids=[7]), 7, 8, "stop", 7),
        (BEFORE_LENGTH, dict(max_tokens=None, max_model_len=20), EOS, 14, "stop", None),
        (BEFORE_LENGTH, dict(max_tokens=None, max_model_len=20, stop_token_ids=[7]), 7, 14, "stop", 7),
        (BEFORE_LENGTH, dict(max_tokens=None, max_model_len=20, text=[9]), 9, 14, "stop", "end"),
        ("EOS is asked for before the stop token ids", dict(stop_token_ids=[EOS]), EOS, 3, "stop", None),
        ("an EOS that is ignored may be a stop id", dict(stop_token_ids=[0], ignore_eos=True), EOS, 3, "stop", EOS),
    ],
    "the first min_tokens do not stop it, from then on everything does": [
        (FIRST, dict(min_tokens=4), EOS, 3, None, None),
        (FIRST, dict(min_tokens=4, stop_token_ids=[7]), 7, 3, None, None),
        ("the last of the first min_tokens may not end it either", dict(min_tokens=4), EOS, 4, None, None),
        ("min_tokens have come before it: EOS may end it", dict(min_tokens=4), EOS, 5, "stop", None),
        ("min_tokens holds back the stops, never a length", dict(min_tokens=8), 7, 8, "length", None),
    ],
    "a stop string ends it, and is named": [
        ("token 9 completes the stop string", dict(text=[9]), 9, 3, "stop", "end"),
        (ONCE, dict(text=[7]), 7, 3, None, None),
        (BEFORE_LENGTH, dict(text=[9]), 9, 8, "stop", "end"),
        (f"the last token allowed is text, too: {ONCE}", dict(text=[7]), 7, 8, "length", None),
    ],
    "the stop checker hears of the text, and of nothing else": [
        (NO_TEXT, dict(text=[]), EOS, 3, "stop", None),
        (NO_TEXT, dict(text=[], stop_token_ids=[9]), 9, 3, "stop", 9),
        ("an EOS that is ignored is a token of the text", dict(text=[EOS], ignore_eos=True), EOS, 3, None, None),
        (HELD_BACK, dict(text=[EOS], min_tokens=4), EOS, 3, None, None),
        (HELD_BACK, dict(text=[7], min_tokens=4, stop_token_ids=[7]), 7, 3, None, None),
    ],
    "without a token nothing can go on": [
        ("NO_TOKEN is no token: it ends the sequence with an error", {}, NO_TOKEN, 3, "error", None),
        ("an error comes first, and NO_TOKEN is no text", dict(text=[], min_tokens=5), NO_TOKEN, 3, "error", None),
    ],
}


def ends_in_texts(function: Any, bench: Bench) -> None:
    """the real model's answers end at the same strings"""

    def answers(strings: list[str]) -> list[tuple[Any, ...]]:
        bench.llm.reset_prefix_cache()
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=strings)
        outputs = bench.llm.generate(PROMPTS, params, False)
        samples = [output.outputs[0] for output in outputs]
        return [(one.text, len(one.token_ids), one.finish_reason, one.stop_reason) for one in samples]

    with our_engine():
        strings = [text[len(text) // 2 :][:3] or "?" for text, *_ in answers([])]
        expected = answers(strings)
    for prompt, ours, theirs in zip(PROMPTS, expected, answers(strings), strict=True):
        hint = f"stop={strings}, the answer to {prompt!r}: its text, number of tokens, finish_reason and stop_reason"
        expect(ours, theirs, hint)


# -- preempt_last -----------------------------------------------------------------------------------------------------


def filled(stage: Stage, *prompts: int | list[int]) -> Stage:
    """With requests of these prompts, or of prompts of these lengths."""
    for prompt in prompts:
        stage.add(prompt)
    return stage


def three_run_one_waits() -> Stage:
    stage = filled(Stage(max_num_seqs=3), 7, 7, 7, 7)
    with our_engine():
        stage.step()
        stage.step()
    return stage


def youngest_leaves(function: Any, bench: Bench) -> None:
    """the youngest leaves running, and is returned"""
    stage = three_run_one_waits()
    got = function(stage.scheduler)
    hint = "return the sequence that you preempted" if got is None else "the last of running is the youngest"
    expect("C", stage.list_names([got]) if isinstance(got, Sequence) else got, hint)
    expect("A B", stage.list_names(stage.scheduler.running), "only the youngest leaves running")


def head_of_the_queue(function: Any, bench: Bench) -> None:
    """it stands at the head of waiting, and of two the older is in front"""
    stage = three_run_one_waits()
    hint = "a preempted sequence goes to the head of waiting: it came before those that wait"
    for expected in ("C D", "B C D"):
        function(stage.scheduler)
        expect(expected, stage.list_names(stage.scheduler.waiting), hint)


def before_its_priority(function: Any, bench: Bench) -> None:
    """with priorities: it waits before those of its own, and behind the more important"""
    stage = Stage(max_num_seqs=3)
    for priority in (1, 1, 2):  # A B C run
        stage.add(7, priority=priority)
    with our_engine():
        stage.step()
    for priority in (0, 1, 2, 3):  # D E F G wait
        stage.add(7, priority=priority)
    hint = "running A 1, B 1, C 2, waiting D 0, E 1, F 2, G 3 (the numbers are priorities, the lowest comes first)"
    for expected in ("D E C F G", "D B E C F G", "D A B E C F G"):
        function(stage.scheduler)
        why = "a preempted sequence waits before the others of its priority, and behind all that are more important"
        expect(expected, stage.list_names(stage.scheduler.waiting), f"{why}; {hint}, one after another preempted")


def blocks_come_back(function: Any, bench: Bench) -> None:
    """its blocks are in the pool again, and only its own"""
    stage = three_run_one_waits()
    seq, free = stage.seqs["C"], stage.manager.free_blocks
    expected = f"{len(free) + len(seq.block_table)} free blocks, block_table []"
    function(stage.scheduler)
    hint = "the blocks of the preempted sequence must go back to the pool, through block_manager.free"
    expect(expected, f"{len(free)} free blocks, block_table {seq.block_table}", hint)


def starts_again(function: Any, bench: Bench) -> None:
    """it waits with nothing computed, and with all its tokens"""
    stage = three_run_one_waits()
    seq = stage.seqs["C"]
    tokens = list(seq.tokens)
    seq.num_cached_tokens = 4  # as after a hit
    function(stage.scheduler)
    hint = "its tokens, the generated ones too, must be kept: without them nothing can be recomputed"
    expect(tokens, seq.tokens, hint)
    expect("WAITING", seq.status.name, "its status must say that it waits")
    hint = "it no longer owns its K/V: num_computed_tokens and num_cached_tokens must be 0"
    expect((0, 0), (seq.num_computed_tokens, seq.num_cached_tokens), hint)
    stage.check()


def counted(function: Any, bench: Bench) -> None:
    """it is counted"""
    stage = three_run_one_waits()
    function(stage.scheduler)
    function(stage.scheduler)
    expect(2, stage.scheduler.num_preemptions, "num_preemptions counts preemptions, and there were two")


# -- schedule ---------------------------------------------------------------------------------------------------------


def one_request(function: Any, bench: Bench) -> None:
    """a request is admitted, computed whole, and then decodes one token a step"""
    stage = Stage()
    seq = stage.add(6)
    output = stage.schedule()
    expect("A 0..6", stage.describe(output), "one prompt, and room for it: it is computed whole")
    hint = "a sequence that is admitted leaves waiting and goes into running (to the end, if all have one priority)"
    expect("running: A; waiting: nobody", stage.describe_queues(), hint)
    expect("PREFILL", seq.status.name, "a sequence that is admitted gets status PREFILL")
    stage.finish(output)
    stage.expect_step("A 6..7", "a decode computes the one token that was sampled last")
    stage.expect_step("A 7..8", "a decode computes the one token that was sampled last")


def running_first(function: Any, bench: Bench) -> None:
    """running sequences first, newcomers after them, all in one step"""
    stage = filled(Stage(), 6, 3)
    stage.expect_step("A 0..6, B 0..3", "both prompts fit into one step")
    stage.add(5)
    stage.expect_step("A 6..7, B 3..4, C 0..5", "running sequences first, oldest first; newcomers in the same step")


@read_again("Four states and one chase")
def cached_prefix(function: Any, bench: Bench) -> None:
    """what is found in the cache is not computed again"""
    stage = Stage()
    stage.add(list(range(1, 10)))
    stage.expect_step("A 0..9", "one prompt, and room for it: it is computed whole")
    stage.add([*range(1, 9), 50, 51])
    hint = "B's first 8 tokens are cached: allocate_with_prefix has set num_computed_tokens, and the chunk is the rest"
    stage.expect_step("A 9..10, B 8..10", hint)


def budget(function: Any, bench: Bench) -> None:
    """one budget for the whole step; a long prompt gets what the others leave"""
    stage = filled(Stage(max_num_batched_tokens=8), 5, 3)
    stage.expect_step("A 0..5, B 0..3", "5 and 3 tokens fill the budget of 8")
    stage.add(17)
    stage.add(2)
    hint = "max_num_batched_tokens=8 is for the whole step, the decodes of A and B included"
    stage.expect_step("A 5..6, B 3..4, C 0..6", hint)
    stage.expect_step("A 6..7, B 4..5, C 6..12", f"{hint}; C is in the middle of its prompt")
    stage.expect_step("A 7..8, B 5..6, C 12..17, D 0..1", "C's prompt ends, and the one token that is left goes to D")


def small_budget(function: Any, bench: Bench) -> None:
    """a budget smaller than the number of requests"""
    stage = Stage(max_num_batched_tokens=2)
    for max_tokens in (3, 9, 9):
        stage.add(1, max_tokens=max_tokens)
    for expected in ("A 0..1, B 0..1", "A 1..2, B 1..2", "A 2..3, B 2..3"):
        stage.expect_step(expected, "the budget of 2 is spent after two tokens")
    stage.expect_step("B 3..4, C 0..1", "A has ended: B is the oldest, and C comes in")


def seats(function: Any, bench: Bench) -> None:
    """no more than max_num_seqs run"""
    stage = filled(Stage(max_num_seqs=2), 3, 3, 3)
    hint = "max_num_seqs=2: two may run, C waits although there are budget and blocks"
    stage.expect_step("A 0..3, B 0..3", hint)
    stage.expect_step("A 3..4, B 3..4", hint)


def threshold(function: Any, bench: Bench) -> None:
    """long_prefill_token_threshold limits each chunk, and the budget is for the rest"""
    stage = filled(Stage(max_num_batched_tokens=16, long_prefill_token_threshold=5), 11, 12, 3)
    hint = (
        "long_prefill_token_threshold=5: no chunk has more than 5 tokens, and what is left of the budget of 16 goes on"
    )
    stage.expect_step("A 0..5, B 0..5, C 0..3", f"{hint} to the next who waits")
    stage.expect_step("A 5..10, B 5..10, C 3..4", f"{hint}: A and B are in the middle of their prompts, both")
    stage.expect_step("A 10..11, B 10..12, C 4..5", hint)


def priorities(function: Any, bench: Bench) -> None:
    """a more important newcomer goes before those who run, not behind them"""
    stage = Stage(6)
    stage.add(11, priority=1)
    stage.expect_step("A 0..11", "one prompt, and room for it: it is computed whole")
    stage.add(11, priority=0)
    output = stage.schedule()
    expect("A 11..12, B 0..11", stage.describe(output), "A runs, B is admitted")
    expect("B A", stage.list_names(stage.scheduler.running), f"A has priority 1, B has 0: {ORDER}")
    stage.finish(output)
    hint = "B has priority 0 and A priority 1: B asks first, and when no block is free, A gives way"
    stage.expect_step("B 11..12; preempted: A", hint)
    stage = Stage(16)
    for priority in (1, 0, 1, 0):
        stage.add(3, priority=priority)
        output = stage.schedule()
        names, hint = stage.list_names(stage.scheduler.running), "of A 1, B 0, C 1 and D 0 one came in each step"
        expect(IN_ORDER[names.count(" ")], names, f"{hint}: {ORDER}")
        stage.finish(output)


IN_ORDER = "A", "B A", "B A C", "B D A C"
ORDER = "running is sorted by priority, and a newcomer stands behind the others of its own"


def nobody_overtakes(function: Any, bench: Bench) -> None:
    """the first that does not fit stops the admissions"""
    stage = filled(Stage(8), 14, 20, 3)
    hint = "B does not fit into the 4 blocks that A leaves, and C comes after B: nobody overtakes"
    stage.expect_step("A 0..14", hint)
    expect("running: A; waiting: B C", stage.describe_queues(), "a sequence that is not admitted keeps its place")


@read_again(DRY_SECTION)
def youngest_gives_way(function: Any, bench: Bench) -> None:
    """no block is free: the youngest gives way"""
    stage = filled(Stage(6), 11, 11)
    stage.expect_step("A 0..11, B 0..11", "both prompts fit")
    stage.expect_step("A 11..12, B 11..12", "both have room for one more token")
    hint = "A needs a fourth block and there is none: the last of running is preempted, and A is tried again"
    stage.expect_step("A 12..13; preempted: B", hint)
    expect("running: A; waiting: B", stage.describe_queues(), hint)


@read_again(DRY_SECTION)
def itself(function: Any, bench: Bench) -> None:
    """the youngest asks first: it gives way itself"""
    stage = filled(Stage(4), 6, 7)
    stage.expect_step("A 0..6, B 0..7", "both prompts fit")
    stage.expect_step("A 6..7, B 7..8", "both have room for one more token")
    hint = "A has room; B needs a block, and B is the last of running: B itself is preempted"
    stage.expect_step("A 7..8; preempted: B", hint)


@read_again("What beginners get wrong")
def admits_nobody(function: Any, bench: Bench) -> None:
    """a step that preempted admits nobody"""
    stage = filled(Stage(4), [1, 2, 3, 4], [1, 2, 3, 4])  # twins: same prompt, same tokens after it
    stage.expect_step("A 0..4, B 3..4", "B finds A's block in the cache; its last token is computed for the logits")
    for at in (4, 5, 6, 7):
        stage.expect_step(f"A {at}..{at + 1}, B {at}..{at + 1}", "two decodes")
    hint = "B gives way. A holds the same full blocks, so B would fit at once; but a step that preempted admits nobody"
    stage.expect_step("A 8..9; preempted: B", hint)


@contextmanager
def use_schedule(function: Any) -> Iterator[None]:
    parts = yours_to_write(Scheduler, "num_new_tokens", "make_room", "admit")
    with parts, replaced(Scheduler, "schedule", function):
        yield


ENDS = cases(compare_reason, REASONS)
SMALL = answers_in_a_small_pool
ANSWERS = random_workloads, answers_as_before
PREEMPTS = youngest_leaves, head_of_the_queue, before_its_priority, blocks_come_back, starts_again, counted
STEPS = one_request, running_first, cached_prefix, budget, small_budget, threshold, seats, nobody_overtakes
DRY = youngest_gives_way, itself, admits_nobody
REASON_CHECKS = *ENDS, *ANSWERS, ends_in_texts


TASKS = [
    Task("finish_reason", "Taking the tokens in", partial(replaced, Scheduler, "check_stop"), REASON_CHECKS),
    Task("preempt_last", DRY_SECTION, partial(replaced, Scheduler, "preempt_last"), (*PREEMPTS, *ANSWERS, SMALL)),
    Task("schedule", STEP_SECTION, use_schedule, (*STEPS, priorities, *DRY, *ANSWERS, SMALL)),
]
