"""ModelRunner: a SchedulerOutput -> tensors -> logits -> token ids (chapters 2, 6 and 10).

It owns everything that is a tensor: the weights, the KV pool, the batch. It never decides what to compute.
"""

import logging
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.features.logprobs.scores import PromptLogprobs, PromptRows, TokenLogprobs, forward_and_score
from nanovllm.features.lora.slots import Adapters, BatchAdapters
from nanovllm.features.parallel.group import Group, shard_config
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu import memory as cpu_memory
from nanovllm.worker.cpu.kernels import load_cpu_kernels
from nanovllm.worker.cpu.threads import step_threads
from nanovllm.worker.cuda import memory as cuda_memory
from nanovllm.worker.cuda.graphs import DecodeGraphs
from nanovllm.worker.cuda.kernels import load_cuda_kernels
from nanovllm.worker.kernels import TORCH_KERNELS, Kernels
from nanovllm.worker.kv_cache import KVCache, KVPool, num_blocks_for_pool
from nanovllm.worker.layers import RotaryEmbedding, reorder_weights
from nanovllm.worker.loader import load_model
from nanovllm.worker.sampler import SamplingBatch, sample

logger = logging.getLogger("nanovllm")

DEFAULT_BLOCK_SIZE = 16
Sampled = tuple[list[int], list[TokenLogprobs | None]]
Packed = tuple[Batch, SamplingBatch, BatchAdapters | None]


def pack(output: SchedulerOutput, block_size: int, eos_token_ids: frozenset[int]) -> Packed:
    """A step as arrays: all that a rank is told of it. eos_token_ids: not to be sampled before min_tokens."""
    batch = Batch.from_scheduler_output(output, block_size)
    seqs = [seq for chunk in output.chunks for seq in chunk.sampled_seqs()]
    sampling = SamplingBatch.from_sequences(seqs, eos_token_ids, PromptRows.from_scheduler_output(output))
    return batch, sampling, BatchAdapters.from_scheduler_output(output)


class ModelRunner:
    """One rank's share of the model; alone, all of it. load(), prepare(), then a run() for each step."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, group: Group = Group()) -> None:
        """Check what can be checked before any weight is read, and on a CPU begin to make the KV pool."""
        self.config, self.model_config, self.group = config, model_config, group
        self.local_config = shard_config(model_config, group.size)
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", group.rank) if on_gpu else torch.device("cpu")
        self.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
        limit = model_config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")
        self.max_model_len = config.max_model_len or limit
        kernels, block_size = self._choose_kernels()
        self.kernels, self.block_size = kernels or TORCH_KERNELS, config.block_size or block_size or DEFAULT_BLOCK_SIZE
        if not on_gpu:
            self.make_pool(cpu_memory.free_bytes(config.gpu_memory_utilization) // group.size)
            self._prefaulting = cpu_memory.prefault(list(self.kv_cache.data.flatten(0, 1)))

    def load(self, directory: Path) -> None:
        """Read the weights."""
        kind = self.dtype, self.device, self.group, self.config.quantization, self.kernels
        self.model = load_model(directory, self.model_config, *kind, self.config.load_format == "dummy")
        self.weight_bytes = sum(tensor.nbytes for tensor in chain(self.model.parameters(), self.model.buffers()))
        on_cpu = self.device.type == "cpu"
        if on_cpu and "reordered_weights" in self.config.optimizations:
            reorder_weights(self.model, self.kernels)
        self._threads = step_threads(self.model, self.kernels) if on_cpu else nullcontext
        self.adapters = Adapters(self.model, self.config, self.model_config, self.kernels, self.dtype, self.device)
        self.rotary = RotaryEmbedding(self.model_config, self.max_model_len, self.dtype, self.device)
        self._logits = torch.empty(0)
        self._prompt_logprobs: PromptLogprobs = []
        self._graphs: DecodeGraphs | None = None

    def prepare(self, eos_token_ids: frozenset[int]) -> KVPool:
        """Get ready for the first step."""
        self.eos_token_ids = eos_token_ids
        if self.device.type == "cpu":
            cpu_memory.keep_freed_memory()
            self._prefaulting.join()
        else:
            self._graphs = cuda_memory.make_pool(self)
        num_bytes = self.kv_cache.num_bytes
        if self.group.rank == 0:
            size = f"{self.num_blocks * self.block_size} tokens, {num_bytes / 1e6:.1f} MB in {self.dtype}"
            blocks = f"{self.num_blocks} blocks of {self.block_size}"
            logger.info("KV pool: %s = %s; max_model_len %d", blocks, size, self.max_model_len)
        return KVPool(self.num_blocks, self.block_size, self.max_model_len, num_bytes)

    def run(self, output: SchedulerOutput) -> Sampled:
        """Compute one step. Returns a token, and its logprobs if asked for, for each row of logits, in order."""
        return self.execute(*pack(output, self.block_size, self.eos_token_ids))

    @torch.inference_mode()
    def execute(self, batch: Batch, sampling: SamplingBatch, adapters: BatchAdapters | None) -> Sampled:
        """run() on what pack() has made of a step."""
        logits, self._prompt_logprobs = None, []
        with self._threads():
            self.adapters.begin_step(adapters, batch, sampling.prompt)
            batch = batch.to(self.device)
            if sampling.prompt is not None:
                context = self.rotary, self.kv_cache, self.kernels
                logits, self._prompt_logprobs = forward_and_score(self.model, batch, sampling.prompt, *context)
            elif self._graphs is not None and adapters is None:
                logits = self._graphs.run(batch)
            if logits is None:
                logits = self.forward(batch)
            return self._sample(logits, sampling)

    def take_prompt_logprobs(self) -> PromptLogprobs:
        """What the step has found out about prompts that ask for it; once."""
        found, self._prompt_logprobs = self._prompt_logprobs, []
        return found

    def usage(self) -> dict[str, int]:
        """Bytes of this rank: its weights, its KV pool, what it has sent through all-reduces so far."""
        reduced = self.group.num_reduced_bytes
        return {"weights": self.weight_bytes, "kv_cache": self.kv_cache.num_bytes, "all_reduced": reduced}

    def _choose_kernels(self) -> tuple[Kernels | None, int | None]:
        """(kernels, block size that suits them); None: nothing better than PyTorch's operations, any size."""
        if self.device.type == "cuda":
            return load_cuda_kernels(self.config, self.local_config.head_dim, self.dtype)
        in_c = "c_kernels" in self.config.optimizations
        return load_cpu_kernels(self.local_config, self.dtype) if in_c else None, None

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.model(batch, self.rotary, self.kv_cache, self.kernels)

    def _sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> Sampled:
        num_rows = len(sampling.num_logprobs)
        if num_rows == 0 or self.group.rank > 0:
            return [], []
        if self._logits.shape[0] < num_rows:
            self._logits = torch.empty(num_rows, logits.shape[1], dtype=torch.float32, device=self.device)
        # Into a buffer that is kept: the page faults of a new one cost more than the conversion.
        return sample(self._logits[:num_rows].copy_(logits), sampling)

    def make_pool(self, free_bytes: int) -> None:
        sizes = self.local_config, self.block_size, self.dtype, self.max_model_len
        self.num_blocks = self.group.smallest(num_blocks_for_pool(self.config, *sizes, free_bytes))
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
        self.kv_cache = KVCache(self.local_config, self.num_blocks, self.block_size, self.dtype, self.device)
