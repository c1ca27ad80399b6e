"""The played model of chapter 13: it draws as the sampler does, and what happens to a sequence changes no answer."""

import pytest

from chapters.ch13_guess_and_check.again import Played, answer_alone, hat, noise
from nanovllm.core.sequence import Sequence
from nanovllm.worker.sampler import uniform_noise

ALL = {"num_blocks": 18, "num_draft_tokens": 3, "fails": True}


def test_numbers_are_the_samplers():
    seq = Sequence([1, 2, 3])
    for seq.seed, seq.sample_index in ((7, 0), (7, 1), (-3, 0)):
        seq.append(5)
        assert noise(seq) == uniform_noise(seq)


@pytest.mark.parametrize("options", [{}, *({name: ALL[name]} for name in ALL), ALL])
def test_answers_are_those_of_each_sequence_alone(options):
    played = Played(**options)
    assert played.answers() == [answer_alone(seq, 20) for seq in played.seqs]
    assert bool(played.num_preemptions) == ("num_blocks" in options)
    assert bool(played.num_failures) == ("fails" in options)
    played.scheduler.check_integrity()
    assert len(played.scheduler.block_manager.free_blocks) == len(played.scheduler.block_manager.blocks)


def test_one_generator_for_all_is_noticed():
    assert Played(draw=hat()).answers() != Played(draw=hat(), num_draft_tokens=3).answers()
