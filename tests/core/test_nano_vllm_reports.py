"""What users of nano-vllm reported, as tests of this engine (chapters/from_nano_vllm.md says what became of each).

The numbers are those of github.com/GeeeekExplorer/nano-vllm. Blocks have 4 tokens, and every sampled token is 7.
"""

import torch

from nanovllm.core.scheduler import ScheduledChunk, Scheduler, SchedulerOutput
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.worker.batch import Batch
from tests.core.by_hand import admit, make, sequence


def sample(scheduler: Scheduler, output: SchedulerOutput) -> None:
    scheduler.update(output, [[7] * chunk.num_logits for chunk in output.chunks])
    scheduler.check_integrity()


def step(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule()
    sample(scheduler, output)
    return output


def chunk_of(output: SchedulerOutput, seq: Sequence) -> ScheduledChunk:
    [chunk] = [chunk for chunk in output.chunks if chunk.seq is seq]
    return chunk


def test_a_fully_cached_prompt_computes_its_last_token():
    """Issues 114 and 144, pull request 199: nothing was left to compute, and the attention kernel refused 0 rows."""
    scheduler = make()
    first, again = sequence(range(8)), sequence(range(8))  # exactly two blocks
    scheduler.add(first)
    step(scheduler)
    scheduler.add(again)
    chunk = chunk_of(step(scheduler), again)
    assert (chunk.start, chunk.end, chunk.num_logits) == (7, 8, 1)
    assert chunk.write_start == chunk.end, "its K/V is there, in a block that `first` reads in the same step"
    assert again.block_table[:2] == first.block_table[:2]
    assert again.generated_token_ids == [7]


def test_a_resumed_sequence_computes_all_that_it_has_lost():
    """Issue 144, pull requests 103 and 145: "has generated tokens" was read as "decodes", so ranks got one token only.

    And pull request 217: by the same count, the token that the resuming step sampled was thrown away.
    """
    scheduler = make(num_blocks=6, max_model_len=24)
    older, younger = sequence(range(11), max_tokens=6), sequence(range(50, 61), max_tokens=12)
    scheduler.add(older)
    scheduler.add(younger)
    while not step(scheduler).preempted:
        pass
    assert younger.status is SequenceStatus.WAITING and younger.num_generated_tokens == 2
    while younger.status is SequenceStatus.WAITING:
        output = scheduler.schedule()
        if younger.status is SequenceStatus.WAITING:
            sample(scheduler, output)
    chunk = chunk_of(output, younger)
    assert chunk.start == younger.num_cached_tokens < younger.num_prompt_tokens
    assert chunk.end == len(younger.tokens) == younger.num_prompt_tokens + 2

    batch = Batch.from_scheduler_output(output, block_size=4)  # all that a rank is told
    assert torch.equal(batch.input_ids, torch.tensor(younger.tokens[chunk.start :]))
    sample(scheduler, output)
    assert younger.num_generated_tokens == 3, "the step that resumes it samples, as any other does"


def test_a_block_that_is_taken_is_not_found_under_its_old_hash():
    """Issue 163: the old hash still led to a block that held other K/V by then.

    Comparing the block's own tokens is not enough. Here the block gets the same four tokens once more, after others:
    same tokens, different K/V.
    """
    manager = make(num_blocks=4, max_model_len=16).block_manager
    ones, twos, threes, nines = ([token] * 4 for token in (1, 2, 3, 9))
    old = admit(manager, ones + nines)
    block_of_nines = old.block_table[1]
    manager.free(old)
    other = admit(manager, twos + threes + nines)
    assert other.block_table[2] == block_of_nines
    manager.free(other)
    again = Sequence(ones + nines + [5])
    assert manager.allocate_with_prefix(again)
    assert again.num_cached_tokens == 4, "after `ones`, nobody has computed `nines` since"
    manager.check_integrity()


def test_prompts_of_one_step_share_their_blocks():
    """Issues 208 and 219: two equal prompts in one step were computed twice, or shared blocks by an accident of timing.

    Here sharing is the rule: blocks are registered when they are scheduled, and every layer writes before it reads.
    """
    scheduler = make()
    first, second = sequence(range(8)), sequence(range(8))
    scheduler.add(first)
    scheduler.add(second)
    output = step(scheduler)
    assert [(chunk.start, chunk.end) for chunk in output.chunks] == [(0, 8), (7, 8)]
    assert second.block_table[:2] == first.block_table[:2]
    assert len(scheduler.block_manager.hash_to_block) == 2
