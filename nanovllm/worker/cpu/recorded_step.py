"""A step without Python: the layers' calls of C functions, recorded once, then replayed by one call (chapter 10).

A decoder layer makes ten calls of C functions, each through Python code that allocates a tensor, takes views and fills
in a struct of arguments. The next step makes the same calls with the same arguments, but for the number of rows and for
what lies in the inputs. So the layers run once on MAX_ROWS rows, while the C functions only write down who was called
with what. A step copies its inputs to where these layers found them, and cpu/replay.c makes the calls again, with the
rows that the step has and no others: one record serves every number of rows. cuda/graphs.py does the same for a GPU.

What is no call of a C function cannot be recorded: a model whose layers compute anything in PyTorch (experts, products
of PyTorch's libraries) has no record.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.features.hybrid.c_kernels import DeltaStep, delta_step
from nanovllm.features.hybrid.kernels import kernels_for
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu.c_kernels import INT, PTR, SIGNATURES, AttentionStep, args_of, attention_step
from nanovllm.worker.cpu.pointers import address
from nanovllm.worker.layers import ForwardContext

MAX_ROWS = 64  # of a step that is replayed: with more, Python's share is small
RECORDED = (*SIGNATURES, "quantized_linear", "delta_net", "multiply_by_gate", "gather_rows", "mark_rows")
aten = torch.ops.aten
NEW = (aten.new_empty, aten.empty_like, aten.empty)
MAY_BE_VIEWS = "split_with_sizes split unflatten flatten view reshape contiguous detach"
VIEWS = tuple(getattr(aten, name) for name in MAY_BE_VIEWS.split())


class RecordedCall(ctypes.Structure):
    """recorded_call of cpu/replay.c."""

    _fields_ = (("function", PTR), ("args", PTR))


class GatherArgs(ctypes.Structure):
    """gather_args of cpu/rows.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out table rows"), ("size", INT))


class MarkArgs(ctypes.Structure):
    """mark_args of cpu/rows.c."""

    _fields_ = (("num_rows", INT), *args_of(PTR, "out residual"), ("size", INT))


class NotRecordable(Exception):
    """The layers compute something that is no call of a C function."""


def record_step(runner: Any) -> "RecordedStep | None":
    """The record of a runner's layers; None where they cannot be recorded, or shall not be."""
    if "recorded_step" not in runner.config.optimizations or runner.kernels.library is None or runner.group is not None:
        return None
    if runner.model_config.pooling is not None:  # its steps are prompts; and what follows the layers is PyTorch's
        return None
    try:
        return RecordedStep(runner)
    except NotRecordable:
        return None


class RecordedStep:
    """The calls of a step, and what they read of a batch.

    inputs     [4, MAX_ROWS]: input ids, positions, slots, logits rows
    steps      what attention, and layers with a state, read
    calls      Decoder.forward() up to the last layer, for all rows of a step
    finish     the rest, and the logits, for the rows whose logits are needed
    """

    def __init__(self, runner: Any) -> None:
        """Raises NotRecordable."""
        model, config, self.library = runner.model, runner.model.config, runner.kernels.library
        self.dtype = runner.dtype
        self.runner, self.made_of = ref(runner), parts_of(runner)  # weak: who drops an engine gets its memory back
        self.head = model.lm_head.product
        table, sizes, self.num_kv_heads = model.embed_tokens, (MAX_ROWS, config.hidden_size), config.num_key_value_heads
        is_plain = isinstance(table, Tensor) and table.dtype == runner.dtype and table.is_contiguous()
        self.library.replay.argtypes = [PTR, INT, INT]
        self.inputs = torch.zeros(4, MAX_ROWS, dtype=torch.int64)
        self.steps: dict[str, Any] = {"attention_step": AttentionStep()}
        if config.hybrid is not None:
            self.steps["delta_step"] = DeltaStep(num_logged=MAX_ROWS)
            kernels_for(runner.kernels)  # before their functions only write down who calls them
        self.places = [address(part, torch.int64, (MAX_ROWS,)) for part in self.inputs]
        input_ids, positions, slots, logits_rows = self.inputs
        fields: Any = [slots] * 7 + [1, 1]  # of a batch's tensors, layers read the slots only
        batch = Batch(*fields)
        batch.plans.update(self.steps)
        memory: tuple[list[Tensor], ...] = [], [], []
        with torch.inference_mode(), written_down(self.library) as calls:
            cos, sin = (self._gather(part, positions, (MAX_ROWS, part.shape[1])) for part in runner.rotary.table)
            # A table of few bits, or in another dtype, is looked up by PyTorch.
            hidden = self._gather(table, input_ids, sizes) if is_plain else torch.zeros(sizes, dtype=runner.dtype)
            stream, self.looked_up = hidden, None if is_plain else hidden
            residual: Any = None
            context = ForwardContext(batch, (cos, sin), runner.kernels)
            for i, (layer, kv_layer) in enumerate(zip(model.layers, runner.kv_cache.layers, strict=True)):
                with OnlyCalls(memory[i % 2]):  # the layer before has its result in the other one
                    hidden, residual = layer(hidden, residual, kv_layer, context)
            if residual is not stream:
                raise NotRecordable("the residual stream has moved")
            num_calls = len(calls)
            hidden, residual = (self._gather(x, logits_rows, sizes) for x in (hidden, residual))
            with OnlyCalls(memory[2]):
                hidden, residual = model.norm(hidden, residual, context)
                pointers = (address(x, runner.dtype, sizes) for x in (hidden, residual))
                self.library.mark_rows(MarkArgs(0, *pointers, config.hidden_size))
                logits = model.logits(hidden)
            self.results = [(hidden[:num_rows], logits[:num_rows]) for num_rows in range(MAX_ROWS + 1)]
        self.newest = self.results[0]
        self.kept = calls, memory, cos, sin, residual
        entries = [RecordedCall(address, ctypes.addressof(args)) for address, args in calls]
        self.calls, self.finish = as_array(entries[:num_calls]), as_array(entries[num_calls:])
        model.lm_head.product = self.product

    def _gather(self, table: Tensor, rows: Tensor, shape: tuple[int, int]) -> Tensor:
        """Record that rows of a table are copied. The copies."""
        out, dtype = table.new_zeros(shape), self.dtype
        pointers = address(out, dtype, shape), address(table, dtype, (len(table), shape[1]))
        args = GatherArgs(0, *pointers, address(rows, torch.int64, (shape[0],)), shape[1])
        args.kept = table, rows, out
        self.library.gather_rows(args)
        return out

    def run(self, batch: Batch) -> Tensor | None:
        """What Decoder.forward() returns, until the next call; None: this step cannot be replayed."""
        num_rows, num_results, library = len(batch.input_ids), len(batch.logits_rows), self.library
        runner: Any = self.runner()
        if max(num_rows, num_results) > MAX_ROWS or parts_of(runner) != self.made_of:
            return None
        if 0 in batch.query_lens:  # somebody's mistake: PyTorch looks whether the row before it exists
            return None
        numbers = batch.input_ids, batch.positions, batch.slot_mapping, batch.logits_rows
        for place, values, size in zip(self.places, numbers, (num_rows, num_rows, num_rows, num_results), strict=True):
            ctypes.memmove(place, address(values, torch.int64, (size,)), values.nbytes)
        if self.looked_up is not None:
            self.looked_up[:num_rows] = runner.model.embed(batch.input_ids)
        attention_step(library, self.num_kv_heads, batch)
        if "delta_step" in self.steps and delta_step(batch).num_logged > MAX_ROWS:
            return None
        for name, step in self.steps.items():
            ctypes.memmove(ctypes.byref(step), ctypes.byref(batch.plans[name]), ctypes.sizeof(step))
        library.replay(self.calls, len(self.calls), num_rows)
        library.replay(self.finish, len(self.finish), num_results)
        self.newest = self.results[num_results]
        return self.newest[0]

    def product(self, x: Tensor, weight: Any, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        """That of the output head. The newest step's logits are there already."""
        hidden, logits = self.newest
        return logits if x is hidden else self.head(x, weight, bias, out_dtype)


def parts_of(runner: Any) -> tuple[Any, ...]:
    """What a record stands for. Where somebody has put something else in its place, a step is not replayed."""
    step, forward = runner.forward, runner.model.forward
    functions = getattr(step, "__func__", step), getattr(forward, "__func__", forward)
    return runner.kernels, runner.rotary, runner.kv_cache, ref(runner.model), functions


def as_array(entries: list[RecordedCall]) -> Any:
    return (RecordedCall * len(entries))(*entries)


@contextmanager
def written_down(library: ctypes.CDLL) -> Iterator[list[tuple[int, ctypes.Structure]]]:
    """Meanwhile the C functions compute nothing: their addresses and arguments are put into the list."""
    calls: list[tuple[int, ctypes.Structure]] = []
    functions = {name: getattr(library, name) for name in RECORDED}
    try:
        for name, function in functions.items():
            address = ctypes.cast(function, PTR).value
            setattr(library, name, lambda args, address=address: calls.append((address, args)))
        yield calls
    finally:
        for name, function in functions.items():
            setattr(library, name, function)


class OnlyCalls(TorchDispatchMode):
    """Of PyTorch's operations, lets those pass that make new memory or views.

    memory: what was made before, to be used again. So all layers together take the memory of two.
    """

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self.memory, self.num_used = memory, 0

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
        raise NotRecordable(str(func))

    def _place(self, new: Tensor) -> Tensor:
        at, self.num_used = self.num_used, self.num_used + 1
        if at == len(self.memory):
            self.memory.append(new)
        elif (self.memory[at].shape, self.memory[at].dtype) != (new.shape, new.dtype):
            self.memory.insert(at, new)
        return self.memory[at]


def is_view(result: Any, args: Any) -> bool:
    """Does an operation's result lie in the memory of its first argument? A reshape may have copied it."""
    tensors = [*(result if isinstance(result, list | tuple) else [result]), *args[:1]]
    return all(isinstance(x, Tensor) for x in tensors) and len({x.untyped_storage().data_ptr() for x in tensors}) == 1
