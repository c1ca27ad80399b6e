"""min_p, top_k and top_p over vocabularies that are larger than the candidates that are looked at first."""

import pytest
import torch

from nanovllm.core.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.sampler import NUM_CANDIDATES, SamplingBatch, logit_threshold
from tests.worker.test_sampler import draw, exact_probs


def test_a_vocabulary_larger_than_the_candidates():
    """A flat distribution over many tokens: top_p must look past the candidates, and min_p or top_k must not."""
    torch.manual_seed(0)
    vocab = 3 * NUM_CANDIDATES
    logits = torch.randn(vocab) * 0.01
    for options in (dict(top_p=0.9), dict(top_p=0.9, min_p=0.98), dict(top_k=5), dict(top_k=2000, top_p=0.5)):
        params = SamplingParams(**options)
        allowed = {i for i, p in enumerate(exact_probs(logits.tolist(), params)) if p > 0}
        seqs = [Sequence([1], params) for _ in range(1000)]
        found = set(draw(logits.repeat(1000, 1), seqs))
        # float32 and float64 may disagree on the one token at the border.
        assert len(found - allowed) <= 1
        assert len(found) > 0.4 * min(len(allowed), 1000)


@pytest.mark.parametrize("spread", [0.01, 1.0, 2.5, 6.0])
def test_threshold_wherever_the_filters_end(spread):
    """Each filter may end among the candidates, behind them, or not at all, beside each way of the others."""
    torch.manual_seed(1)
    vocab = 3 * NUM_CANDIDATES
    logits = torch.randn(vocab) * spread
    top_ks = (0, 5, NUM_CANDIDATES, NUM_CANDIDATES + 1, 2 * NUM_CANDIDATES, vocab - 1)
    settings = [
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
        for top_k in top_ks
        for top_p in (0.05, 0.5, 0.9, 0.999, 1.0)
        for min_p in (0.0, 1e-4, 0.1, 0.98)
    ]
    batch = SamplingBatch.from_sequences([Sequence([0], params) for params in settings])
    top_k = torch.where(batch.top_k > 0, batch.top_k, vocab)
    thresholds = logit_threshold(logits.repeat(len(settings), 1), top_k, batch.top_p, batch.min_p)
    for params, threshold in zip(settings, thresholds, strict=True):
        num_kept = int((logits >= threshold).sum())
        num_right = sum(p > 0 for p in exact_probs(logits.tolist(), params))
        # float32 and float64 may disagree at the border, the more so the flatter it is there.
        assert abs(num_kept - num_right) <= max(1, 2e-3 * num_right), f"{params}: {num_kept}, right is {num_right}"
