"""Snapshots of states: where an admission begins, what dies with a block, and a state that is always the right one."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.core.block_manager import BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.snapshots.cache import SnapshotCache
from nanovllm.core.snapshots.policy import snapshot_positions
from tests.core.by_hand import CacheModel, fail_step, next_token, sequence
from tests.marks import by_night

SIZE = 4


def make(num_blocks=400, max_running=8, max_snapshots=32, block_size=SIZE, **limits) -> Scheduler:
    snapshots = SnapshotCache(max_running=max_running, max_snapshots=max_snapshots)
    manager = BlockManager(num_blocks, block_size, snapshots=snapshots)
    limits = dict(max_num_seqs=max_running, max_num_batched_tokens=4096, max_model_len=num_blocks * block_size) | limits
    return Scheduler(manager, **limits)


class StateModel(CacheModel):
    """Stands in for the data plane: a slot's state is the tokens it has read; what is sampled depends on it."""

    def __init__(self, block_size: int):
        super().__init__(block_size)
        self.states: dict[int, tuple] = {-1: ()}

    def execute(self, output):
        super().execute(output)
        sampled = []
        for chunk in output.chunks:
            state, tokens = chunk.seq.parts["state"], chunk.seq.tokens
            for start, end, source, target in state.segments:
                assert len(self.states[source]) == start, f"slot {source} has read {self.states[source]}"
                self.states[target] = self.states[source] + tuple(tokens[start:end])
            assert self.states[state.source] == tuple(tokens[: chunk.known_end]), f"{chunk}: wrong state"
            sampled.append([next_token(seq.tokens) for seq in chunk.sampled_seqs()])
        return sampled


def step(scheduler: Scheduler, model: StateModel, drafts: "Drafts | None" = None) -> int:
    output = scheduler.schedule({} if drafts is None else drafts.propose(scheduler))
    scheduler.check_integrity()
    scheduler.update(output, model.execute(output))
    scheduler.check_integrity()
    return output.num_tokens


def run(scheduler: Scheduler, model: StateModel, tokens, max_tokens=3, drafts=None):
    """One request, to its end. Returns its sequence; start: where its first admission began."""
    seq = sequence(tokens, max_tokens=max_tokens)
    scheduler.add(seq)
    step(scheduler, model, drafts)
    seq.start = seq.num_cached_tokens
    while scheduler.has_unfinished():
        step(scheduler, model, drafts)
    return seq


def ids(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def test_where_a_prompt_ends_the_next_one_begins():
    scheduler, model = make(block_size=16), StateModel(16)
    shared = ids(600)
    starts = [run(scheduler, model, shared + ids(3, 1000 * i)).start for i in range(1, 4)]
    assert starts == [0, 592, 592]
    assert run(scheduler, model, shared + ids(3, 1000)).start == 592  # not 603: a token must be left, and a block is 16


def test_a_fork_is_found_by_the_third():
    scheduler, model = make(2000, block_size=16, max_snapshots=8), StateModel(16)
    shared = ids(1500)
    starts = [run(scheduler, model, shared + ids(700, 10_000 * i), 1).start for i in range(1, 12)]
    assert starts[0] == 0 and starts[1] == 1024  # a power of two that both have passed
    assert starts[2:] == [1488] * 9


def test_a_chat_computes_its_new_tokens_only():
    scheduler, model, history = make(block_size=16), StateModel(16), ids(40)
    for turn in range(8):
        seq = run(scheduler, model, history, max_tokens=21)
        assert len(history) - seq.start < 16 + 30 + 1 if turn else seq.start == 0, turn
        history = seq.tokens + ids(30, 5000 + 100 * turn)


@settings(deadline=None)  # a busy machine is no fault
@given(st.integers(1, 9000), st.integers(1, 9000))
def test_prompts_agree_on_powers_of_two(num_tokens, other):
    """Whatever their lengths; of similar ones, also on what lies between."""
    found, others = (snapshot_positions(n, 0, 4) for n in (num_tokens, other))
    assert max(found) == (num_tokens - 1) // 4 * 4 and found[max(found)]
    for power in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
        assert (power in found) == (power < num_tokens) or power == max(found)
        same = (num_tokens - 1) // power == (other - 1) // power
        assert not same or (num_tokens - 1) // power * power in others
    assert len(found) <= 2 * num_tokens.bit_length() + 2


def test_a_snapshot_is_dropped_with_its_block():
    scheduler, model = make(num_blocks=12), StateModel(SIZE)
    manager = scheduler.block_manager
    run(scheduler, model, ids(30))
    kept = manager.snapshots.by_hash
    assert kept
    run(scheduler, model, ids(44, 100))  # takes every block but one
    assert kept and kept.keys() <= {block.block_hash for block in manager.blocks}
    assert run(scheduler, model, ids(30)).start == 0
    assert manager.reset_prefix_cache() and not manager.snapshots.by_hash and len(manager.snapshots.free_slots) == 40


def test_a_salt_hides_snapshots():
    scheduler, model, starts = make(), StateModel(SIZE), []
    for salt in ("a", "b", None, "a"):
        seq = sequence(ids(30))
        seq.cache_salt, seq.has_extra_keys = salt, salt is not None
        scheduler.add(seq)
        step(scheduler, model)
        starts.append(seq.num_cached_tokens)
        while scheduler.has_unfinished():
            step(scheduler, model)
    assert starts == [0, 0, 0, 28]


def test_who_may_want_a_snapshot_comes_before_who_is_not_known_to():
    """Positions that are powers of two give way first, and take no other's place."""
    scheduler, model = make(4000, block_size=1, max_snapshots=3), StateModel(1)
    for n in range(4):
        run(scheduler, model, ids(100, 1000 * n), max_tokens=1)
    assert all(snapshot.is_wanted for snapshot in scheduler.block_manager.snapshots.by_hash.values())


def test_without_snapshots_there_is_no_hit():
    scheduler, model = make(max_snapshots=0), StateModel(SIZE)
    assert [run(scheduler, model, ids(30)).start for _ in range(2)] == [0, 0]
    assert scheduler.block_manager.stats.hits == 0


def test_as_many_run_as_there_are_slots():
    scheduler, model = make(max_running=2, max_num_seqs=8), StateModel(SIZE)
    for n in range(5):
        scheduler.add(sequence(ids(9, 100 * n)))
    while scheduler.has_unfinished():
        step(scheduler, model)
        assert len(scheduler.running) <= 2


class Drafts:
    """Draft tokens, of which those that num_accepted() says are right."""

    def __init__(self, num_tokens: int, num_accepted) -> None:
        self.num_tokens, self.num_accepted = num_tokens, num_accepted

    def propose(self, scheduler) -> dict[int, list[int]]:
        return {seq.seq_id: self.of(seq) for seq in [*scheduler.running, *scheduler.waiting]}

    def of(self, seq) -> list[int]:
        draft, tokens, num_accepted = [], list(seq.tokens), self.num_accepted(seq)
        for n in range(self.num_tokens):
            draft.append(next_token(tokens) if n < num_accepted else -7)
            tokens.append(next_token(tokens))
        return draft


@pytest.mark.parametrize("num_examples", [15, by_night(60)])
def test_any_schedule_has_the_right_states(num_examples: int):
    """Small pools, chunks, preemption, drafts, aborts, failed steps, equal prompts: states are right, and answers are
    those alone."""
    check = given(rng=st.randoms(use_true_random=False))(check_states)
    settings(max_examples=num_examples, deadline=None)(check)()


def check_states(rng: random.Random) -> None:
    block_size = rng.choice([1, 3, 4])
    num_blocks = rng.randint(60 // block_size + 2, 120 // block_size)
    scheduler = make(
        num_blocks, rng.randint(1, 5), rng.randint(0, 6), block_size, max_num_batched_tokens=rng.randint(3, 40),
        max_model_len=60,
    )  # fmt: skip
    luck = random.Random(rng.randrange(1000))  # of its own: hypothesis counts what is drawn from rng
    drafts = Drafts(rng.choice([0, rng.randint(1, 6)]), lambda seq: luck.choice([0, 1, 2, 3, 6]))
    model, seqs, are_equal = StateModel(block_size), [], rng.random() < 0.5
    stems = [[rng.randrange(4) for _ in range(rng.randint(1, 30))] for _ in range(3)]
    for _ in range(60):
        if rng.random() < 0.4:
            own = [] if are_equal else [rng.randrange(4) for _ in range(rng.randint(1, 9))]
            prompt = rng.choice(stems)[: rng.randint(1, 30)] + own
            for _ in range(rng.choice([1, 1, 2])):
                seqs.append(sequence(prompt, max_tokens=rng.randint(1, 15)))
                scheduler.add(seqs[-1])
        if seqs and rng.random() < 0.05:
            scheduler.abort(rng.choice(seqs).seq_id)
        output = scheduler.schedule(drafts.propose(scheduler))
        if rng.random() < 0.1:
            for chunk in output.chunks:  # something was computed before it failed
                for segment in chunk.seq.parts["state"].segments:
                    model.states[segment.target] = ("torn",)
            fail_step(scheduler, output)
        else:
            scheduler.update(output, model.execute(output))
        scheduler.check_integrity()
    while scheduler.has_unfinished():
        step(scheduler, model, drafts)
    for seq in seqs:
        for n in range(seq.num_prompt_tokens, len(seq.tokens)):
            assert seq.tokens[n] == next_token(seq.tokens[:n])


def test_the_state_of_a_running_sequence_is_not_given_away():
    """B has A's tokens and is a block behind. Another one has taken the place of A's snapshot at 8. B takes it again,
    and stands there when A, at 12, needs its newest snapshot no more."""
    scheduler, model, seq = make(max_snapshots=1), StateModel(SIZE), sequence(ids(5), max_tokens=9)
    scheduler.add(seq)
    for _ in range(4):
        step(scheduler, model)
    for tokens in ids(4, 100), seq.tokens[:6]:
        scheduler.add(sequence(tokens, max_tokens=9))
    while scheduler.has_unfinished():
        step(scheduler, model)


def test_no_snapshot_is_taken_of_what_is_computed_already():
    """The first one has the only place, and ends with the step. The second one's draft is accepted in that step."""
    scheduler, model = make(max_snapshots=1), StateModel(SIZE)
    drafts = Drafts(1, lambda seq: 1)
    for tokens, max_tokens in (ids(4), 1), (ids(4, 100), 9):
        scheduler.add(sequence(tokens, max_tokens=max_tokens))
    step(scheduler, model, drafts)
    run(scheduler, model, ids(6, 100), drafts=drafts)


@pytest.mark.parametrize("num_accepted", range(5))
def test_accepted_drafts_are_taken_in_by_the_next_step(num_accepted):
    """The state lags behind K/V by them; a boundary among them has its snapshot all the same."""
    scheduler, model = make(), StateModel(SIZE)
    drafts = Drafts(4, lambda seq: num_accepted if len(seq.tokens) == 6 else 0)
    seq = sequence(ids(6), max_tokens=7)
    scheduler.add(seq)
    while scheduler.has_unfinished():
        step(scheduler, model, drafts)
    assert seq.tokens[6:] == run(make(), StateModel(SIZE), ids(6), 7).tokens[6:]
    assert seq.block_hashes[2] in scheduler.block_manager.snapshots.by_hash
