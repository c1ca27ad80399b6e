"""Our solutions of the exercises of chapter 15."""

import torch
from torch import Tensor

from nanovllm.features.lora.adapter_rows import LoRAWeights


def add_adapters(y: Tensor, x: Tensor, slots: Tensor, weights: LoRAWeights) -> None:
    """See exercise.py."""
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        rows = (slots == slot).nonzero().squeeze(1)
        inputs, start = x[rows].float(), 0
        changes = []
        for part, size in enumerate(weights.out_sizes):
            inner = inputs @ weights.a[slot, part, :, : x.shape[1]].float().T  # [rows, max_rank]
            changes.append(inner @ weights.b[slot, :, start : start + size].float())
            start += size
        y[rows] = (y[rows].float() + torch.cat(changes, dim=1)).to(y.dtype)


def slot_for(slots: dict[int, int], lora_id: int, needed: set[int], num_slots: int) -> int:
    """See exercise.py."""
    free = [slot for slot in range(num_slots) if slot not in slots.values()]
    if lora_id in slots:
        slot = slots.pop(lora_id)
    elif free:
        slot = free[0]
    else:
        oldest = next(other for other in slots if other not in needed)
        slot = slots.pop(oldest)
    slots[lora_id] = slot
    return slot


def id_of_weights(ids: dict[tuple[int, str], int], number: int, digest: str) -> int:
    """See exercise.py."""
    if (number, digest) not in ids:
        was_used = any(number == other for other, _ in ids)
        # An id is never given twice, so it is above all that have been: no count of those in use would do.
        ids[number, digest] = max([2**31 - 1, *ids.values()]) + 1 if was_used else number
    return ids[number, digest]
