"""Memory on a GPU: what is left for the KV pool (chapter 3)."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.features.speculation.config import max_num_logits
from nanovllm.sampling_params import SamplingParams
from nanovllm.worker.attention import paged_attention
from nanovllm.worker.batch import cdiv
from nanovllm.worker.cuda.graphs import DecodeGraphs
from nanovllm.worker.kv_cache import KVCache
from nanovllm.worker.sampler import SamplingBatch, sample

logger = logging.getLogger("nanovllm")


@torch.inference_mode()
def make_pool(runner: Any) -> DecodeGraphs | None:
    """Give a ModelRunner the pool that the largest step and the graphs leave room for; both are tried on one block.

    Returns the graphs, recorded; None where a step cannot be recorded.
    """
    config, model_config, block_size = runner.config, runner.model_config, runner.block_size

    def record() -> DecodeGraphs:
        return DecodeGraphs(runner.forward, config.max_num_seqs, runner.max_model_len, block_size, runner.device)

    states = None
    if model_config.hybrid is not None:
        from nanovllm.features.hybrid.state_pool import StatePool

        states = StatePool(config, runner.local_config, runner.dtype, runner.device, 0)
    runner.kv_cache = KVCache(runner.local_config, 1, block_size, runner.dtype, runner.device, states)
    why_not = why_no_graphs(runner)
    logger.info("CUDA graphs: %s", "yes" if why_not is None else f"none, because {why_not}")

    def compute_logits(num_rows: int) -> Tensor:
        hidden = torch.zeros(num_rows, model_config.hidden_size, dtype=runner.dtype, device=runner.device)
        return runner.model.logits(hidden)

    runner.make_pool(
        free_bytes(
            config,
            runner.max_model_len,
            block_size,
            run=runner.run,
            compute_logits=compute_logits,
            record_graphs=record if why_not is None else None,
        )
    )
    return record() if why_not is None else None  # again: graphs read the pool that they were recorded with


def why_no_graphs(runner: Any) -> str | None:
    """Why a ModelRunner's decode steps cannot be recorded; None if they can. A graph cannot wait for a value."""
    if "cuda_graphs" not in runner.config.optimizations:
        return "they are switched off"
    if runner.model_config.pooling is not None:
        return "the steps of a pooling model are prompts"
    if runner.kernels.paged_attention is paged_attention:
        return "PyTorch's attention gathers as many keys as a step's longest sequence has"
    if runner.model_config.expert_layers:
        return "how many rows meet an expert is known only in the step"
    if runner.model_config.hybrid is not None:
        return "which slots hold the states is known only in the step"
    return None


def free_bytes(
    config: EngineConfig,
    max_model_len: int,
    block_size: int,
    run: Callable[[SchedulerOutput], object],
    compute_logits: Callable[[int], Tensor],
    record_graphs: Callable | None,
) -> int:
    """What the KV pool may take: gpu_memory_utilization of the GPU, less weights, the largest step and the graphs.

    compute_logits: of so many rows. Step and graphs are measured by running and recording them; record_graphs is None
    if there are none.
    """
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    num_tokens = min(config.max_num_batched_tokens, max_model_len)
    seq = Sequence([0] * num_tokens, SamplingParams(top_p=0.9))
    seq.block_table = [0] * cdiv(num_tokens, block_size)
    chunks = [ScheduledChunk(seq, 0, num_tokens, 0)] * (config.max_num_batched_tokens // num_tokens)
    run(SchedulerOutput(chunks, [], num_tokens * len(chunks)))
    num_rows = max_num_logits(config.max_num_seqs, config.speculative_config)
    logits = compute_logits(num_rows)
    if len(logits) > 0:  # of several ranks only the first gets logits, and samples
        sample(logits, SamplingBatch.from_sequences([seq] * num_rows))
        del logits
    step_bytes = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    left = int(total * config.gpu_memory_utilization) - (total - free) - step_bytes
    if record_graphs is not None:
        graphs = record_graphs()
        left -= free - torch.cuda.mem_get_info()[0]
        del graphs
        torch.cuda.empty_cache()
    return left
