"""ModelRunner: a SchedulerOutput -> tensors -> logits -> token ids (chapters 2, 6 and 10).

It owns everything that is a tensor: the weights, the KV pool, the batch. It never decides what to compute.
"""

import logging
from pathlib import Path

import torch

from nanovllm.config import EngineConfig, ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker import cpu_memory
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu_kernels import load_cpu_kernels
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.kv_cache import KVCache, num_blocks_for_pool
from nanovllm.worker.layers import RotaryEmbedding, reorder_weights
from nanovllm.worker.loader import load_model
from nanovllm.worker.sampler import TokenLogprobs, sample

logger = logging.getLogger("nanovllm")

DEFAULT_BLOCK_SIZE = 16


class ModelRunner:
    """Makes the KV pool, loads the model and executes steps.

    block_size, num_blocks   the pool's shape, for the block manager; known once load() has returned
    max_model_len            what the caller asked for, or the most that model and pool allow
    """

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        """Check what can be checked before any weight is read, and on a CPU begin to make the KV pool."""
        self.config, self.model_config = config, model_config
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
        self.block_size = config.block_size or DEFAULT_BLOCK_SIZE
        limit = model_config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")
        self.max_model_len = config.max_model_len or limit
        if self.device.type == "cpu":
            self._make_pool(cpu_memory.free_bytes(config.gpu_memory_utilization))
            self._touching = cpu_memory.touch(list(self.kv_cache.data.flatten(0, 1)))

    def load(self, directory: Path, eos_token_ids: frozenset[int]) -> None:
        """Load the weights and get ready for the first step."""
        self._eos_token_ids = eos_token_ids
        on_cpu, model_config = self.device.type == "cpu", self.model_config
        optimizations = () if self.config.enforce_eager or not on_cpu else self.config.optimizations
        self.kernels = TORCH_KERNELS
        if "c_kernels" in optimizations:
            self.kernels = load_cpu_kernels(model_config, self.dtype) or TORCH_KERNELS
        self.model = load_model(directory, model_config, self.dtype, self.device)
        if "reordered_weights" in optimizations:
            reorder_weights(self.model, self.kernels)
        limit = model_config.max_position_embeddings
        self.rotary = RotaryEmbedding(model_config, limit, self.dtype, self.device)
        self._logits = torch.empty(0)
        if on_cpu:
            cpu_memory.keep_freed_memory()
            self._touching.join()
        else:
            self._make_pool(self._free_cuda_bytes())
        size = f"{self.num_blocks * self.block_size} tokens, {self.kv_cache.num_bytes / 1e6:.1f} MB in {self.dtype}"
        blocks = f"{self.num_blocks} blocks of {self.block_size}"
        logger.info("KV pool: %s = %s; max_model_len %d", blocks, size, self.max_model_len)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Compute one step. Returns a token, and its logprobs if asked for, for each chunk that samples, in order."""
        batch = Batch.from_scheduler_output(output, self.block_size, self.device)
        seqs = [chunk.seq for chunk in output.chunks if chunk.samples]
        logits = self.model(batch, self.rotary, self.kv_cache, self.kernels)
        if not seqs:
            return [], []
        if self._logits.shape[0] < len(seqs):
            self._logits = torch.empty(len(seqs), logits.shape[1], dtype=torch.float32, device=self.device)
        # Into memory that is there already: page faults would cost more than the conversion.
        logits = self._logits[: len(seqs)].copy_(logits)
        return sample(logits, seqs, self._eos_token_ids)

    def _make_pool(self, free_bytes: int) -> None:
        self.num_blocks = num_blocks_for_pool(
            self.config, self.model_config, self.block_size, self.dtype, self.max_model_len, free_bytes
        )
        num_tokens = self.num_blocks * self.block_size
        if num_tokens < self.max_model_len and (self.config.max_model_len is not None or num_tokens < 2):
            raise ValueError(
                f"one sequence of max_model_len={self.max_model_len} tokens does not fit in the KV pool of "
                f"{self.num_blocks} blocks x {self.block_size} tokens; lower max_model_len or enlarge the pool "
                "(kv_cache_memory_bytes, num_gpu_blocks_override)"
            )
        if num_tokens < self.max_model_len:
            logger.info("max_model_len %d -> %d: what the KV pool holds", self.max_model_len, num_tokens)
            self.max_model_len = num_tokens
        self.kv_cache = KVCache(self.model_config, self.num_blocks, self.block_size, self.dtype, self.device)

    @torch.inference_mode()
    def _free_cuda_bytes(self) -> int:
        """What is left of gpu_memory_utilization beside the weights and the largest step, measured by running one."""
        num_tokens = min(self.config.max_num_batched_tokens, self.max_model_len)
        seq = Sequence([0] * num_tokens)
        seq.block_table = list(range(-(-num_tokens // self.block_size)))
        output = SchedulerOutput([ScheduledChunk(seq, 0, num_tokens, 0)], [], num_tokens)
        kv_cache = KVCache(self.model_config, len(seq.block_table), self.block_size, self.dtype, self.device)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        batch = Batch.from_scheduler_output(output, self.block_size, self.device)
        self.model(batch, self.rotary, kv_cache, self.kernels)
        peak = torch.cuda.max_memory_allocated() - before
        del kv_cache
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return int(total * self.config.gpu_memory_utilization) - (total - free) - peak
