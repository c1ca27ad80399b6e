"""min_p, top_k and top_p: which tokens they leave to choose from (chapter 8)."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.worker.sampler import log_of, weights_of

NUM_CANDIDATES = 1024  # tokens that are looked at before the whole vocabulary is sorted


def logit_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[R]: the least scaled logit that min_p, top_k and top_p, in this order, let pass. Ties at the border pass.

    top_p keeps a share of what min_p and top_k leave, so it needs the logits sorted, down to where it ends. The largest
    NUM_CANDIDATES nearly always suffice; rows for which they do not are decided over the whole vocabulary.
    """
    vocab_size = scaled.shape[1]
    largest = scaled.amax(-1)
    threshold = largest + log_of(min_p)  # p >= min_p * p_max, in logits
    weight_of_all = weights_of(scaled - largest[:, None]).sum(-1)

    def look_at(num_candidates: int, rows: Any) -> tuple[Tensor, Tensor]:
        """The rows' thresholds if only the largest num_candidates are looked at, and for which rows that is enough."""
        values = scaled[rows].topk(num_candidates).values  # [rows, num_candidates], descending
        kth = values.gather(1, top_k[rows, None].clamp(max=num_candidates) - 1)
        kept = (values >= threshold[rows, None]) & (values >= kth)
        weights = weights_of(values - largest[rows, None]) * kept
        # Where neither min_p nor top_k cuts within the candidates, later tokens have weights, too.
        cut = ~kept[:, -1]
        total = torch.where(cut, weights.sum(-1), weight_of_all[rows])
        wanted = torch.where(top_p[rows] < 1.0, top_p[rows] * total, torch.inf)
        kept &= weights.cumsum(-1) - weights < wanted[:, None]
        whole = (min_p[rows] == 0) & (top_k[rows] == vocab_size)  # nothing is cut beyond the candidates
        return values.masked_fill(~kept, torch.inf).amin(-1), cut | (whole & ~kept[:, -1])

    if scaled.device.type != "cpu":  # sorting all of it is faster than asking the device which rows need it
        return look_at(vocab_size, slice(None))[0]
    rows = ((top_k < vocab_size) | (top_p < 1.0)).nonzero().squeeze(1)
    for num_candidates in (min(NUM_CANDIDATES, vocab_size), vocab_size):
        if len(rows):
            found, decided = look_at(num_candidates, rows)
            decided |= num_candidates == vocab_size
            threshold[rows[decided]] = found[decided]
            rows = rows[~decided]
    return threshold
