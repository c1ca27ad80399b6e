"""model.py and layers.py: logits at every position, against transformers."""

import random
from dataclasses import replace

import pytest
import torch

from nanovllm import LLM
from nanovllm.core.scheduler import SchedulerOutput, next_chunk
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch
from tests.checkpoints import reference_logits


def logits_of(llm: LLM, token_ids: list[int], ends: list[int]) -> torch.Tensor:
    """The engine's logits at every position, computed in chunks that end at `ends`."""
    seq = Sequence(token_ids)
    assert llm.engine.block_manager.allocate_with_prefix(seq)
    runner, rows, start = llm.engine.model_runner, [], 0
    with torch.inference_mode():
        for end in ends:
            chunk = next_chunk(seq, end - start, llm.engine.block_manager)
            output = SchedulerOutput([chunk], [], end - start)
            batch = Batch.from_scheduler_output(output, runner.block_size)
            batch = replace(batch, logits_rows=torch.arange(end - start)).to(runner.device)
            rows.append(runner.model.logits(runner.forward(batch)))
            start = end
    llm.engine.block_manager.free(seq)
    return torch.cat(rows).cpu()


@pytest.mark.parametrize("block_size", [4, 16])
def test_logits_at_every_position(every_checkpoint, block_size):
    check_logits(every_checkpoint, block_size=block_size, num_gpu_blocks_override=512 // block_size)


def check_logits(folder, **options) -> None:
    llm, token_ids = LLM(str(folder), dtype="float32", **options), random.Random(1).choices(range(320), k=150)
    expected = reference_logits(folder, token_ids)
    # transformers computes a state in chunks of 64, or token by token: with these weights they differ by 5e-4.
    atol = 1e-4 if llm.engine.model_config.hybrid is None else 1e-3
    for ends in ([150], [1, 16, 17, 80, 149, 150]):
        torch.testing.assert_close(logits_of(llm, token_ids, ends), expected, atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_close(checkpoint, dtype):
    folder = checkpoint("llama")
    llm = LLM(str(folder), dtype=dtype, num_gpu_blocks_override=64)
    token_ids = random.Random(3).choices(range(320), k=60)
    expected = reference_logits(folder, token_ids)
    error = (logits_of(llm, token_ids, [60]) - expected).abs().mean() / expected.abs().mean()
    assert error < (0.05 if dtype == "bfloat16" else 0.01)


def test_tied_embeddings_are_one_tensor(checkpoint):
    model = LLM(str(checkpoint("qwen2")), num_gpu_blocks_override=64, enforce_eager=True).engine.model_runner.model
    assert model.lm_head.weight is model.embed_tokens
