"""StatePool: the states of running sequences and the snapshots, one tensor for all slots (chapter 16)."""

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.snapshots.state import StateSlots
from nanovllm.worker.batch import round_up
from nanovllm.worker.kv_cache import lazy_zeros

logger = logging.getLogger("nanovllm")

SHARE = 4  # a quarter of the memory for K/V and states is for snapshots, another for running sequences, at most
MAX_SNAPSHOTS = 4096
COLUMNS, SUMS = 16, 4  # as in delta_rule.h: the sides of a state are rounded up to multiples of these


@dataclass(frozen=True)
class StateSizes:
    """The shapes of what one slot holds, all layers together.

    state     [layers, value_heads, key_dim, value_dim], float32, padded; kernels may order it in their own way
    window    [layers, kernel_size - 1, conv_size]: what the convolution still sees
    log       [layers, num_draft_tokens, conv_size + 2 * value_heads]: rows of draft tokens (core/snapshots/segments.py)
    """

    state: tuple[int, ...]
    window: tuple[int, ...]
    log: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelConfig, num_draft_tokens: int) -> "StateSizes":
        sizes, num_layers = model.hybrid, len(model.hybrid.linear_layers)
        log = num_layers, num_draft_tokens, sizes.conv_size + 2 * sizes.num_value_heads
        state = num_layers, sizes.num_value_heads, round_up(sizes.key_dim, SUMS), round_up(sizes.value_dim, COLUMNS)
        return cls(state, (num_layers, sizes.kernel_size - 1, sizes.conv_size), log)

    def num_bytes(self, itemsize: int) -> int:
        state, window, log = (torch.Size(shape).numel() for shape in (self.state, self.window, self.log))
        return state * 4 + (window + log) * itemsize


class StatePool:
    """slots: how many there are, and their bytes."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, free_bytes: int | None
    ) -> None:
        """free_bytes: what K/V and states may take together; ValueError where they leave nothing for K/V.

        None: nobody knows yet. One sequence has a slot, for the steps by which memory is measured.
        """
        speculative: Any = config.speculative_config
        self.sizes = StateSizes.of(model, 0 if speculative is None else speculative.num_speculative_tokens)
        self.model, self.slot_bytes = model, self.sizes.num_bytes(dtype.itemsize)
        max_running, max_snapshots = 1, 0
        if free_bytes is not None:
            max_running = max(1, min(config.max_num_seqs, free_bytes // SHARE // self.slot_bytes))
            given = max(0, free_bytes) // SHARE if config.state_cache_bytes is None else config.state_cache_bytes
            max_snapshots = min(given // self.slot_bytes, MAX_SNAPSHOTS) if config.enable_prefix_caching else 0
        num_slots = max_running + max_snapshots
        self.slots = StateSlots(max_running, max_snapshots, num_slots * self.slot_bytes)
        if free_bytes is not None:
            self._check_room(config, free_bytes)

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            shape = num_slots, *shape
            on_cpu = device.type == "cpu" and 0 not in shape
            return lazy_zeros(shape, dtype) if on_cpu else torch.zeros(shape, dtype=dtype, device=device)

        self.states, self.windows = zeros(self.sizes.state, torch.float32), zeros(self.sizes.window, dtype)
        self.log = zeros(self.sizes.log, dtype)

    def _check_room(self, config: EngineConfig, free_bytes: int) -> None:
        slots = self.slots
        size = f"{self.slot_bytes / 1e6:.1f} MB each, {slots.num_bytes / 1e6:.1f} MB"
        sizes_of_kv = config.num_gpu_blocks_override, config.kv_cache_memory_bytes
        if sizes_of_kv == (None, None) and slots.num_bytes >= free_bytes:
            wanted = f"{slots.max_running} states of running sequences and {slots.max_snapshots} snapshots, {size}"
            raise ValueError(f"of {free_bytes / 1e6:.1f} MB, {wanted}, leave no K/V; lower state_cache_bytes")
        logger.info("States: %d for running sequences, %d snapshots, %s", slots.max_running, slots.max_snapshots, size)
        if slots.max_running < config.max_num_seqs:
            logger.info("max_num_seqs %d -> %d: there is no memory for more", config.max_num_seqs, slots.max_running)

    @cached_property
    def layers(self) -> dict[int, tuple[Tensor, ...]]:
        """{layer: (states, windows, log) of all slots}."""
        order = sorted(self.model.hybrid.linear_layers)
        return {layer: (self.states[:, i], self.windows[:, i], self.log[:, i]) for i, layer in enumerate(order)}

    def join(self, kv_layers: list) -> list:
        """What each of the model's layers reads and writes: its keys and values, or its states."""
        kv = iter(kv_layers)
        return [self.layers[i] if i in self.layers else next(kv) for i in range(self.model.num_hidden_layers)]
