"""Order of priority, and prompts that are cut early: the scheduler against a slow twin without queues."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import Sequence
from tests.core.by_hand import CacheModel, fail_step, make, run, sequence
from tests.core.test_scheduler import chunks
from tests.marks import by_night

BLOCK_SIZE = 4


@dataclass(eq=False)
class Entry:
    """A sequence, when it came, when it was last admitted (None: it waits) and how far its tokens are computed."""

    seq: Sequence
    arrival: int
    admission: int | None = None
    computed: int = 0

    def rank(self) -> tuple[int, int]:
        return self.seq.priority, self.arrival if self.admission is None else self.admission

    def num_blocks(self) -> int:
        return -(-len(self.seq.tokens) // BLOCK_SIZE)


class Twin:
    """Looks at all sequences before every decision. Without prefix caching a block count says what fits."""

    def __init__(self, num_blocks: int, budget: int, max_num_seqs: int, threshold: int) -> None:
        self.num_blocks, self.budget, self.max_num_seqs, self.threshold = num_blocks, budget, max_num_seqs, threshold
        self.entries: list[Entry] = []
        self.num_admissions = 0

    def running(self) -> list[Entry]:
        return [e for e in self.entries if e.admission is not None]

    def step(self) -> tuple[list[tuple[Sequence, int, int]], list[Sequence]]:
        """(sequence, start, end) of each chunk, and who was preempted."""
        made: dict[Entry, tuple[int, int]] = {}
        preempted: list[Sequence] = []
        held = {e: -(-e.computed // BLOCK_SIZE) if e.computed else 0 for e in self.running()}
        # Blocks of a prompt are reserved as a whole when it is admitted.
        held |= {e: e.num_blocks() for e in self.running() if len(e.seq.tokens) - e.computed > 1}

        def give(entry: Entry) -> None:
            end = min(len(entry.seq.tokens), entry.computed + (self.threshold or 10**9), entry.computed + self.left())
            made[entry], entry.computed, held[entry] = (entry.computed, end), end, entry.num_blocks()

        self.left = lambda: self.budget - sum(end - start for start, end in made.values())
        while self.left() and (todo := [e for e in self.running() if e not in made]):
            entry = min(todo, key=Entry.rank)
            if entry.num_blocks() - held[entry] > self.num_blocks - sum(held.values()):
                victim = max(todo, key=Entry.rank)
                victim.admission, victim.computed = None, 0
                del held[victim]
                preempted.append(victim.seq)
            else:
                give(entry)
        while self.left() and not preempted and len(self.running()) < self.max_num_seqs:
            waiting = [e for e in self.entries if e.admission is None]
            if not waiting or (entry := min(waiting, key=Entry.rank)).num_blocks() > self.num_blocks - sum(
                held.values()
            ):
                break
            entry.admission = self.num_admissions
            self.num_admissions += 1
            give(entry)
        return [(e.seq, *span) for e, span in made.items()], preempted


REQUESTS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(-2, 2), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12
)


@pytest.mark.parametrize("time", [1, by_night(2), by_night(3)])  # other examples each time
@settings(max_examples=100, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(12, 24),
    budget=st.integers(1, 24),
    max_num_seqs=st.integers(1, 6),
    threshold=st.sampled_from([0, 1, 3, 7]),
    failing=st.sets(st.integers(0, 20), max_size=2),
)
def test_every_step_is_the_twins(requests, num_blocks, budget, max_num_seqs, threshold, failing, time):
    """requests: (step of arrival, priority, prompt tokens, max_tokens). failing: steps that fail and are made again.

    The first running sequence gets tokens in every step, so nobody of the highest priority waits for ever.
    """
    limits = dict(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=48)
    manager = BlockManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
    scheduler = Scheduler(manager, **limits, long_prefill_token_threshold=threshold)
    twin, step, model = Twin(num_blocks, budget, max_num_seqs, threshold), 0, CacheModel(BLOCK_SIZE)
    to_come = sorted(requests, key=lambda request: request[0])
    while to_come or scheduler.has_unfinished():
        while to_come and to_come[0][0] <= step:
            _, priority, num_tokens, max_tokens = to_come.pop(0)
            seq = sequence(range(num_tokens), max_tokens)
            seq.priority = priority
            scheduler.add(seq)
            twin.entries.append(Entry(seq, len(twin.entries) + 1000 * step))
        if step in failing:
            scheduler.schedule()
            fail_step(scheduler)
            for entry in twin.entries:
                entry.admission, entry.computed = None, 0
        first = scheduler.running[:1]
        expected = twin.step()
        output = run(scheduler, model)
        assert ([(c.seq, c.start, c.end) for c in output.chunks], output.preempted) == expected
        assert not first or output.chunks[0].seq is first[0]
        twin.entries = [entry for entry in twin.entries if entry.seq.finish_reason is None]
        step += 1
        assert step < 2000


def with_priority(priority: int, tokens, **options) -> Sequence:
    seq = sequence(tokens, **options)
    seq.priority = priority
    return seq


def test_the_least_important_is_preempted_though_it_is_the_oldest():
    scheduler, model = make(num_blocks=6, block_size=4, max_model_len=24), CacheModel(4)
    old, urgent = with_priority(1, range(11), max_tokens=12), with_priority(0, range(50, 61), max_tokens=12)
    scheduler.add(old)
    run(scheduler, model)
    scheduler.add(urgent)
    run(scheduler, model)
    assert scheduler.running == [urgent, old]
    while not (output := run(scheduler, model)).preempted:
        pass
    assert output.preempted == [old] and [c.seq for c in output.chunks] == [urgent]
    scheduler.add(late := with_priority(1, [7]))
    assert list(scheduler.waiting) == [old, late], "what was preempted comes before those of its priority"
    scheduler.add(with_priority(-1, [8]))
    assert scheduler.waiting[0].priority == -1


def test_a_long_prompt_lets_others_in():
    scheduler, model = make(max_num_batched_tokens=20, long_prefill_token_threshold=8), CacheModel(4)
    long, other, short = sequence(range(30)), sequence(range(100, 125)), sequence(range(200, 203))
    for seq in (long, other, short):
        scheduler.add(seq)
    assert chunks(run(scheduler, model)) == [(0, 8), (0, 8), (0, 3)]
    assert chunks(run(scheduler, model)) == [(8, 16), (8, 16), (3, 4)]
    assert chunks(run(scheduler, model)) == [(16, 24), (16, 24), (4, 5)]
    assert chunks(run(scheduler, model)) == [(24, 30), (24, 25), (5, 6)]


def test_integrity_names_what_is_out_of_order():
    scheduler, model = make(max_num_batched_tokens=8), CacheModel(4)
    for seq in (with_priority(0, range(3)), with_priority(1, range(50, 53))):
        scheduler.add(seq)
    run(scheduler, model)
    scheduler.running.reverse()
    with pytest.raises(AssertionError, match="not in order of priority"):
        scheduler.check_integrity()
    scheduler.running.reverse()
    for seq in scheduler.running:
        seq.tokens += [1, 2, 3]
    with pytest.raises(AssertionError, match="more than one is mid-prompt"):
        scheduler.check_integrity()
