"""How often two models agree, by what decides: rejection sampling, the same noise, or noises of their own."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch


@torch.inference_mode()
def all_logits(runner: Any, token_ids: list[int]) -> Tensor:
    """[number of tokens, vocab_size]: one step of a ModelRunner whose pool nobody uses just now."""
    seq, num_tokens = Sequence(token_ids), len(token_ids)
    seq.block_table = list(range(-(-num_tokens // runner.block_size)))
    output = SchedulerOutput([ScheduledChunk(seq, 0, num_tokens, 0)], [], num_tokens)
    batch = replace(Batch.from_scheduler_output(output, runner.block_size), logits_rows=torch.arange(num_tokens))
    logits = runner.model.logits(runner.forward(batch.to(runner.device)))
    return logits.float().cpu()


def agreement(target: Tensor, draft: Tensor, temperature: float) -> list[float]:
    """Of logits [positions, vocab_size] of two models: how probable it is, on average over the positions of a text,
    that the token of one is the other's, too: by rejection sampling, with the same noise, with noises of their own."""
    if temperature == 0:
        return 3 * [float((target.argmax(-1) == draft.argmax(-1)).float().mean())]
    p, q = ((logits.double() / temperature).softmax(-1) for logits in (target, draft))
    upper_p, upper_q = p.cumsum(-1), q.cumsum(-1)
    # A number in [0, 1) picks the token in whose stretch of the line it falls: where both models' stretches overlap.
    overlap = torch.minimum(upper_p, upper_q) - torch.maximum(upper_p - p, upper_q - q)
    sums = (torch.minimum(p, q).sum(-1), overlap.clamp_min(0).sum(-1), (p * q).sum(-1))
    return [float(x.mean()) for x in sums]
