"""Scheduler without a model: the next token is a function of the tokens so far."""

from collections import deque

import pytest

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.core.sequence import SequenceStatus
from tests.core.by_hand import CacheModel, fail_step, make, next_token, run, sequence


def chunks(output: SchedulerOutput) -> list[tuple[int, int]]:
    return [(c.start, c.end) for c in output.chunks]


def test_long_prompt_is_chunked_and_decodes_ride_along():
    scheduler, model = make(max_num_batched_tokens=10), CacheModel(4)
    first, second = sequence(range(4)), sequence(range(100, 125))
    scheduler.add(first)
    assert chunks(run(scheduler, model)) == [(0, 4)]
    scheduler.add(second)
    assert chunks(run(scheduler, model)) == [(4, 5), (0, 9)]
    assert second.status is SequenceStatus.PREFILL and first.status is SequenceStatus.DECODE
    assert chunks(run(scheduler, model)) == [(5, 6), (9, 18)]
    assert chunks(run(scheduler, model)) == [(6, 7), (18, 25)]
    assert second.status is SequenceStatus.DECODE and second.num_generated_tokens == 1


def test_admission_stops_at_the_first_that_does_not_fit():
    scheduler = make(num_blocks=16, max_model_len=64)
    big, bigger, small = sequence(range(30)), sequence(range(100, 140)), sequence([7])
    for seq in (big, bigger, small):
        scheduler.add(seq)
    scheduler.schedule()
    assert scheduler.running == [big] and list(scheduler.waiting) == [bigger, small]


def test_budget_smaller_than_max_num_seqs():
    scheduler, model = make(max_num_batched_tokens=3, max_num_seqs=8), CacheModel(4)
    seqs = [sequence([i]) for i in range(6)]
    for seq in seqs:
        scheduler.add(seq)
    while scheduler.has_unfinished():
        run(scheduler, model)
    assert all(seq.num_generated_tokens == 8 for seq in seqs)


def test_the_youngest_is_preempted_and_resumes_from_the_cache():
    scheduler, model = make(num_blocks=6, block_size=4, max_model_len=24), CacheModel(4)
    a, b = sequence(range(11), max_tokens=6), sequence(range(50, 61), max_tokens=12)
    scheduler.add(a)
    scheduler.add(b)
    run(scheduler, model)
    run(scheduler, model)
    output = run(scheduler, model)  # both need a fourth block and there is none
    assert output.preempted == [b] and chunks(output) == [(12, 13)]
    assert scheduler.waiting[0] is b and b.status is SequenceStatus.WAITING and b.num_computed_tokens == 0
    assert b.num_generated_tokens == 2, "what it generated is kept"
    while not b.block_table:
        run(scheduler, model)
    assert b.num_cached_tokens > 0, "it starts from what is still cached"
    while scheduler.has_unfinished():
        run(scheduler, model)
    assert scheduler.num_preemptions == 1


def test_a_step_that_preempts_admits_nobody():
    scheduler, model = make(num_blocks=6, block_size=4, max_model_len=24), CacheModel(4)
    a, b = sequence(range(12)), sequence(range(50, 62))
    scheduler.add(a)
    scheduler.add(b)
    run(scheduler, model)
    scheduler.add(sequence([7]))  # one block would do, and the preemption frees three
    output = run(scheduler, model)
    assert output.preempted == [b] and [c.seq for c in output.chunks] == [a]


class Unlooked(deque):
    """A queue that nobody looks through."""

    def __iter__(self):
        raise AssertionError("looked through")


@pytest.mark.parametrize("limits", [{"max_num_seqs": 2}, {"max_num_batched_tokens": 2}])
def test_a_step_that_can_admit_nobody_does_not_look_through_the_queue(limits):
    """There may be a hundred thousand in it."""
    scheduler, model = make(**limits), CacheModel(4)
    running = [sequence([1, 2], max_tokens=9), sequence([3, 4], max_tokens=9)]
    for seq in (*running, sequence([5, 6])):
        scheduler.add(seq)
    while len(scheduler.running) < 2 or any(seq.num_generated_tokens == 0 for seq in running):
        run(scheduler, model)
    scheduler.waiting = Unlooked(scheduler.waiting)
    assert [chunk.seq for chunk in scheduler.schedule().chunks] == running


def test_a_sequence_may_have_to_preempt_itself():
    scheduler, model = make(num_blocks=4, block_size=4, max_model_len=16), CacheModel(4)
    a, b = sequence(range(6), max_tokens=9), sequence(range(50, 57), max_tokens=9)
    scheduler.add(a)
    scheduler.add(b)
    run(scheduler, model)
    run(scheduler, model)
    output = run(scheduler, model)  # b is last and asks first: a still has room
    assert output.preempted == [b] and [c.seq for c in output.chunks] == [a]


@pytest.mark.parametrize("block_size", [1, 4])
def test_last_token_of_a_nearly_cached_prompt_is_written(block_size):
    """One token short of fully cached looks alike (start == len - 1), but its K/V is not there yet."""
    scheduler, model = make(block_size=block_size), CacheModel(block_size)
    scheduler.add(sequence(range(8)))
    run(scheduler, model)
    scheduler.add(sequence([*range(8), 99]))
    [_, chunk] = run(scheduler, model).chunks
    assert (chunk.start, chunk.end, chunk.write_start) == (8, 9, 8)


def test_restart_makes_everything_anew():
    scheduler, model = make(max_num_batched_tokens=64), CacheModel(4)
    old = sequence(range(10))
    scheduler.add(old)
    run(scheduler, model)
    a, b = sequence(range(100, 110)), sequence([*range(100, 108), 5])
    scheduler.add(a)
    scheduler.add(b)
    scheduler.schedule()
    fail_step(scheduler)
    assert list(scheduler.waiting) == [old, a, b] and scheduler.running == []
    assert all(seq.num_computed_tokens == 0 and seq.status is SequenceStatus.WAITING for seq in (old, a, b))
    assert old.num_generated_tokens == 1, "what steps before have generated is kept"
    assert not scheduler.block_manager.hash_to_block and len(scheduler.block_manager.free_blocks) == 64
    while scheduler.has_unfinished():
        run(scheduler, model)  # CacheModel would notice a block whose K/V was never written


def test_restart_leaves_out_who_is_not_named():
    scheduler = make()
    a, b = sequence(range(5)), sequence(range(9))
    scheduler.add(a)
    scheduler.add(b)
    scheduler.schedule()
    scheduler.restart([b])
    assert list(scheduler.waiting) == [b] and list(scheduler.seqs) == [b.seq_id]
    scheduler.check_integrity()


@pytest.mark.parametrize("broken", ["free", "append_slots", "allocate_with_prefix", "register_prefix", "is_cached"])
@pytest.mark.parametrize("after", [False, True])
def test_restart_after_an_exception_in_the_middle_of_schedule(monkeypatch, broken, after):
    """Wherever it comes from, nothing of the state in which it left queues and pool remains."""
    scheduler, model = make(num_blocks=6, block_size=4, max_model_len=24), CacheModel(4)
    seqs = [sequence(range(first, first + 11), max_tokens=8) for first in (0, 50, 70)]
    for seq in seqs:
        scheduler.add(seq)
    ours, num_calls, num_failures = getattr(scheduler.block_manager, broken), 0, 0

    def fails(*given):
        nonlocal num_calls
        num_calls += 1
        if num_calls % 4 == 0 and not after:
            raise InterruptedError
        found = ours(*given)
        if num_calls % 4 == 0:
            raise InterruptedError
        return found

    monkeypatch.setattr(scheduler.block_manager, broken, fails)
    while scheduler.has_unfinished() and num_failures < 20:
        try:
            output = scheduler.schedule()
        except InterruptedError:
            num_failures += 1
            fail_step(scheduler)
        else:
            scheduler.check_integrity()
            sampled_token_ids = model.execute(output)
            try:
                scheduler.update(output, sampled_token_ids)
            except InterruptedError:  # in free(): the sequence has ended
                num_failures += 1
                scheduler.restart([seq for seq in seqs if seq.finish_reason is None])
    assert num_failures
    monkeypatch.undo()
    while scheduler.has_unfinished():
        run(scheduler, model)
    for seq in seqs:
        assert seq.num_generated_tokens == 8
        assert all(seq.tokens[i] == next_token(seq.tokens[:i]) for i in range(11, 19))


def test_abort_waiting_running_and_unknown():
    scheduler, model = make(max_num_seqs=1), CacheModel(4)
    a, b = sequence(range(5)), sequence(range(5))
    scheduler.add(a)
    scheduler.add(b)
    run(scheduler, model)
    scheduler.abort(b.seq_id)
    scheduler.abort(a.seq_id)
    scheduler.abort(12345678)
    assert not scheduler.has_unfinished() and a.finish_reason == b.finish_reason == "abort"
    assert len(scheduler.block_manager.free_blocks) == 64
    scheduler.check_integrity()


def test_finish_reasons():
    scheduler = make(max_model_len=16, eos_token_ids=frozenset([2]))
    cases = [
        (sequence([5], max_tokens=1), 9, ("length", None)),
        (sequence([5]), 2, ("stop", None)),
        (sequence([5], ignore_eos=True), 2, (None, None)),
        (sequence([5], stop_token_ids=[7]), 7, ("stop", 7)),
        (sequence([5], stop_token_ids=[7], min_tokens=2), 7, (None, None)),
        (sequence(range(15), max_tokens=None), 9, ("length", None)),
    ]
    for seq, token_id, expected in cases:
        scheduler.add(seq)
        scheduler.update(scheduler.schedule(), [[token_id]])
        assert (seq.finish_reason, seq.stop_reason) == expected
        scheduler.abort(seq.seq_id)


@pytest.mark.parametrize("num_tokens", [0, 64, 100])
def test_add_refuses_what_can_never_run(num_tokens):
    scheduler = make(max_model_len=64)
    with pytest.raises(ValueError, match=f"found {num_tokens}"):
        scheduler.add(sequence(range(num_tokens)))
    assert not scheduler.waiting


def test_a_pool_too_small_for_one_sequence_is_refused():
    with pytest.raises(ValueError, match="needs 16 blocks of 4"):
        make(num_blocks=15, block_size=4, max_model_len=64)
