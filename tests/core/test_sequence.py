"""Sequence: what it keeps of a prompt, and what of it is generated."""

from nanovllm.core.block_hash import MMSpan
from nanovllm.core.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams


def test_generated_tokens_are_those_after_the_prompt():
    prompt = [5, 6, 7]
    seq = Sequence(prompt)
    seq.append(8)
    seq.append(9)
    assert prompt == [5, 6, 7], "the caller's list is the caller's"
    assert (seq.tokens, seq.num_prompt_tokens) == ([5, 6, 7, 8, 9], 3)
    assert (seq.num_generated_tokens, seq.generated_token_ids) == (2, [8, 9])
    assert seq.status is SequenceStatus.WAITING and seq.block_table == [] and "3+2 tokens" in repr(seq)


def test_seed_is_the_callers_or_ones_own():
    first, second = Sequence([1]), Sequence([1])
    assert first.seq_id != second.seq_id and first.seed != second.seed
    assert Sequence([1], SamplingParams(seed=0)).seed == 0


def test_extra_keys():
    assert not Sequence([1]).has_extra_keys
    for keys in (dict(cache_salt="a"), dict(lora_id=0), dict(mm_spans=((0, 1, "image"),))):
        assert Sequence([1], **keys).has_extra_keys
    assert Sequence([1], mm_spans=((0, 1, "image"),)).mm_spans == (MMSpan(0, 1, "image"),)
