"""Checks of chapter 5: a scheduler with the student's method, step by step beside one that is all ours."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from chapters.grading import PROMPTS, Bench, Task, Wrong
from chapters.patching import replaced
from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 4
EOS = 0
METHODS = ("schedule", "preempt_last", "finish_reason_of")
OURS = {name: getattr(Scheduler, name) for name in METHODS}

Check = Callable[[Any, Bench], None]


@contextmanager
def all_ours() -> Iterator[None]:
    """Inside, the engine is as we wrote it, whatever is being checked."""
    installed = {name: getattr(Scheduler, name) for name in METHODS}
    for name in METHODS:
        setattr(Scheduler, name, OURS[name])
    try:
        yield
    finally:
        for name in METHODS:
            setattr(Scheduler, name, installed[name])


class Room:
    """A scheduler whose sequences have names. The tokens it is given depend on the tokens so far only."""

    def __init__(self, num_blocks: int = 32, **limits: int) -> None:
        options: dict = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 4 * num_blocks} | limits
        self.scheduler = Scheduler(BlockManager(num_blocks, BLOCK_SIZE), eos_token_ids=frozenset([EOS]), **options)
        self.seqs: dict[str, Sequence] = {}
        self._names: dict[int, str] = {}
        replacement: Any = self.make_chunk
        self.scheduler.make_chunk = replacement  # type: ignore[method-assign]

    def add(self, name: str, tokens: int | list[int], **params: Any) -> Sequence:
        if isinstance(tokens, int):  # of its own, so that nothing is found in the cache
            tokens = [100 * (len(self.seqs) + 1) + i for i in range(tokens)]
        options: dict = {"max_tokens": 50, "ignore_eos": True} | params
        seq = self.seqs[name] = Sequence(tokens, SamplingParams(**options))
        self._names[seq.seq_id] = name
        self.scheduler.add(seq)
        return seq

    def names(self, seqs: Any) -> str:
        return " ".join(self._names[seq.seq_id] for seq in seqs) or "nobody"

    def line(self) -> str:
        return f"running: {self.names(self.scheduler.running)}; waiting: {self.names(self.scheduler.waiting)}"

    def schedule(self) -> SchedulerOutput:
        """One call of what is being checked. Raises Wrong when its answer makes no sense by itself."""
        output = self.scheduler.schedule()
        if not isinstance(output, SchedulerOutput):
            raise Wrong("a step must answer with a SchedulerOutput", expected="SchedulerOutput", got=repr(output))
        for chunk in output.chunks:
            name = self._names[chunk.seq.seq_id]
            if chunk.seq not in self.scheduler.running:
                hint = (
                    f"{name} has a chunk and is not in running; if it was preempted in this step, its blocks are gone"
                )
                raise Wrong(hint, got=self.describe(output))
        return output

    def describe(self, output: SchedulerOutput) -> str:
        chunks = [f"{self._names[c.seq.seq_id]} {c.start}..{c.end}" for c in output.chunks]
        preempted = f"; preempted: {self.names(output.preempted)}" if output.preempted else ""
        return (", ".join(chunks) or "no chunks") + preempted

    def finish(self, output: SchedulerOutput) -> list[str]:
        """The rest of the step: tokens are sampled and taken in. Returns who ended."""
        num_tokens = sum(chunk.end - chunk.start for chunk in output.chunks)
        if output.num_tokens != num_tokens:
            hint = "num_tokens must be the number of tokens in all chunks"
            raise Wrong(hint, expected=num_tokens, got=output.num_tokens)
        self.check_integrity()
        token_ids = [self._sample(chunk.seq) for chunk in output.chunks if chunk.samples]
        finished = self.scheduler.update(output, token_ids)
        self.check_integrity()
        return [self._names[seq.seq_id] for seq in finished]

    def check_integrity(self) -> None:
        try:
            self.scheduler.check_integrity()
        except AssertionError as error:
            raise Wrong(f"the scheduler's own check_integrity() fails after this step: {error}") from error

    def expect(self, expected: str, hint: str) -> SchedulerOutput:
        output = self.schedule()
        if (got := self.describe(output)) != expected:
            raise Wrong(hint, expected=expected, got=got)
        self.finish(output)
        return output

    def make_chunk(self, seq: Sequence, num_tokens: int) -> ScheduledChunk:
        """The scheduler's own, after a look at what it is given."""
        name, num_needed = self._names[seq.seq_id], seq.num_computed_tokens + num_tokens
        if num_tokens < 1:
            raise Wrong(
                f"{name} got an empty chunk: stop when the budget is spent", got=f"make_chunk({name}, {num_tokens})"
            )
        if num_needed > len(seq.tokens):
            hint = f"{name} gets more tokens than it has left: what is found in the cache is computed already"
            left = len(seq.tokens) - seq.num_computed_tokens
            raise Wrong(hint, expected=f"at most {left}, len(seq.tokens) - seq.num_computed_tokens", got=num_tokens)
        if len(seq.block_table) * BLOCK_SIZE < num_needed:
            hint = f"{name} gets a chunk without having the blocks for it; whoever was preempted in this step has none"
            raise Wrong(hint, expected=f"blocks for {num_needed} tokens", got=f"block_table {seq.block_table}")
        return Scheduler.make_chunk(self.scheduler, seq, num_tokens)

    def _sample(self, seq: Sequence) -> int:
        return (31 * sum(seq.tokens) + 17 * len(seq.tokens)) % 50


def compare_with_ours(seed: int, num_requests: int = 10) -> None:
    """Random requests in a tiny pool: each step of the student's scheduler beside the same step of ours."""
    rng = random.Random(seed)
    num_blocks, budget = rng.randint(5, 11), rng.choice([1, 2, 3, 5, 8, 13, 21, 34])
    limits = {"max_num_seqs": rng.randint(1, 5), "max_num_batched_tokens": budget, "max_model_len": 20}
    theirs, ours = Room(num_blocks, **limits), Room(num_blocks, **limits)
    world = f"workload {seed} ({num_blocks} blocks of {BLOCK_SIZE}, {limits})"
    names, to_come, prompt = iter("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), num_requests, [1, 2, 3, 4]
    for step in range(2000):
        while to_come and rng.random() < 0.5:
            name, to_come = next(names), to_come - 1
            if rng.random() < 0.7:  # otherwise a twin of the one before
                prompt = [1] * rng.choice([0, 0, 4, 8]) + rng.choices(range(2, 50), k=rng.randint(1, 8))
            params = {"max_tokens": rng.randint(1, 12), "ignore_eos": rng.random() < 0.3}
            for room in (theirs, ours):
                room.add(name, prompt, **params)
        if rng.random() < 0.03:
            unfinished = [n for n, seq in ours.seqs.items() if seq.status is not SequenceStatus.FINISHED]
            for name in rng.sample(unfinished, min(1, len(unfinished))):
                for room in (theirs, ours):
                    room.scheduler.abort(room.seqs[name].seq_id)
        if not to_come and not ours.scheduler.has_unfinished():
            break
        before = ours.line()
        with all_ours():
            expected = ours.schedule()
            ended = ours.finish(expected)
        got = theirs.schedule()
        where = f"{world}, step {step}, before it {before}"
        if theirs.describe(got) != ours.describe(expected):
            raise Wrong(f"another step than ours; {where}", expected=ours.describe(expected), got=theirs.describe(got))
        try:
            got_ended = theirs.finish(got)
        except Wrong as wrong:
            raise Wrong(f"{wrong.hint}; {where}", expected=wrong.expected, got=wrong.got) from None
        if got_ended != ended:
            raise Wrong(f"others ended than with ours; {where}", expected=ended, got=got_ended)
        if theirs.line() != ours.line():
            raise Wrong(f"after the step the queues differ; {where}", expected=ours.line(), got=theirs.line())
    for name, seq in ours.seqs.items():
        if theirs.seqs[name].status is not SequenceStatus.FINISHED:
            raise Wrong(f"{name} never ended; {world}", got=repr(theirs.seqs[name]))
        if theirs.seqs[name].tokens != seq.tokens:
            raise Wrong(f"{name} has other tokens; {world}", expected=seq.tokens, got=theirs.seqs[name].tokens)


def random_workloads(function: Any, bench: Bench) -> None:
    """40 random workloads in tiny pools: each step is the same as ours, and everybody's request ends"""
    for seed in range(40):
        compare_with_ours(seed)


def same_tokens(function: Any, bench: Bench) -> None:
    """a real model answers with the same tokens"""
    bench.same_tokens()


def same_tokens_in_a_small_pool(function: Any, bench: Bench) -> None:
    """a real model answers with the same tokens when most of its pool is taken away"""
    manager, tokenizer = bench.llm.engine.block_manager, bench.llm.get_tokenizer()
    num_left = sum(manager.num_blocks_for(len(tokenizer(prompt).input_ids)) for prompt in PROMPTS)
    hog = Sequence([EOS])
    if not manager.append_slots(hog, (len(manager.free_blocks) - num_left) * manager.block_size):
        raise Wrong("blocks of the pool were not given back by the checks before")
    try:
        with all_ours():
            expected = bench.generate()
        if (got := bench.generate()) != expected:
            decode = bench.llm.get_tokenizer().batch_decode
            raise Wrong("the model answers with other tokens", expected=decode(expected), got=decode(got))
    finally:
        manager.free(hog)


# -- finish_reason ----------------------------------------------------------------------------------------------------


def ask(function: Any, token_id: int, num_generated: int, *, max_model_len: int = 64, **params: Any) -> Any:
    """The student's answer for a sequence of 6 prompt tokens whose num_generated-th token is token_id."""
    room = Room(16, max_model_len=max_model_len)
    seq = Sequence([11] * 6, SamplingParams(**params))
    seq.tokens += [12] * (num_generated - 1) + [token_id]
    before = list(seq.tokens)
    answer = function(room.scheduler, seq, token_id)
    if seq.tokens != before or seq.status is not SequenceStatus.WAITING:
        raise Wrong("finish_reason only answers: the token is in seq.tokens already, and update ends the sequence")
    return answer


def expect_reason(function: Any, expected: tuple, hint: str, token_id: int, num_generated: int, **params: Any) -> None:
    if (got := ask(function, token_id, num_generated, **params)) != expected:
        given = ", ".join(f"{name}={value}" for name, value in params.items())
        case = f"token {token_id} as generated token {num_generated} of a prompt of 6; EOS is {EOS}; {given}"
        raise Wrong(f"{hint} ({case})", expected=expected, got=got)


def goes_on(function: Any, bench: Bench) -> None:
    """an ordinary token ends nothing"""
    expect_reason(function, (None, None), "nothing ends this sequence", 7, 3, max_tokens=8)
    expect_reason(function, (None, None), "max_tokens=None is no limit", 7, 30, max_tokens=None)


def eos(function: Any, bench: Bench) -> None:
    """EOS stops, unless it is ignored"""
    expect_reason(function, ("stop", None), "EOS ends it, and is no stop_reason", EOS, 3, max_tokens=8)
    expect_reason(function, (None, None), "this sequence ignores EOS", EOS, 3, max_tokens=8, ignore_eos=True)


def stop_ids(function: Any, bench: Bench) -> None:
    """a stop token id stops, and is named"""
    hint = "a stop token id ends it, and is the stop_reason"
    expect_reason(function, ("stop", 7), hint, 7, 3, max_tokens=8, stop_token_ids=[5, 7])
    hint = "ignore_eos is about EOS only; a stop token id still stops"
    expect_reason(function, ("stop", 7), hint, 7, 3, max_tokens=8, stop_token_ids=[7], ignore_eos=True)


def length(function: Any, bench: Bench) -> None:
    """the last token that max_tokens allows ends it"""
    hint = "max_tokens counts generated tokens, the new one included"
    expect_reason(function, (None, None), hint, 7, 7, max_tokens=8)
    expect_reason(function, ("length", None), hint, 7, 8, max_tokens=8)


def model_length(function: Any, bench: Bench) -> None:
    """max_model_len ends it, prompt and output together"""
    hint = "max_model_len counts prompt and output, the new token included"
    expect_reason(function, (None, None), hint, 7, 13, max_tokens=None, max_model_len=20)
    expect_reason(function, ("length", None), hint, 7, 14, max_tokens=None, max_model_len=20)


def order(function: Any, bench: Bench) -> None:
    """the first rule that applies decides"""
    hint = "a stop comes before a length: the text ended by itself"
    expect_reason(function, ("stop", None), hint, EOS, 8, max_tokens=8)
    expect_reason(function, ("stop", 7), hint, 7, 8, max_tokens=8, stop_token_ids=[7])
    hint = "EOS is asked for before the stop token ids"
    expect_reason(function, ("stop", None), hint, EOS, 3, max_tokens=8, stop_token_ids=[EOS])
    hint = "an EOS that is ignored can still be a stop token id"
    expect_reason(function, ("stop", EOS), hint, EOS, 3, max_tokens=8, stop_token_ids=[EOS], ignore_eos=True)


def minimum(function: Any, bench: Bench) -> None:
    """before min_tokens nothing stops it, from then on everything does"""
    hint = "fewer than min_tokens are generated: neither EOS nor a stop token id may end it"
    expect_reason(function, (None, None), hint, EOS, 3, max_tokens=8, min_tokens=4)
    expect_reason(function, (None, None), hint, 7, 3, max_tokens=8, min_tokens=4, stop_token_ids=[7])
    hint = "with exactly min_tokens generated, EOS may end it"
    expect_reason(function, ("stop", None), hint, EOS, 4, max_tokens=8, min_tokens=4)
    hint = "min_tokens holds back the stops, never a length"
    limits: dict = {"min_tokens": 18, "max_model_len": 20}
    expect_reason(function, ("length", None), hint, 7, 14, max_tokens=None, **limits)


# -- preempt_last -----------------------------------------------------------------------------------------------------


def three_run_one_waits() -> Room:
    room = Room(32, max_num_seqs=3)
    for name in "ABCD":
        room.add(name, 7)
    for _ in range(2):
        with all_ours():
            room.finish(room.schedule())
    return room


def youngest_leaves(function: Any, bench: Bench) -> None:
    """the youngest leaves running, and is returned"""
    room = three_run_one_waits()
    got = function(room.scheduler)
    if got is not room.seqs["C"]:
        hint = "return the sequence that you preempted" if got is None else "the last of running is the youngest"
        raise Wrong(hint, expected="C", got=got if not isinstance(got, Sequence) else room.names([got]))
    if room.names(room.scheduler.running) != "A B":
        raise Wrong("only the youngest leaves running", expected="A B", got=room.names(room.scheduler.running))


def head_of_the_queue(function: Any, bench: Bench) -> None:
    """it stands at the head of waiting, and of two the older is in front"""
    room = three_run_one_waits()
    function(room.scheduler)
    hint = "a preempted sequence goes to the head of waiting: it was here before those that wait"
    if (got := room.names(room.scheduler.waiting)) != "C D":
        raise Wrong(hint, expected="C D", got=got)
    function(room.scheduler)
    if (got := room.names(room.scheduler.waiting)) != "B C D":
        raise Wrong(hint, expected="B C D", got=got)


def blocks_come_back(function: Any, bench: Bench) -> None:
    """its blocks are in the pool again, and only its own"""
    room = three_run_one_waits()
    manager, seq = room.scheduler.block_manager, room.seqs["C"]
    num_free, num_held = len(manager.free_blocks), len(seq.block_table)
    function(room.scheduler)
    got = len(manager.free_blocks)
    if got != num_free + num_held or seq.block_table:
        hint = "the blocks of the preempted sequence must go back to the pool, through block_manager.free"
        raise Wrong(hint, expected=f"{num_free + num_held} free blocks", got=f"{got}, block_table {seq.block_table}")


def starts_again(function: Any, bench: Bench) -> None:
    """it waits with nothing computed, and with all its tokens"""
    room = three_run_one_waits()
    seq = room.seqs["C"]
    tokens = list(seq.tokens)
    seq.num_cached_tokens = 4  # as after a hit
    function(room.scheduler)
    if seq.tokens != tokens:
        hint = "its tokens, the generated ones too, must be kept: without them nothing can be recomputed"
        raise Wrong(hint, expected=tokens, got=seq.tokens)
    if seq.status is not SequenceStatus.WAITING:
        raise Wrong("its status must say that it waits", expected="WAITING", got=seq.status.name)
    counts = seq.num_computed_tokens, seq.num_cached_tokens
    if counts != (0, 0):
        hint = "its K/V is not its own any more: num_computed_tokens and num_cached_tokens must be 0"
        raise Wrong(hint, expected=(0, 0), got=counts)
    room.check_integrity()


def counted(function: Any, bench: Bench) -> None:
    """it is counted"""
    room = three_run_one_waits()
    function(room.scheduler)
    function(room.scheduler)
    if room.scheduler.num_preemptions != 2:
        hint = "num_preemptions counts preemptions"
        raise Wrong(hint, expected="2 after two of them", got=room.scheduler.num_preemptions)


# -- schedule ---------------------------------------------------------------------------------------------------------


def one_request(function: Any, bench: Bench) -> None:
    """a request is admitted, computed whole, and then decodes one token a step"""
    room = Room()
    seq = room.add("A", 6)
    output = room.schedule()
    if (got := room.describe(output)) != "A 0..6":
        raise Wrong("one prompt, and room for it: it is computed whole", expected="A 0..6", got=got)
    if room.line() != "running: A; waiting: nobody":
        hint = "who is admitted leaves waiting and goes to the end of running"
        raise Wrong(hint, expected="running: A; waiting: nobody", got=room.line())
    if seq.status is not SequenceStatus.PREFILL:
        raise Wrong("who is admitted gets status PREFILL", expected="PREFILL", got=seq.status.name)
    room.finish(output)
    room.expect("A 6..7", "a decode computes the one token that was sampled last")
    room.expect("A 7..8", "a decode computes the one token that was sampled last")


def running_first(function: Any, bench: Bench) -> None:
    """running sequences first, newcomers after them, all in one step"""
    room = Room()
    room.add("A", 6)
    room.add("B", 3)
    room.expect("A 0..6, B 0..3", "both prompts fit into one step")
    room.add("C", 5)
    room.expect("A 6..7, B 3..4, C 0..5", "running sequences first, oldest first; newcomers in the same step")


def cached_prefix(function: Any, bench: Bench) -> None:
    """what is found in the cache is not computed again"""
    room = Room()
    room.add("A", list(range(1, 10)))
    room.expect("A 0..9", "one prompt, and room for it: it is computed whole")
    room.add("B", [*range(1, 9), 50, 51])
    hint = "B's first 8 tokens are cached: allocate_with_prefix has set num_computed_tokens, and the chunk is the rest"
    room.expect("A 9..10, B 8..10", hint)


def budget(function: Any, bench: Bench) -> None:
    """one budget for the whole step; a long prompt gets what the others leave"""
    room = Room(max_num_batched_tokens=8)
    room.add("A", 5)
    room.add("B", 3)
    room.expect("A 0..5, B 0..3", "5 and 3 tokens fill the budget of 8")
    room.add("C", 17)
    room.add("D", 2)
    hint = "max_num_batched_tokens=8 is for the whole step, the decodes of A and B included"
    room.expect("A 5..6, B 3..4, C 0..6", hint)
    room.expect("A 6..7, B 4..5, C 6..12", f"{hint}; C is in the middle of its prompt")
    room.expect("A 7..8, B 5..6, C 12..17, D 0..1", "C's prompt ends, and the one token that is left goes to D")


def small_budget(function: Any, bench: Bench) -> None:
    """a budget smaller than the number of those who want to run"""
    room = Room(max_num_batched_tokens=2)
    for name, max_tokens in (("A", 3), ("B", 9), ("C", 9)):
        room.add(name, 1, max_tokens=max_tokens)
    room.expect("A 0..1, B 0..1", "the budget of 2 is spent after two tokens")
    room.expect("A 1..2, B 1..2", "the budget of 2 is spent after two tokens")
    room.expect("A 2..3, B 2..3", "the budget of 2 is spent after two tokens")
    room.expect("B 3..4, C 0..1", "A has ended: B is the oldest, and C comes in")


def seats(function: Any, bench: Bench) -> None:
    """no more than max_num_seqs run"""
    room = Room(max_num_seqs=2)
    for name in "ABC":
        room.add(name, 3)
    hint = "max_num_seqs=2: two may run, C waits although there are budget and blocks"
    room.expect("A 0..3, B 0..3", hint)
    room.expect("A 3..4, B 3..4", hint)


def nobody_overtakes(function: Any, bench: Bench) -> None:
    """the first that does not fit stops the admissions"""
    room = Room(8)
    room.add("A", 14)
    room.add("B", 20)
    room.add("C", 3)
    hint = "B does not fit into the 4 blocks that A leaves, and C stands behind B: nobody overtakes"
    room.expect("A 0..14", hint)
    if room.line() != "running: A; waiting: B C":
        raise Wrong("who is not admitted keeps its place", expected="running: A; waiting: B C", got=room.line())


def youngest_gives_way(function: Any, bench: Bench) -> None:
    """no block is free: the youngest gives way"""
    room = Room(6)
    room.add("A", 11)
    room.add("B", 11)
    room.expect("A 0..11, B 0..11", "both prompts fit")
    room.expect("A 11..12, B 11..12", "both have room for one more token")
    hint = "A needs a fourth block and there is none: the last of running is preempted, and A tried again"
    room.expect("A 12..13; preempted: B", hint)
    if room.line() != "running: A; waiting: B":
        raise Wrong(hint, expected="running: A; waiting: B", got=room.line())


def itself(function: Any, bench: Bench) -> None:
    """the youngest asks first: it gives way itself"""
    room = Room(4)
    room.add("A", 6)
    room.add("B", 7)
    room.expect("A 0..6, B 0..7", "both prompts fit")
    room.expect("A 6..7, B 7..8", "both have room for one more token")
    hint = "A has room; B needs a block, and B is the last of running: B itself is preempted"
    room.expect("A 7..8; preempted: B", hint)


def admits_nobody(function: Any, bench: Bench) -> None:
    """a step that preempted admits nobody"""
    room = Room(4)
    for name in "AB":  # twins: same prompt, same tokens after it
        room.add(name, [1, 2, 3, 4])
    room.expect("A 0..4, B 3..4", "B finds A's block in the cache; its last token is computed for the logits")
    for at in (4, 5, 6, 7):
        room.expect(f"A {at}..{at + 1}, B {at}..{at + 1}", "two decodes")
    hint = "B gives way. A holds the same full blocks, so B would fit at once; but a step that preempted admits nobody"
    room.expect("A 8..9; preempted: B", hint)


def use(name: str) -> Callable[[Any], AbstractContextManager]:
    return lambda function: replaced(Scheduler, name, function)


ENDS: tuple[Check, ...] = (goes_on, eos, stop_ids, length, model_length, order, minimum)
PREEMPTS: tuple[Check, ...] = (youngest_leaves, head_of_the_queue, blocks_come_back, starts_again, counted)
STEPS: tuple[Check, ...] = (one_request, running_first, cached_prefix, budget, small_budget, seats, nobody_overtakes)
DRY: tuple[Check, ...] = (youngest_gives_way, itself, admits_nobody)
LAST: tuple[Check, ...] = (random_workloads, same_tokens, same_tokens_in_a_small_pool)

TASKS = [
    Task("finish_reason", "Taking the tokens in", use("finish_reason_of"), (*ENDS, random_workloads, same_tokens)),
    Task("preempt_last", "When the paper runs out", use("preempt_last"), (*PREEMPTS, *LAST)),
    Task("schedule", "A step: running first, then newcomers", use("schedule"), (*STEPS, *DRY, *LAST)),
]
