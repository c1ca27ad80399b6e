"""ModelRunner: a SchedulerOutput -> tensors -> logits -> token ids (chapters 2, 6 and 10).

It owns everything that is a tensor: the weights, the KV pool, the batch. It never decides what to compute.
"""

from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.pool import check_pool, log_pool, num_blocks_for_pool
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.worker.batch import Batch
from nanovllm.worker.kv_cache import KVCache, KVPool
from nanovllm.worker.layers import RotaryEmbedding
from nanovllm.worker.loader import load_model
from nanovllm.worker.sampler import SamplingBatch, sample

if TYPE_CHECKING:
    from nanovllm.features.logprobs.scores import PromptLogprobs, TokenLogprobs
    from nanovllm.features.lora.slots import BatchAdapters

DEFAULT_BLOCK_SIZE = 16
Packed = tuple[Batch, SamplingBatch, "BatchAdapters | None"]


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """What execute() makes of a batch: an entry for each row of logits. pooled instead of tokens, if the model pools.

    prompt_logprobs: (seq_id, position, of the token there), where a request asks for them.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: "list[TokenLogprobs | None]" = field(default_factory=list)
    pooled: list[torch.Tensor] = field(default_factory=list)
    prompt_logprobs: "PromptLogprobs" = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step has computed. Each list has an entry for each chunk of the SchedulerOutput, in its order.

    sampled_token_ids   a token for each row with logits (ScheduledChunk.num_logits): none for a chunk inside a prompt
    logprobs            of the same rows; None where the request asks for none
    pooled              the sequence's vector, float32 in the CPU's memory; None inside a prompt, or without pooling
    prompt_logprobs     (position, of the prompt's token there) for each row whose next token is the prompt's
    """

    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: "list[list[TokenLogprobs | None]]" = field(default_factory=list)
    pooled: list[torch.Tensor | None] = field(default_factory=list)
    prompt_logprobs: "list[list[tuple[int, TokenLogprobs]]]" = field(default_factory=list)

    @classmethod
    def from_rows(cls, output: SchedulerOutput, rows: RowOutputs) -> "ModelRunnerOutput":
        """Give each chunk what was computed in its rows."""
        prompt_logprobs: dict[int, list[tuple[int, TokenLogprobs]]] = {}
        for seq_id, position, found in rows.prompt_logprobs:
            prompt_logprobs.setdefault(seq_id, []).append((position, found))
        return cls(
            sampled_token_ids=output.per_chunk(rows.token_ids),
            logprobs=output.per_chunk(rows.logprobs),
            pooled=[vectors[0] if vectors else None for vectors in output.per_chunk(rows.pooled)],
            prompt_logprobs=[prompt_logprobs.get(chunk.seq.seq_id, []) for chunk in output.chunks],
        )


def pack(output: SchedulerOutput, block_size: int, eos_token_ids: frozenset[int]) -> Packed:
    """A step as arrays: all that a rank is told of it. eos_token_ids: not to be sampled before min_tokens."""
    batch, adapters = Batch.from_scheduler_output(output, block_size), None
    sampling = SamplingBatch.from_scheduler_output(output, eos_token_ids)
    if sampling.prompt_rows is not None:
        batch = replace(batch, logits_rows=torch.cat([batch.logits_rows, sampling.prompt_rows.rows]))
    if any(chunk.seq.adapter is not None for chunk in output.chunks):
        from nanovllm.features.lora.slots import BatchAdapters

        adapters = BatchAdapters.from_scheduler_output(output)
    return batch, sampling, adapters


def platform_of_this_machine() -> Any:
    """The module of what a CPU and a GPU do differently; the other one is not loaded."""
    if torch.cuda.is_available():
        from nanovllm.worker.cuda import platform as cuda

        return cuda
    from nanovllm.worker.cpu import platform as cpu

    return cpu


class ModelRunner:
    """All of the model, or one rank's share (features/parallel). load(), prepare(), then a run() for each step.

    same_bits         where a row's logits have the same bits, whatever else a step computes: see cpu/platform.py
    """

    group: Any = None  # of ranks
    states: Any = None  # of a hybrid model (features/hybrid/state_pool.py)

    def __init__(self, config: EngineConfig, model_config: ModelConfig, local_config: Any = None) -> None:
        """Check what can be checked before any weight is read, and on a CPU begin to make the KV pool.

        local_config: the sizes of this rank's share of the model.
        """
        self.config, self.model_config, self.local_config = config, model_config, local_config or model_config
        self.platform = platform_of_this_machine()
        self.device = self.platform.device()
        self.dtype = getattr(torch, model_config.dtype if config.dtype == "auto" else config.dtype)
        limit = model_config.max_position_embeddings
        if config.max_model_len is not None and config.max_model_len > limit:
            raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {limit} positions")
        self.max_model_len = config.max_model_len or limit
        self.kernels, block_size = self.platform.choose_kernels(self)
        self.block_size = config.block_size or block_size or DEFAULT_BLOCK_SIZE
        self.kv_config, self.kv_dtype = self.platform.kv_numbers(self)
        self._graphs: Any = None
        self._logits = torch.empty(0)
        self.platform.begin_pool(self)

    def load(self, directory: Path) -> None:
        """Read the weights."""
        config = self.config
        self.model = load_model(
            directory,
            self.model_config,
            dtype=self.dtype,
            device=self.device,
            group=self.group,
            quantization=config.quantization,
            kernels=self.kernels,
            dummy=config.load_format == "dummy",
        )
        self.weight_bytes = sum(tensor.nbytes for tensor in chain(self.model.parameters(), self.model.buffers()))
        self._step_context = self.platform.finish_load(self)
        self.rotary = RotaryEmbedding(self.model_config, self.max_model_len, self.dtype, self.device)
        self.adapter_slots = None
        if config.enable_lora:
            from nanovllm.features.lora.slots import AdapterSlots

            self.adapter_slots = AdapterSlots(
                self.model,
                config,
                self.model_config,
                kernels=self.kernels,
                dtype=self.dtype,
                device=self.device,
                group=self.group,
            )

    def prepare(self, eos_token_ids: frozenset[int]) -> KVPool:
        """The weights are there: finish the KV pool, on a GPU record the decode graphs. Returns the pool's size."""
        self.eos_token_ids = eos_token_ids
        self._graphs = self.platform.finish_pool(self)
        self.same_bits = self.platform.same_bits(self)
        log_pool(self)
        return KVPool(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            num_bytes=self.kv_cache.num_bytes,
            states=self.states and self.states.slots,
        )

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step; nothing, if it has no chunks."""
        if not output.chunks:
            return ModelRunnerOutput()
        batch, sampling, adapters = pack(output, self.block_size, self.eos_token_ids)
        rows = self.execute(batch, sampling, adapters)
        return ModelRunnerOutput.from_rows(output, rows)

    @torch.inference_mode()
    def execute(self, batch: Batch, sampling: SamplingBatch, adapters: "BatchAdapters | None") -> RowOutputs:
        """run() on what pack() has made of a step."""
        with self._step_context():
            if self.adapter_slots is not None:
                self.adapter_slots.begin_step(adapters, batch)
            hidden = None if self._graphs is None or adapters is not None else self._graphs.run(batch)
            if hidden is None:
                hidden = self.forward(batch.to(self.device))  # [num_sampled + prompt rows, hidden_size]
            if sampling.prompt_rows is None:
                return self._sample(self.model.logits(hidden), sampling)
            num_sampled = len(sampling.num_logprobs)
            output = self._sample(self.model.logits(hidden[:num_sampled]), sampling)
            prompt_logprobs = sampling.prompt_rows.score(self.model.logits, hidden[num_sampled:])
            return replace(output, prompt_logprobs=prompt_logprobs)

    def usage(self) -> dict[str, int]:
        """Bytes of the weights and of the KV pool."""
        return {"weights": self.weight_bytes, "kv_cache": self.kv_cache.num_bytes}

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.model(batch, self.rotary, self.kv_cache, self.kernels)

    def _sample(self, logits: torch.Tensor, sampling: SamplingBatch) -> RowOutputs:
        num_rows = len(logits)
        if num_rows == 0:  # a step of prompt chunks only, or a rank that gets no logits
            return RowOutputs()
        if self.model_config.pooling is not None:
            return RowOutputs(pooled=[vector.clone() for vector in logits.cpu()])
        if sampling.is_greedy:
            return RowOutputs(self.kernels.most_likely(logits), [None] * num_rows)
        if self._logits.shape[0] < num_rows:
            self._logits = torch.empty(num_rows, logits.shape[1], dtype=torch.float32, device=self.device)
        # The sampler changes its logits. The buffer is kept from step to step: page faults of a new one take longer.
        token_ids, logprobs = sample(self._logits[:num_rows].copy_(logits), sampling)
        return RowOutputs(token_ids, logprobs)

    def make_pool(self, free_bytes: int) -> None:
        """free_bytes: what K/V may take, and states where there are any."""
        if self.model_config.hybrid is not None:
            from nanovllm.features.hybrid.state_pool import StatePool

            self.states = StatePool(self.config, self.local_config, self.dtype, self.device, free_bytes)
            free_bytes -= self.states.slots.num_bytes
        self.num_blocks = num_blocks_for_pool(
            self.config,
            self.kv_config,
            block_size=self.block_size,
            itemsize=self.kv_dtype.itemsize,
            max_model_len=self.max_model_len,
            free_bytes=free_bytes,
        )
        self.max_model_len = check_pool(self.config, self.num_blocks, self.block_size, self.max_model_len)
        self.kv_cache = KVCache(
            self.kv_config,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=self.kv_dtype,
            device=self.device,
            states=self.states,
        )
