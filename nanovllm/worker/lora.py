"""Adapters at work: rows of one batch meet different small changes of the same weights (chapter 15; arXiv:2106.09685).

A layer's product y = W x is computed for all rows as always. Then y += B (A x) for the rows that meet an adapter,
grouped by adapter (grouped.py).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.lora.adapter import Adapter, linear_shapes
from nanovllm.lora.request import LoRARequest
from nanovllm.worker.batch import Batch
from nanovllm.worker.grouped import AdapterRows, LoRAWeights
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.layers import Linear
from nanovllm.worker.logprobs import PromptRows
from nanovllm.worker.model import MERGED_PROJECTIONS, Decoder


@dataclass(frozen=True)
class BatchAdapters:
    """What a rank is told of a step's adapters. of_row: [T], which of the requests each row belongs to; -1: none."""

    requests: list[LoRARequest]
    of_row: Tensor

    @classmethod
    def from_scheduler_output(cls, output: SchedulerOutput) -> "BatchAdapters | None":
        requests = list(dict.fromkeys(c.seq.lora_request for c in output.chunks if c.seq.lora_request is not None))
        if not requests:
            return None
        of_chunk = [requests.index(c.seq.lora_request) if c.seq.lora_request else -1 for c in output.chunks]
        lengths = torch.tensor([chunk.end - chunk.start for chunk in output.chunks])
        return cls(requests, torch.tensor(of_chunk).repeat_interleave(lengths))


class AdaptedLinear:
    """The product of a linear layer whose rows may meet adapters. projections: its paths in the checkpoint."""

    def __init__(self, adapters: "Adapters", linear: Linear, projections: list[str]) -> None:
        self.adapters, self.base, self.projections = adapters, linear.product, projections
        self.out_sizes = linear.out_sizes
        self.weights: LoRAWeights | None = None  # until an adapter changes this layer

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        y = self.base(x, weight, bias)
        rows = self.adapters.rows_of(self, len(x))
        if rows is not None and self.weights is not None:
            self.adapters.kernels.add_adapters(y, x, rows, self.weights)
        return y


class Adapters:
    """The adapters that are in memory: at most max_loras, the least recently used one leaves.

    slots   {lora_int_id: slot}, the least recently used first
    """

    def __init__(
        self,
        model: Decoder,
        config: EngineConfig,
        model_config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """With enable_lora, let the model's linear layers look here. model_config: of the whole model."""
        self.config, self.model_config, self.kernels, self.group = config, model_config, kernels, model.group
        self.dtype, self.device = dtype, device
        self.slots: dict[int, int] = {}
        self._files: dict[int, Adapter] = {}
        self._whole, self._local = linear_shapes(model_config), linear_shapes(model.config)
        self.layers: list[AdaptedLinear] = []
        self._rows: AdapterRows | None = None
        if not config.enable_lora:
            return
        for path, linear in (*model.layers.named_modules(prefix="model.layers"), ("lm_head", model.lm_head)):
            parent, _, name = path.rpartition(".")
            projections = [f"{parent}.{part}" if parent else part for part in MERGED_PROJECTIONS.get(name, (name,))]
            if isinstance(linear, Linear) and self._whole.keys() >= set(projections):  # not of routers and experts
                linear.product = AdaptedLinear(self, linear, projections)
                self.layers.append(linear.product)

    def begin_step(self, step: BatchAdapters | None, batch: Batch, prompt: PromptRows | None) -> None:
        """Bring the step's adapters into memory. batch: in the CPU's memory."""
        self._rows = None
        if step is not None:
            ids = {request.lora_int_id for request in step.requests}
            slots = torch.tensor([*(self._slot_of(request, ids) for request in step.requests), -1])
            of_row = slots[step.of_row]
            self._rows = AdapterRows.of(of_row, self.device)
            # In the order in which their logits are computed (logprobs.py).
            head_rows = batch.logits_rows if prompt is None else torch.cat([prompt.rows, batch.logits_rows])
            self._head_slots = of_row[head_rows]

    def rows_of(self, layer: AdaptedLinear, num_rows: int) -> AdapterRows | None:
        """The rows of a layer's input that meet an adapter; None if there are none in this step."""
        if self._rows is None or layer.projections != ["lm_head"]:
            return self._rows
        slots, self._head_slots = self._head_slots[:num_rows], self._head_slots[num_rows:]
        return AdapterRows.of(slots, self.device)

    def _slot_of(self, request: LoRARequest, needed: set[int]) -> int:
        """An exception in any line leaves a slot that has an adapter, whole, or none."""
        lora_id = request.lora_int_id
        if lora_id not in self.slots:
            if len(self.slots) == self.config.max_loras:
                del self.slots[next(other for other in self.slots if other not in needed)]
            slot = next(slot for slot in range(self.config.max_loras) if slot not in self.slots.values())
            self._load(request, slot)
            self.slots[lora_id] = slot
        slot = self.slots.pop(lora_id)
        self.slots[lora_id] = slot  # now the last one
        return slot

    def _load(self, request: LoRARequest, slot: int) -> None:
        """Read this rank's share of an adapter."""
        if request.lora_int_id not in self._files:
            opened = Adapter.open(request, self.model_config, self.config.max_lora_rank)
            self._files[request.lora_int_id] = opened
        adapter = self._files[request.lora_int_id]
        for layer in self.layers:
            if layer.weights is not None:
                layer.weights.ranks[slot] = 0
            if not adapter.scales.keys().isdisjoint(layer.projections):
                self._load_layer(adapter, layer, slot)

    def _load_layer(self, adapter: Adapter, layer: AdaptedLinear, slot: int) -> None:
        (_, whole_in), (_, in_size) = (shapes[layer.projections[0]] for shapes in (self._whole, self._local))
        if layer.weights is None:
            sizes = self.config.max_loras, self.config.max_lora_rank, in_size, layer.out_sizes
            layer.weights = LoRAWeights.empty(*sizes, self.dtype, self.device)
        weights, everything = layer.weights, slice(None)
        weights.a[slot], weights.b[slot] = 0, 0
        columns = weights.b[slot].split(layer.out_sizes, dim=1)
        for part, (path, b) in enumerate(zip(layer.projections, columns, strict=True)):
            if path in adapter.scales:
                inputs = self.group.share(whole_in, in_size)
                outputs = self.group.share(self._whole[path][0], b.shape[1])
                a = adapter.tensor(path, "A", (everything, inputs))
                weights.a[slot, part, : len(a), :in_size] = a
                b[: len(a)] = (adapter.tensor(path, "B", (outputs, everything)).float() * adapter.scales[path]).mT
                weights.ranks[slot] = max(int(weights.ranks[slot]), len(a))
