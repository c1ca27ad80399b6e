"""A step without Python: the layers' calls of C functions, recorded once, then replayed by one call (chapter 10).

A decoder layer makes eight calls of C functions (ten where q and k are normed), each through Python code that
allocates a tensor, takes views and fills in a struct of arguments. The next step makes the same calls with the same
arguments, but for the number of rows and for what lies in the inputs. So the layers run once on max_rows rows, while
the C functions are only written down (c_calls.py): who was called with what. A step copies its inputs to where these
layers found them, and cpu/replay.c makes the calls again, with the rows that the step has and no others: one record
serves every number of rows. cuda/graphs.py does the same for a GPU.

What is no call of a C function cannot be recorded: a model whose layers compute anything in PyTorch (products of
PyTorch's libraries, say) has no record.
"""

import ctypes
import logging
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.worker.batch import Batch
from nanovllm.worker.c_calls import INT, PTR, Call, address, args_of
from nanovllm.worker.cpu.c_kernels import AttentionStep, gather
from nanovllm.worker.layers import ForwardContext
from nanovllm.worker.platform import RecordedSteps

if TYPE_CHECKING:
    from nanovllm.worker.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")

MAX_ROWS = 256  # of a step, and of those whose logits are needed
MAX_BYTES = 64 << 20  # between two layers: prompts up to this size are recorded when the first one comes
aten = torch.ops.aten
NEW = (aten.new_empty, aten.empty_like, aten.empty)
MAY_BE_VIEWS = "split_with_sizes split unflatten flatten view reshape contiguous detach"
VIEWS = tuple(getattr(aten, name) for name in MAY_BE_VIEWS.split())


class RecordedCall(ctypes.Structure):
    """recorded_call of cpu/replay.c."""

    _fields_ = (("function", PTR), ("args", PTR), ("times", INT))


class MarkArgs(ctypes.Structure):
    """mark_args of cpu/rows.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out residual"), ("size", INT))


class NotRecordable(Exception):
    """The layers compute something that is no call of a C function."""


def record_step(runner: "ModelRunner") -> "RecordedStep | None":
    """The record of a model's layers; None where they cannot be recorded, or are not to be."""
    config = runner.config
    if "recorded_step" not in config.optimizations or config.tensor_parallel_size > 1:
        return None
    if runner.kernels.library is None:
        return None
    if runner.model_config.pooling is not None:  # its steps are prompts; PyTorch computes what follows the layers
        return None
    try:
        return RecordedStep(runner, min(MAX_ROWS, config.max_num_batched_tokens))
    except NotRecordable as reason:
        logger.info("Steps are not recorded: %s", reason)
        return None


class RecordedStep(RecordedSteps):
    """The calls of a step, and what they read of a batch.

    max_rows         of a step that can be replayed; max_results: whose logits are needed
    most_rows        max_rows becomes as many once a step has more: with still more, Python's share is small
    inputs           [4, max_rows]: input ids, positions, slots, logits rows
    attention_step   what attention reads of a batch besides
    delta_step       what layers with a state read; None: the model has none
    looked_up        embeddings [max_rows, hidden_size], where PyTorch looks them up; None: the calls do
    calls            Decoder.forward() up to the last layer, for all rows of a step, and then
    finish           the rest, and the logits, for the rows whose logits are needed. Both as replay.c reads them
    logits           [max_results, vocab_size]: where the calls leave them
    """

    def __init__(self, runner: "ModelRunner", max_rows: int) -> None:
        """Raises NotRecordable."""
        super().__init__(runner)
        self.max_results = max_rows
        self.library = self.kernels.library
        self.library.replay.argtypes = [PTR, INT, INT]
        self.num_kv_heads = self.model.config.num_key_value_heads
        self._record(max_rows)
        bytes_of_row = sum(x.nbytes for part in self.memory[:2] for x in part) // max_rows
        self.most_rows = max(max_rows, min(MAX_BYTES // bytes_of_row, runner.config.max_num_batched_tokens))

    def _record(self, max_rows: int) -> None:
        self.max_rows = max_rows
        self.inputs = torch.zeros(4, self.max_rows, dtype=torch.int64, device="cpu")
        self.attention_step = AttentionStep()
        self.delta_step: ctypes.Structure | None = None
        if self.model.config.hybrid is not None:
            from nanovllm.features.hybrid.hybrid_c_kernels import DeltaStep, prepare_nets

            self.delta_step = DeltaStep(num_logged=self.max_rows)
            prepare_nets(self.model)
        self.memory: tuple[list[Tensor], ...] = [], [], []  # what the calls read and write between inputs and logits
        with torch.inference_mode(), self.kernels.recorder.recording() as recorded:
            context = self._record_context()
            hidden, residual = self._record_layers(context)
            num_layer_calls = len(recorded)
            self.logits = self._record_logits(hidden, residual, context)
        self.recorded: list[Call] = recorded  # the arrays below point to these arguments
        self.calls = self._as_array(recorded[:num_layer_calls], max_rows)
        self.finish = self._as_array(recorded[num_layer_calls:], self.max_results)

    def _grow(self) -> bool:
        """Record as many rows as most_rows says. False if the layers cannot be recorded any more.

        Whatever goes wrong meanwhile (no memory, Ctrl-C), this record stays as it was.
        """
        longer = copy(self)
        try:
            longer._record(self.most_rows)
        except NotRecordable as reason:
            logger.info("Longer prompts are not recorded: %s", reason)
            self.most_rows = self.max_rows
            return False
        vars(self).update(vars(longer))
        return True

    def _record_context(self) -> ForwardContext:
        cosines, sines = self.rotary.table
        positions = self.inputs[1]
        cos_sin = self._gather(cosines, positions), self._gather(sines, positions)
        return ForwardContext(self._batch(), cos_sin, self.kernels)

    def _record_layers(self, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """The last layer's hidden and residual, [max_rows, hidden_size]."""
        input_ids = self.inputs[0]
        table = self.model.embed_tokens
        dtype = self.rotary.table.dtype
        self.looked_up: Tensor | None = None
        if self.model.lookup is self.kernels.lookup:
            hidden = self.model.lookup(input_ids, table)
        elif isinstance(table, Tensor) and table.dtype == dtype and table.is_contiguous():
            hidden = self._gather(table, input_ids)
        else:  # a table of few bits, or in another dtype
            hidden = self.looked_up = torch.zeros(
                self.max_rows, self.model.config.hidden_size, dtype=dtype, device="cpu"
            )
        stream = hidden
        residual: Any = None
        for i, (layer, kv_layer) in enumerate(zip(self.model.layers, self.kv_cache.layers, strict=True)):
            with OnlyCalls(self.memory[i % 2]):  # the layer before has its result in the other one
                hidden, residual = layer(hidden, residual, kv_layer, context)
        if residual is not stream:
            raise NotRecordable("the residual stream has moved")
        return hidden, residual

    def _record_logits(self, hidden: Tensor, residual: Tensor, context: ForwardContext) -> Tensor:
        """[max_results, vocab_size], of the rows whose logits are needed."""
        logits_rows = self.inputs[3, : self.max_results]
        hidden, residual = (self._gather(x, logits_rows) for x in (hidden, residual))
        with OnlyCalls(self.memory[2]):
            hidden, residual = self.model.norm(hidden, residual, context)
            args = MarkArgs(
                num_rows=len(hidden),
                out=address(hidden, hidden.dtype, hidden.shape),
                residual=address(residual, hidden.dtype, hidden.shape),
                size=hidden.shape[1],
            )
            context.kernels.recorder.call(self.library.mark_rows, args)
            return self.model.logits(hidden)

    def _batch(self) -> Batch:
        """What recorded layers see of a batch: the slots, and the structs of attention and states."""
        nothing = torch.empty(0, dtype=torch.float32, device="cpu")
        batch = Batch(
            input_ids=nothing,
            positions=nothing,
            slot_mapping=self.inputs[2],
            cu_seqlens_q=nothing,
            seqlens_k=nothing,
            block_tables=nothing,
            logits_rows=nothing,
            max_query_len=1,
            max_key_len=1,
        )
        # Where layers would build structs of their own they find these, which each step fills anew.
        batch.attn_metadata[AttentionStep] = self.attention_step
        if self.delta_step is not None:
            batch.attn_metadata[type(self.delta_step)] = self.delta_step
        return batch

    def _gather(self, table: Tensor, rows: Tensor) -> Tensor:
        """Record that rows of a table are copied. The copies, [max_rows, table's width]."""
        return gather(self.library.gather_rows, self.kernels.recorder, self.kernels.dtype, table, rows)

    def _as_array(self, calls: list[Call], num_rows: int) -> Any:
        """recorded_call[] of cpu/replay.c. It points to the calls' arguments, and keeps none of them."""
        entries = (RecordedCall * len(calls))()
        for entry, (function, args) in zip(entries, calls, strict=True):
            entry.function = ctypes.cast(function, PTR)  # pyrefly: ignore[bad-argument-type]
            entry.args = ctypes.addressof(args)
            entry.times, rest = divmod(args.num_rows, num_rows)  # experts: as many rows as each row has chosen
            if rest or not entry.times:
                raise NotRecordable(f"a call of {function.__name__} has {args.num_rows} rows")
        return entries

    def run(self, batch: Batch) -> Tensor | None:
        """None for more than most_rows rows or max_results results, and for chunks without rows."""
        num_rows, num_results = len(batch.input_ids), len(batch.logits_rows)
        if num_rows > self.most_rows or num_results > self.max_results:
            return None
        if 0 in batch.query_lens:  # a mistake that chapter 2 makes on purpose: PyTorch shows what comes of it
            return None
        if num_rows > self.max_rows and not self._grow():
            return None
        if self.delta_step is not None:
            from nanovllm.features.hybrid.hybrid_c_kernels import DeltaStep

            this_step = batch.metadata(DeltaStep)
            if this_step.num_logged > self.max_rows:
                return None
            copy_struct(self.delta_step, this_step)
        copy_struct(self.attention_step, batch.metadata(AttentionStep, self.library, self.num_kv_heads))
        for place, values in zip(
            self.inputs, (batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_rows), strict=True
        ):
            place[: len(values)] = values
        if self.looked_up is not None:
            self.looked_up[:num_rows] = self.model.embed(batch.input_ids)
        self.library.replay(self.calls, len(self.calls), num_rows)
        self.library.replay(self.finish, len(self.finish), num_results)
        return self.logits[:num_results]


def copy_struct(target: ctypes.Structure, source: ctypes.Structure) -> None:
    ctypes.memmove(ctypes.byref(target), ctypes.byref(source), ctypes.sizeof(target))


class OnlyCalls(TorchDispatchMode):
    """Lets only those of PyTorch's operations pass that make new memory or views.

    memory: what was made before, to be used again. So all layers together take the memory of two.
    """

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self.memory = memory
        self.num_used = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # PyTorch would load its compiler for that, which takes a second
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in NEW:
            return self._place(result)
        # Zeros: memory that a kernel keeps.
        if func.overloadpacket is aten.zeros or (func.overloadpacket in VIEWS and is_view(result, args)):
            return result
        raise NotRecordable(f"a layer computes {func} in PyTorch")

    def _place(self, new: Tensor) -> Tensor:
        """The next place of this shape and dtype. Those before it are in use, or left out: layers of several kinds may
        share the memory."""
        for at in range(self.num_used, len(self.memory)):
            if (self.memory[at].shape, self.memory[at].dtype) == (new.shape, new.dtype):
                break
        else:
            at = len(self.memory)
            self.memory.append(new)
        self.num_used = at + 1
        return self.memory[at]


def is_view(result: Any, args: Any) -> bool:
    """Does an operation's result lie in the memory of its first argument? A reshape may have copied it."""
    tensors = [*(result if isinstance(result, list | tuple) else [result]), *args[:1]]
    return all(isinstance(x, Tensor) for x in tensors) and len({x.untyped_storage().data_ptr() for x in tensors}) == 1
