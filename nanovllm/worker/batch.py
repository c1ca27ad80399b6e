"""Batch: one step's work as packed tensors (chapter 6).

The tokens of all sequences lie one after another, without padding; cu_seqlens_q says where each sequence's begin.
This is the layout of FlashAttention's varlen functions.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.core.scheduler import SchedulerOutput

# The fields of a Batch that are on the device.
TENSORS = ("input_ids", "positions", "slot_mapping", "cu_seqlens_q", "seqlens_k", "block_tables", "logits_rows")


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below the number."""
    return cdiv(number, multiple) * multiple


class Metadata(Protocol):
    """What a backend works out of a batch in the first layer of a step, for the others. Each backend has its class."""

    @classmethod
    def build(cls, batch: "Batch", *args: Any, **options: Any) -> Any: ...


M = TypeVar("M", bound=Metadata)


class BatchPart:
    """What a wing adds to a step's batch. Each method does nothing unless a wing says otherwise.

    in_recorded_steps   do recorded steps know it? If not, the step runs the model's code
    """

    in_recorded_steps = False

    def after_embedding(self, hidden: Tensor) -> Tensor:
        """What the first layer gets. hidden: the embeddings of the step's tokens, [T, hidden_size]."""
        return hidden

    def after_layer(self, index: int, hidden: Tensor) -> Tensor:
        """What goes on after a layer. hidden: its output, [T, hidden_size]."""
        return hidden


@dataclass(frozen=True)
class Batch:
    """T tokens of B sequences.

    input_ids, positions   [T]       positions may be [3, T] if the step has placeholders: time, height, width
    slot_mapping           [T]       block_id * block_size + offset of each token's K/V; -1: do not write
    cu_seqlens_q           [B + 1]   sequence b's tokens are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]
    seqlens_k              [B]       tokens that the last of those rows attends to: all so far, itself included
    block_tables           [B, max_blocks]   padded with 0; what is found there is masked
    logits_rows            [R]       rows whose hidden state is needed. First come the rows that sample, in the order of
                                     the chunks, then prompt rows whose logprobs are wanted (pack() adds these)
    max_query_len                    the most rows that one sequence has
    max_key_len                      the largest of seqlens_k. Both are known without waiting for a device
    parts                  {name: BatchPart}, what wings add (SequencePart.add_to_batch): "state", "images", ...
    attn_metadata          what backends work out once for all layers of the step: see metadata(). replace() begins
                           with none
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    cu_seqlens_q: Tensor
    seqlens_k: Tensor
    block_tables: Tensor
    logits_rows: Tensor
    max_query_len: int
    max_key_len: int
    parts: dict[str, BatchPart] = field(default_factory=dict, repr=False)
    attn_metadata: dict[type, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_scheduler_output(cls, output: SchedulerOutput, block_size: int) -> "Batch":
        """The batch of a step, in the CPU's memory."""
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        logits_rows: list[int] = []
        cu_seqlens_q = [0]
        seqlens_k: list[int] = []
        tables: list[list[int]] = []
        for chunk in output.chunks:
            table = chunk.seq.block_table
            input_ids += chunk.token_ids
            positions += range(chunk.start, chunk.end)
            slots += [
                table[i // block_size] * block_size + i % block_size if i >= chunk.write_start else -1
                for i in range(chunk.start, chunk.end)
            ]
            cu_seqlens_q.append(len(input_ids))
            seqlens_k.append(chunk.end)
            tables.append(table[: cdiv(chunk.end, block_size)])
            logits_rows += range(len(input_ids) - chunk.num_logits, len(input_ids))
        width = max(map(len, tables))
        query_lens = [chunk.end - chunk.start for chunk in output.chunks]

        def tensor(values: list, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype, device="cpu")

        # By way of numpy: torch.tensor() takes several times as long for the many numbers of long contexts. Padded as
        # lists, each short context would take as long as the longest.
        block_tables = np.zeros((len(tables), width), np.int32)
        for row, table in zip(block_tables, tables, strict=True):
            row[: len(table)] = table

        batch = cls(
            input_ids=tensor(input_ids),
            positions=tensor(positions),
            slot_mapping=tensor(slots),
            cu_seqlens_q=tensor(cu_seqlens_q, torch.int32),
            seqlens_k=tensor(seqlens_k, torch.int32),
            block_tables=torch.from_numpy(block_tables),
            logits_rows=tensor(logits_rows),
            max_query_len=max(query_lens),
            max_key_len=max(seqlens_k),
        )
        # Parts of one name belong to one wing, whose class adds what all of them need.
        part_classes = {name: type(part) for chunk in output.chunks for name, part in chunk.seq.parts.items()}
        for part_class in part_classes.values():
            batch = part_class.add_to_batch(batch, output)
        vars(batch).update(query_lens=query_lens, key_lens=seqlens_k)  # cached properties that are known here
        return batch

    def to(self, device: torch.device) -> "Batch":
        """The same batch in a device's memory, moved by one non-blocking copy.

        What the host needs to know during the step is computed on the host first, so it never waits for the device.
        """
        return self if device.type == "cpu" else self.with_tensors(move_together(self.tensors(), device))

    def tensors(self) -> tuple[dict[str, Any], tuple[Tensor | None, Tensor]]:
        """What a step on a device reads there. Its parts move what they need themselves."""
        return {name: getattr(self, name) for name in TENSORS}, self.written

    def with_tensors(self, tensors: tuple[dict[str, Any], tuple[Tensor | None, Tensor]]) -> "Batch":
        """The same batch with what tensors() has named in a device's memory."""
        fields, written = tensors
        batch = replace(self, **fields)
        # Its cached properties: to work them out of the device's tensors would mean to wait for the device.
        vars(batch).update(query_lens=self.query_lens, key_lens=self.key_lens, written=written)
        return batch

    @cached_property
    def query_lens(self) -> list[int]:
        """How many rows each sequence has."""
        return self.cu_seqlens_q.diff().tolist()

    @cached_property
    def key_lens(self) -> list[int]:
        """seqlens_k as a list."""
        return self.seqlens_k.tolist()

    @cached_property
    def written(self) -> tuple[Tensor | None, Tensor]:
        """(rows, slots) to write. rows is None if every row is written, which is the usual case."""
        is_written = self.slot_mapping >= 0
        if bool(is_written.all()):
            return None, self.slot_mapping
        rows = is_written.nonzero().squeeze(1)
        return rows, self.slot_mapping[rows]

    def metadata(self, kind: type[M], *args: Any) -> M:
        """A backend's metadata of this step: kind.build(batch, *args) in the first layer, the same object afterwards.

        FlashMetadata in cuda/flash_attention.py is the shortest example.
        """
        if kind not in self.attn_metadata:
            self.attn_metadata[kind] = kind.build(self, *args)
        return self.attn_metadata[kind]


def move_together(tree: Any, device: torch.device) -> Any:
    """Move all tensors in nested tuples, lists and dicts to a device, by one non-blocking copy. Returns such a tree.

    All numbers travel in one pinned buffer. What is not a tensor stays as it is. Without a number, nothing moves.
    """
    tensors = _tensors_in(tree)
    if device.type == "cpu" or not any(x.nbytes for x in tensors):
        return tree
    return _replaced(tree, _moved(tensors, lambda packed: packed.pin_memory().to(device, non_blocking=True)))


def fetch_together(tree: Any) -> Any:
    """Bring all tensors in such a tree into the CPU's memory, by one copy that waits for the device."""
    tensors = [x for x in _tensors_in(tree) if not x.is_cpu]
    if not tensors:
        return tree
    if len(tensors) == 1:  # there is nothing to pack
        return _replaced(tree, {id(x): x.cpu() for x in tensors})
    return _replaced(tree, _moved(tensors, Tensor.cpu))


def _moved(tensors: list[Tensor], move: Callable[[Tensor], Tensor]) -> dict[int, Tensor]:
    """{id of a tensor: what it is in the memory to which move() brings bytes}. One that occurs twice is moved once.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel anew for a pointer that does not.
    """
    tensors = list({id(x): x for x in tensors}.values())
    padded = [F.pad(x.flatten().view(torch.uint8), (0, -x.nbytes % 16)) for x in tensors]
    packed = move(torch.cat(padded))
    parts = packed.split([len(x) for x in padded])
    return {id(x): part[: x.nbytes].view(x.dtype).view(x.shape) for x, part in zip(tensors, parts, strict=True)}


def _tensors_in(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    return [x for part in tree for x in _tensors_in(part)]


def _replaced(tree: Any, moved: dict[int, Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return moved.get(id(tree), tree)
    if isinstance(tree, dict):
        return {key: _replaced(part, moved) for key, part in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [_replaced(part, moved) for part in tree]
        is_named_tuple = hasattr(tree, "_fields")
        return type(tree)(*parts) if is_named_tuple else type(tree)(parts)
    return tree
