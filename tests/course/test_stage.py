"""The stage of the course: it notices what checks rely on, and `our_engine` takes the student's code out."""

import pytest

from chapters.expect import Wrong
from chapters.patching import our_engine, replaced
from chapters.stage import EOS, Stage, compare_with_ours
from nanovllm.core.block_hash import BlockHasher
from nanovllm.core.block_manager import Block, BlockManager
from nanovllm.core.scheduler import Scheduler
from nanovllm.core.sequence import SequenceStatus


def test_answers_as_planned_and_ends():
    stage = Stage(8, max_num_batched_tokens=4)
    planned, counted = stage.add(6, [11, 12, EOS]), stage.add(3, 2)
    stage.run()
    assert planned.generated_token_ids == [11, 12, EOS] and counted.generated_token_ids[1:] == [EOS]
    assert [stage.describe(step) for step in stage.steps[:2]] == ["A 0..4", "A 4..6, B 0..2"]
    assert stage.ended == {planned.seq_id: 4, counted.seq_id: 4}


def test_notices_kv_of_another_text():
    """Hashed without its parent, a block is found after a different beginning; the engine's own checks see nothing."""
    stage = Stage()
    without_parent = replaced(
        BlockHasher, "hash_block", lambda self, parent_hash, token_ids, extra_keys=(): repr(token_ids).encode()
    )
    with without_parent, replaced(Block, "holds", lambda self, content: True):
        stage.add([1, 2, 3, 4, 9, 9, 9, 9, 5])
        stage.step()
        stage.add([9, 9, 9, 9, 5])
        with pytest.raises(Wrong, match="B finds the K/V of other tokens in slot 4"):
            stage.step()


def test_notices_lost_blocks():
    stage = Stage(8)
    stage.add(6, 2)
    stage.step()
    stage.manager.free_blocks.popleft()
    with pytest.raises(Wrong, match="check_integrity"):
        stage.run()


def test_hogs_take_what_others_do_not_need():
    stage = Stage(8, max_model_len=16)
    stage.take_blocks(4)
    with pytest.raises(ValueError, match="one sequence of max_model_len=16 must always fit"):
        stage.take_blocks(1)
    for _ in range(2):
        stage.add(6, 6)
    stage.run()
    assert stage.scheduler.num_preemptions > 0 and len(stage.manager.free_blocks) == 4
    stage.give_blocks()
    assert len(stage.manager.free_blocks) == 8


def test_comparison_notices_another_ending_and_our_engine_is_ours():
    ours = Scheduler.check_stop, BlockManager.free
    with replaced(Scheduler, "check_stop", lambda *args: (None, None)), replaced(BlockManager, "free", None):
        with our_engine():
            assert (Scheduler.check_stop, BlockManager.free) == ours
        with pytest.raises(Wrong, match="others ended than with ours; workload 0"):
            compare_with_ours(Stage(8, max_model_len=20), Stage(8, max_model_len=20), seed=0)
    stages = Stage(8, max_model_len=20), Stage(8, max_model_len=20)
    compare_with_ours(*stages, seed=0)
    assert all(seq.status is SequenceStatus.FINISHED for stage in stages for seq in stage.seqs.values())
