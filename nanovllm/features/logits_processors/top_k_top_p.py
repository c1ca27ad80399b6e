"""min_p, top_k and top_p: which tokens they leave to choose from (chapter 8)."""

from typing import Any

import torch
from torch import Tensor

NUM_CANDIDATES = 1024  # tokens that are looked at before the whole vocabulary is sorted


def logit_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[R]: the least scaled logit that min_p, top_k and top_p, in this order, let pass. Ties at the border pass.

    top_p keeps a share of what min_p and top_k leave, so it needs the logits sorted, down to where it ends. The largest
    NUM_CANDIDATES nearly always suffice; rows for which they do not are decided over the whole vocabulary.
    """
    vocab_size = scaled.shape[1]
    threshold = scaled.amax(-1) + min_p.log()  # p >= min_p * p_max, in logits
    log_total = scaled.logsumexp(-1, keepdim=True)

    def look_at(num_candidates: int, rows: Any) -> tuple[Tensor, Tensor]:
        """The rows' thresholds if only the largest num_candidates are looked at, and for which rows that is enough."""
        values = scaled[rows].topk(num_candidates).values  # [rows, num_candidates], descending
        rank = torch.arange(num_candidates, device=values.device)
        kept = (values >= threshold[rows, None]) & (rank < top_k[rows, None])
        probs = (values - log_total[rows]).exp() * kept
        # Where neither min_p nor top_k cuts within the candidates, the tokens behind them have probability, too.
        cut = (top_k[rows] <= num_candidates) | ~kept[:, -1]
        total = torch.where(cut, probs.sum(-1), 1.0)
        wanted = torch.where(top_p[rows] < 1.0, top_p[rows] * total, torch.inf)
        kept &= probs.cumsum(-1) - probs < wanted[:, None]
        whole = (min_p[rows] == 0) & (top_k[rows] == vocab_size)  # nothing is cut behind them: the total is 1
        return values.masked_fill(~kept, torch.inf).amin(-1), cut | (whole & ~kept[:, -1])

    if scaled.device.type != "cpu":  # sorting all of it is faster than asking the device which rows need it
        return look_at(vocab_size, slice(None))[0]
    rows = ((top_k < vocab_size) | (top_p < 1.0)).nonzero().squeeze(1)
    for num_candidates in (min(NUM_CANDIDATES, vocab_size), vocab_size):
        if len(rows):
            found, decided = look_at(num_candidates, rows)
            threshold[rows[decided]] = found[decided]
            rows = rows[~decided]
    return threshold
