"""ModelRunner: a SchedulerOutput -> tensors -> logits -> token ids (chapters 2, 6 and 10).

It owns everything that is a tensor: the weights, the KV pool, the batch. It never decides what to compute.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from nanovllm import wings
from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.worker.batch import Batch, fetch_together, move_together
from nanovllm.worker.kv_cache import KVCache, KVPool, max_model_len_of_pool, num_blocks_for_pool
from nanovllm.worker.layers import Linear, RotaryEmbedding
from nanovllm.worker.loader import load_model
from nanovllm.worker.model import Decoder, ModelPart
from nanovllm.worker.platform import Platform, RecordedSteps
from nanovllm.worker.sampler import SamplingBatch, sample_rows

if TYPE_CHECKING:
    from nanovllm.features.hybrid.state_pool import StatePool
    from nanovllm.features.images.prompt_images import PromptImages
    from nanovllm.features.logprobs.scores import Scores, TokenLogprobs
    from nanovllm.features.parallel.group import RankGroup

logger = logging.getLogger("nanovllm")
Method = TypeVar("Method", bound=Callable[..., Any])

DEFAULT_BLOCK_SIZE = 16


# PyTorch's modes belong to the caller: what he has set around a call of ours changes nothing here. A default device and
# a default dtype need no mode: every tensor is made with a device and a dtype of its own (tests/worker/test_modes.py
# looks for one that is not).


@contextmanager
def own_modes(device: torch.device) -> Iterator[None]:
    """Without autocast and inference mode, so that what is made here can be changed later; and without gradients.

    A GPU is the current one meanwhile: Triton launches there, and each of a program's threads has its own.
    """
    with ExitStack() as modes:
        if device.type != "cpu":
            modes.enter_context(torch.cuda.device(device))
        for kind in {"cpu", device.type}:
            if torch.is_autocast_enabled(kind):
                modes.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        yield


def in_own_modes(method: Method) -> Method:
    """A decorator for methods of an object that has a device: they run in own_modes()."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        with own_modes(self.device):
            return method(self, *args, **options)

    return call  # pyrefly: ignore[bad-return]


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step has computed. Each list has an entry for each chunk of the SchedulerOutput, in its order.

    sampled_token_ids   a token for each row with logits (ScheduledChunk.num_logits): none for a chunk inside a prompt
    logprobs            the logprobs of each of these tokens; None where the request asks for none
    pooled              the sequence's vector, float32 in the CPU's memory; None inside a prompt, or without pooling
    prompt_logprobs     (position, TokenLogprobs of the token there) for each prompt token that the chunk's rows score
    """

    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: "list[list[TokenLogprobs | None]]" = field(default_factory=list)
    pooled: list[torch.Tensor | None] = field(default_factory=list)
    prompt_logprobs: "list[list[tuple[int, TokenLogprobs]]]" = field(default_factory=list)


def platform_of_this_machine() -> Platform:
    """The GPU's if there is one, else the CPU's. Only that platform's modules are imported."""
    if torch.cuda.is_available():
        from nanovllm.worker.cuda.platform import CUDAPlatform

        return CUDAPlatform()
    from nanovllm.worker.cpu.platform import CPUPlatform

    return CPUPlatform()


def weight_bytes_of(model: Decoder) -> int:
    """Bytes of all weights. What is embedding table and output head counts once, also if the head is a copy."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    if model.config.tie_word_embeddings and isinstance(model.embed_tokens, torch.nn.Parameter):
        linears = [linear for linear in linears if linear is not model.lm_head]
    reordered = [linear.weight for linear in linears if isinstance(linear.weight, torch.Tensor)]  # no longer parameters
    weights = [*model.parameters(), *model.buffers(), *reordered]
    return sum({id(tensor): tensor.nbytes for tensor in weights}.values())


def pack(output: SchedulerOutput, block_size: int, eos_token_ids: frozenset[int]) -> tuple[Batch, SamplingBatch]:
    """A step as tensors: all that a rank of a tensor-parallel group receives.

    eos_token_ids: tokens that are not sampled before min_tokens.
    """
    batch = Batch.from_scheduler_output(output, block_size)
    sampling = SamplingBatch.from_scheduler_output(output, eos_token_ids)
    if sampling.prompt_rows is not None:
        # First the rows that sample, then those of prompts.
        batch = replace(batch, logits_rows=torch.cat([batch.logits_rows, sampling.prompt_rows.rows]))
    return batch, sampling


def on_device(batch: Batch, sampling: SamplingBatch, device: torch.device) -> tuple[Batch, SamplingBatch]:
    """The same in a device's memory, moved by one non-blocking copy."""
    if device.type == "cpu":
        return batch, sampling
    batch_tensors, sampling_tensors = move_together((batch.tensors(), sampling.tensors()), device)
    return batch.with_tensors(batch_tensors), sampling.with_tensors(sampling_tensors)


class ModelRunner:
    """All of the model, or one rank's share (features/parallel). load(), prepare(), then a run() for each step.

    from the beginning
    parts             {name: ModelPart}, what wings keep beside the weights (wings.PARTS), once it has been asked for
    kv_config         the model's sizes as the KV cache sees them (Platform.kv_format), with kv_dtype

    from load() on
    model, rotary     the weights, and the angles of positions; weight_bytes: of all of them
    step_context      makes what each step runs in

    from the beginning on a CPU, from prepare() on elsewhere (allocate_kv_cache)
    kv_cache, states  K/V of num_blocks blocks, and a hybrid model's states; None for any other
    max_model_len     is lowered to what the pool holds

    from prepare() on
    recorded_steps    forward passes to replay; None: every step runs the model's code
    batch_invariant   says where a row's logits do not depend on the rest of the step (see Platform.batch_invariant)
    kv_layout         how kernels order the numbers of a block of the KV cache: what one engine has written, another can
                      read if both are equal
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        local_config: ModelConfig | None = None,
        group: "RankGroup | None" = None,
    ) -> None:
        """Check what can be checked before any weight is read, and on a CPU allocate the KV cache.

        model_config: of the whole model; its eos_token_ids are not sampled before min_tokens. local_config: the sizes
        of this rank's share. group: the ranks that share the model.
        """
        self.config = config
        self.model_config = model_config
        self.local_config = local_config or model_config
        self.group = group
        self.platform = platform_of_this_machine()
        self.device = self.platform.device
        dtype = model_config.dtype if config.dtype == "auto" else config.dtype
        self.dtype = getattr(torch, dtype)
        self.max_model_len = config.max_model_len or model_config.default_max_model_len
        if self.max_model_len > (most := model_config.most_positions):
            raise ValueError(f"max_model_len={config.max_model_len} is more than the model's {most} positions")
        self.kernels, block_size = self.platform.choose_kernels(config, self.local_config, self.dtype)
        self.block_size = config.block_size or block_size or DEFAULT_BLOCK_SIZE
        self.kv_config, self.kv_dtype = self.platform.kv_format(config, self.local_config, self.dtype, self.kernels)
        self.recorded_steps: RecordedSteps | None = None
        self.parts: dict[str, ModelPart] = {}
        self._free_bytes = self.platform.free_bytes(config)  # None on a GPU, where prepare() measures them
        if self._free_bytes is not None:
            with own_modes(self.device):
                self.allocate_kv_cache(self._free_bytes)

    @in_own_modes
    def load(self, directory: Path) -> None:
        """Read the weights."""
        config = self.config
        self.directory = directory
        with self.platform.loading(self):
            self.model = load_model(
                directory,
                self.model_config,
                dtype=self.dtype,
                device=self.device,
                group=self.group,
                quantization=config.round_to,
                kv_cache_dtype=config.kv_cache_dtype,
                kernels=self.kernels,
                dummy=config.load_format == "dummy",
                read_linear=self.platform.read_linear(config, self.kernels),
            )
        self.weight_bytes = weight_bytes_of(self.model)
        self.step_context = self.platform.step_context(self.model, self.kernels)
        # Before adapters stand in front of the products, at which it looks.
        self.batch_invariant = self.platform.batch_invariant(self.model, self.kernels)
        logger.info("Batch invariance: %s", self.batch_invariant)
        library = self.kernels.library  # which puts a key into a column, in units of one number or of two
        self.kv_layout = "rows" if library is None else f"columns of {library.unit_size()}"
        self.rotary = RotaryEmbedding(self.model_config, self.max_model_len, self.dtype, self.device)
        if config.enable_lora:
            self.load_part("adapters")

    @in_own_modes
    def load_part(self, name: str) -> None:
        """Make what a wing keeps beside the weights, if it is not there yet. Raises ValueError if its files do not fit.

        name: one of wings.PARTS.
        """
        if name not in self.parts:
            part = wings.load(wings.PARTS[name]).make_part(self)
            self.parts = self.parts | {name: part}  # not changed in place: a server's engine may be iterating over it

    @property
    def part_counts(self) -> dict[str, dict[str, int]]:
        """{name: ModelPart.counts of each part}."""
        return {name: part.counts for name, part in self.parts.items()}

    @property
    def has_ended(self) -> bool:
        """Asked after a step that failed: can nothing be computed any more?"""
        return self.platform.has_ended()

    @property
    def measures_memory(self) -> bool:
        """Does the KV pool get what the weights and the largest step leave? (On a GPU.)"""
        return self._free_bytes is None

    @in_own_modes
    def prepare(self, largest_image: "PromptImages | None" = None) -> KVPool:
        """Allocate the KV cache if that had to wait for the weights, and record what can be replayed.

        largest_image: the largest step, by which memory is measured, has it.
        """
        if self.measures_memory:
            self.kv_cache = self.kv_cache_of_one_block()
            free_bytes = self.platform.profile_free_bytes(self, largest_image)
            for part in self.parts.values():
                part.forget()
                free_bytes -= part.max_kept_bytes
            self.allocate_kv_cache(free_bytes)
        self.recorded_steps = self.platform.record_steps(self)
        return KVPool(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            num_bytes=self.kv_cache.num_bytes,
            states=None if self.states is None else self.states.slots,
        )

    def allocate_kv_cache(self, free_bytes: int) -> None:
        """Allocate the KV cache in its final size. free_bytes: memory for K/V and for a hybrid model's states."""
        self.states = self.make_states(free_bytes)
        if self.states is not None:
            free_bytes -= self.states.slots.num_bytes
        self.num_blocks = num_blocks_for_pool(
            self.config,
            self.kv_config,
            block_size=self.block_size,
            itemsize=self.kv_dtype.itemsize,
            max_model_len=self.max_model_len,
            free_bytes=free_bytes,
        )
        self.max_model_len = max_model_len_of_pool(self.config, self.num_blocks, self.block_size, self.max_model_len)
        self.kv_cache = KVCache(
            self.kv_config,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            dtype=self.kv_dtype,
            device=self.device,
            states=self.states,
        )
        logger.info(
            "KV pool: %d blocks of %d = %d tokens, %.1f MB in %s; max_model_len %d",
            self.num_blocks,
            self.block_size,
            self.num_blocks * self.block_size,
            self.kv_cache.num_bytes / 1e6,
            self.kv_dtype,
            self.max_model_len,
        )

    def kv_cache_of_one_block(self) -> KVCache:
        """A KV cache for steps that are run to measure their memory, before the pool has its size."""
        return KVCache(
            self.kv_config,
            num_blocks=1,
            block_size=self.block_size,
            dtype=self.kv_dtype,
            device=self.device,
            states=self.make_states(free_bytes=None),
        )

    def make_states(self, free_bytes: int | None) -> "StatePool | None":
        """Slots for the states of a hybrid model; None for any other model."""
        if self.model_config.hybrid is None:
            return None
        return self.model_config.hybrid.make_states(
            self.config, self.local_config, dtype=self.dtype, device=self.device, free_bytes=free_bytes
        )

    @in_own_modes
    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step. A step without chunks computes nothing."""
        if not output.chunks:
            return ModelRunnerOutput()
        batch, sampling = pack(output, self.block_size, self.model_config.eos_token_ids)
        return self.run_packed(batch, sampling)

    @torch.inference_mode()  # run() has switched off whatever the caller had on; a rank's process has nothing on
    def run_packed(self, batch: Batch, sampling: SamplingBatch) -> ModelRunnerOutput:
        """Compute a step that pack() has packed. On a rank that gets no logits, nothing is found."""
        for part in self.parts.values():  # outside the context, which may leave PyTorch's operations one thread
            part.begin_step(batch)
        with self.step_context():
            replayed = self._replay(batch, sampling)
            if replayed is not None:
                return self._sample(replayed, sampling.to(self.device))
            batch, sampling = on_device(batch, sampling, self.device)
            hidden = self.forward(batch)  # [num_rows + prompt rows, hidden_size]
            logits = self.model.logits(hidden[: sampling.num_rows])
            if sampling.prompt_rows is None:
                return self._sample(logits, sampling)
            prompt_hidden = hidden[sampling.num_rows :]
            scores = sampling.prompt_rows.score(self.model.logits, prompt_hidden, self.kernels.library)
            return self._sample(logits, sampling, scores)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [R, hidden_size] of the rows whose logits are needed. batch: in the device's memory."""
        return self.model(batch, self.rotary, self.kv_cache, self.kernels)

    def _replay(self, batch: Batch, sampling: SamplingBatch) -> torch.Tensor | None:
        """The step's logits, if it is one of those that were recorded; None if the model's code has to run."""
        knows_parts = all(part.in_recorded_steps for part in batch.parts.values())
        if self.recorded_steps is None or sampling.prompt_rows is not None or not knows_parts:
            return None
        return self.recorded_steps.run(batch) if self.recorded_steps.still_fit(self) else None

    def _sample(
        self, logits: torch.Tensor, sampling: SamplingBatch, prompt_scores: "list[Scores] | None" = None
    ) -> ModelRunnerOutput:
        """Choose a token for each row of logits, float32 [R, vocab_size]. A pooling model's vectors are returned.

        prompt_scores: of sampling.prompt_rows. What is found comes back from a device by one copy.
        """
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        vectors: list[torch.Tensor] = []
        prompt_logprobs: list[list[tuple[int, TokenLogprobs]]] = [[] for _ in sampling.rows_per_chunk]
        if self.model_config.pooling is not None:
            # A view would keep the whole step's tensor alive.
            vectors = [vector.clone() for vector in logits.cpu()]
        elif len(logits) or prompt_scores:  # not if all chunks end inside prompts, nor on a rank without logits
            sampled = sample_rows(logits, sampling, self.kernels) if len(logits) else None
            sampled, prompt_scores = fetch_together((sampled, prompt_scores))
            if sampled is not None:
                token_ids, logprobs = sampling.to_lists(sampled)
            if sampling.prompt_rows is not None and prompt_scores:
                for chunk, position, found in sampling.prompt_rows.logprobs(prompt_scores):
                    prompt_logprobs[chunk].append((position, found))
        return ModelRunnerOutput(
            sampled_token_ids=sampling.per_chunk(token_ids),
            logprobs=sampling.per_chunk(logprobs),
            pooled=[found[0] if found else None for found in sampling.per_chunk(vectors)],
            prompt_logprobs=prompt_logprobs,
        )

    def usage(self) -> dict[str, int]:
        """Bytes of the weights, of the KV pool, and of what wings have read: the tower, adapters."""
        usage = {"weights": self.weight_bytes, "kv_cache": self.kv_cache.num_bytes}
        return usage | {name: part.num_bytes for name, part in self.parts.items()}
