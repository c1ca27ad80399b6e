"""Adapters at work: rows of one batch meet different small changes of the same weights (chapter 15; arXiv:2106.09685).

A layer's product y = W x is computed for all rows as always. Then y += B (A x) for the rows that meet an adapter,
grouped by adapter (adapter_rows.py).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.features.lora.adapter import Adapter, linear_shapes
from nanovllm.features.lora.adapter_rows import AdapterRows, LoRAWeights, kernel_for
from nanovllm.worker.batch import Batch, BatchPart
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.layers import Linear
from nanovllm.worker.model import Decoder, ModelPart

if TYPE_CHECKING:
    from nanovllm.features.parallel.group import RankGroup
    from nanovllm.worker.model_runner import ModelRunner


def make_part(runner: "ModelRunner") -> "AdapterSlots":
    """Slots for adapters of a runner's model."""
    return AdapterSlots(
        runner.model,
        runner.config,
        runner.model_config,
        kernels=runner.kernels,
        dtype=runner.dtype,
        device=runner.device,
        group=runner.group,
    )


@dataclass(frozen=True)
class BatchAdapters(BatchPart):
    """What a rank is told of a step's adapters. numbers: [T], which of the adapters each row meets; -1: none."""

    adapters: list[Adapter]
    numbers: Tensor

    @classmethod
    def from_scheduler_output(cls, output: SchedulerOutput) -> "BatchAdapters":
        adapters = {c.seq.lora_id: c.seq.parts["adapter"] for c in output.chunks if "adapter" in c.seq.parts}
        known: dict[int | None, int] = {lora_id: number for number, lora_id in enumerate(adapters)}
        numbers = [known.get(chunk.seq.lora_id, -1) for chunk in output.chunks]
        by_chunk = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        lengths = torch.tensor([chunk.end - chunk.start for chunk in output.chunks], dtype=torch.int64, device="cpu")
        return cls(list(adapters.values()), by_chunk.repeat_interleave(lengths))

    def place(self, slots: dict[int, int], num_slots: int) -> list[int]:
        """The slot of each adapter. See slot_for."""
        needed = {adapter.lora_id for adapter in self.adapters}
        return [slot_for(slots, adapter.lora_id, needed, num_slots) for adapter in self.adapters]

    def news(self, slots: dict[int, int], num_slots: int) -> "BatchAdapters":
        """For ranks that have these adapters in their slots: matrices only of those that they do not have yet."""
        had = set(slots)
        self.place(slots, num_slots)
        light = [replace(one, matrices={}) if one.lora_id in had else one for one in self.adapters]
        return replace(self, adapters=light)


def slot_for(slots: dict[int, int], lora_id: int, needed: set[int], num_slots: int) -> int:
    """An adapter's slot. If it has none yet and all are taken, the least recently used one that no row needs leaves.

    slots: {lora_int_id: slot}, the least recently used first; changed. needed: the adapters of this step.
    """
    if lora_id not in slots:
        if len(slots) == num_slots:
            del slots[next(other for other in slots if other not in needed)]
        slots[lora_id] = next(slot for slot in range(num_slots) if slot not in slots.values())
    slot = slots.pop(lora_id)
    slots[lora_id] = slot  # now the last one
    return slot


class AdaptedLinear:
    """The product of a linear layer whose rows may meet adapters. projections: its paths in the checkpoint."""

    def __init__(self, slots: "AdapterSlots", linear: Linear, projections: list[str]) -> None:
        self.slots, self.base, self.projections = slots, linear.product, projections
        self.out_sizes = linear.out_sizes
        self.weights: LoRAWeights | None = None  # until an adapter changes this layer

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None, *out_dtype: torch.dtype) -> Tensor:
        y = self.base(x, weight, bias, *out_dtype)
        rows = self.slots.rows_of(self, len(x))
        if rows is not None and self.weights is not None:
            self.slots.add_adapters(y, x, rows, self.weights)
        return y


class AdapterSlots(ModelPart):
    """The adapters that rows can meet: at most max_loras, the least recently used one leaves.

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
        group: "RankGroup | None" = None,
    ) -> None:
        """Let the model's linear layers look here. model_config: of the whole model. group: its ranks, if there are."""
        self.config, self.model_config, self.group = config, model_config, group
        self.add_adapters, self.dtype, self.device = kernel_for(kernels), dtype, device
        self.slots: dict[int, int] = {}
        self._loaded: dict[int, int] = {}  # {slot: lora_int_id of the adapter that is in it, whole}
        self._whole, self._local = linear_shapes(model_config), linear_shapes(model.config)
        self.layers: list[AdaptedLinear] = []
        self._rows: AdapterRows | None = None
        for path, linear in (*model.layers.named_modules(prefix="model.layers"), ("lm_head", model.lm_head)):
            parent, _, name = path.rpartition(".")
            parts = getattr(linear, "projections", ()) or (name,)
            projections = [f"{parent}.{part}" if parent else part for part in parts]
            if isinstance(linear, Linear) and self._whole.keys() >= set(projections):  # not of routers and experts
                linear.product = AdaptedLinear(self, linear, projections)
                self.layers.append(linear.product)
                if device.type != "cpu":  # before what is left becomes the KV pool
                    self._reserve(linear.product)

    def begin_step(self, batch: Batch) -> None:
        """Bring the step's adapters into memory."""
        self._rows = None
        step = batch.parts.get("adapter")
        if isinstance(step, BatchAdapters):
            slots = step.place(self.slots, self.config.max_loras)
            for adapter, slot in zip(step.adapters, slots, strict=True):
                if self._loaded.get(slot) != adapter.lora_id:
                    self._loaded.pop(slot, None)  # what breaks off below is loaded anew
                    self._load(adapter, slot)
                    self._loaded[slot] = adapter.lora_id
            row_slots = torch.tensor([*slots, -1], dtype=torch.int64, device="cpu")[step.numbers]
            self._rows = AdapterRows.of(row_slots, self.device)
            self._head_slots = row_slots[batch.logits_rows]

    def rows_of(self, layer: AdaptedLinear, num_rows: int) -> AdapterRows | None:
        """The rows of a layer's input that meet an adapter; None if there are none in this step.

        The output head is called with some of batch.logits_rows at a time, in order.
        """
        if self._rows is None or layer.projections != ["lm_head"]:
            return self._rows
        slots, self._head_slots = self._head_slots[:num_rows], self._head_slots[num_rows:]
        return AdapterRows.of(slots, self.device)

    def _load(self, adapter: Adapter, slot: int) -> None:
        """Take this rank's share of an adapter. In all layers the slot is cleared of what was in it."""
        for layer in self.layers:
            if layer.weights is not None:
                layer.weights.a[slot], layer.weights.b[slot], layer.weights.ranks[slot] = 0, 0, 0
            if not adapter.matrices.keys().isdisjoint(layer.projections):
                self._load_layer(adapter, layer, slot)

    def _load_layer(self, adapter: Adapter, layer: AdaptedLinear, slot: int) -> None:
        whole_in, in_size = (shapes[layer.projections[0]][1] for shapes in (self._whole, self._local))
        weights = layer.weights or self._reserve(layer)
        columns = weights.b[slot].split(layer.out_sizes, dim=1)
        for part, (path, column) in enumerate(zip(layer.projections, columns, strict=True)):
            if path in adapter.matrices:
                a, b = adapter.matrices[path]
                weights.a[slot, part, : len(a), :in_size] = a[:, self._share(whole_in, in_size)]
                column[: len(a)] = b[self._share(self._whole[path][0], column.shape[1])].mT
                weights.ranks[slot] = max(int(weights.ranks[slot]), len(a))

    def _share(self, whole_size: int, size: int) -> slice:
        """This rank's part, `size` indices, of a dimension."""
        return slice(0, size) if self.group is None else self.group.share(whole_size, size)

    def _reserve(self, layer: AdaptedLinear) -> LoRAWeights:
        layer.weights = LoRAWeights.empty(
            num_slots=self.config.max_loras,
            max_rank=self.config.max_lora_rank,
            in_size=self._local[layer.projections[0]][1],
            out_sizes=layer.out_sizes,
            dtype=self.dtype,
            device=self.device,
        )
        self.num_bytes += layer.weights.a.nbytes + layer.weights.b.nbytes
        return layer.weights
