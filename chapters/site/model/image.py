"""Image: what the engine has recorded of a step, and all that it reads, as the memory of a WebAssembly program.

nanovllm/worker/cpu/recorded_step.py holds a step as calls of C functions with their arguments. An image holds the same
calls, with addresses of WebAssembly: weights, KV cache and all else have places of their own there. So no layer of a
model is written a second time: what the engine has recorded, a page replays (kernels.c, kernels.js).

    [ the program | zeros: KV cache, inputs, activations | weights, arguments, calls ]
    0             BASE                                   start                       end
                                                         <--   bytes of the file  -->
"""

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.features.quantization.formats import MergedWeight
from nanovllm.features.quantization.quantized_kernels import QuantizedArgs, QuantizedPart, parts_of
from nanovllm.worker.batch import cdiv
from nanovllm.worker.c_calls import FLOAT, INT, PTR
from nanovllm.worker.cpu.c_kernels import (
    FEW_ROWS,
    TASK_ROWS,
    AttentionStep,
    ChoiceArgs,
    LinearArgs,
    RotaryArgs,
    defines_of,
)
from nanovllm.worker.cpu.recorded_step import RecordedStep

BASE = 4 << 20  # the program's own data and stack lie below
ALIGNED = 64
CODES: dict[Any, str] = {PTR: "I", INT: "q", FLOAT: "f"}  # as the module struct names them; a pointer has 32 bits there


class NotPortable(ValueError):
    """A model that a page cannot compute with. Says why."""


def as_bytes(args: ctypes.Structure, **addresses: int) -> bytes:
    """A struct as it lies there. addresses: of its pointers; those that are not given are NULL."""
    kinds = [(name, CODES[kind]) for name, kind, *_ in args._fields_]
    values = [addresses.get(name, 0) if kind == "I" else getattr(args, name) for name, kind in kinds]
    return struct.pack("@" + "".join(kind for _, kind in kinds) + "0q", *values)


class Image:
    """file: the bytes from layout["start"] on. layout: what kernels.js has to know. defines: of program.c."""

    def __init__(self, llm: LLM) -> None:
        """Raises NotPortable."""
        runner: Any = llm.engine.model_runner
        record = runner.recorded_steps
        if not isinstance(record, RecordedStep) or runner.dtype != torch.bfloat16:
            raise NotPortable("a page replays what the engine has recorded, of quantized weights, in bfloat16")
        of_dtype, of_heads = defines_of(runner.local_config, runner.dtype, everywhere=True)
        self.defines = of_dtype + of_heads
        self.places: dict[int, tuple[int, int]] = {}  # address of memory here: (its bytes, address there)
        self.end, self.file, self.functions = BASE, bytearray(), list[str]()
        self.layout: dict[str, Any] = facts_of(runner) | {"max_rows": record.max_rows}
        self._place(runner, record)
        self._write_calls(record)
        table = runner.model.embed_tokens
        self.layout |= {
            "inputs": self._find(record.inputs.data_ptr()),
            "logits": self._find(record.logits.data_ptr()),
            "looked_up": self._find(record.looked_up.data_ptr()) if record.looked_up is not None else 0,
            "table": self._table(table) if record.looked_up is not None else 0,
            "end": self.end,
        }

    def _place(self, runner: Any, record: RecordedStep) -> None:
        """Give places to all memory that calls read and write, and the weights their bytes."""
        model = runner.model
        kept = [x for _, args in record.recorded for x in getattr(args, "kept", ())]
        between = [x for part in record.memory for x in part]
        written = [record.inputs, record.looked_up, runner.kv_cache.data, *kept, *between]
        constant = memory_of([*model.parameters(), *model.buffers(), runner.rotary.table, model.embed_tokens])
        for here, size in memory_of(written).items():
            if here not in constant:
                self.places[here] = size, self._zeros(size)
        self.layout |= {  # what kernels.js fills in before a step
            "step": self._zeros(len(as_bytes(AttentionStep()))),
            "tables": self._zeros(4 * self.layout["table_width"]),
            "tasks": self._zeros(4 * 8 * record.max_rows),
            "choice": self._zeros(len(as_bytes(ChoiceArgs()))),
            "token_ids": self._zeros(8 * record.max_rows),
        }
        self.layout["start"] = self.end
        for here, size in constant.items():
            self.places[here] = size, self._put(ctypes.string_at(here, size))

    def _write_calls(self, record: RecordedStep) -> None:
        entries, layers = list[bytes](), list[dict[str, int]]()
        for (function, args), call in zip(record.recorded, [*record.calls, *record.finish], strict=True):
            entries.append(self._call(function.__name__, args, call.times))
            if isinstance(args, RotaryArgs):  # what attention reads
                layers.append(self._attended(args, len(entries)))
        num_calls = len(record.calls)
        self.layout |= {
            "functions": self.functions,
            "calls": self._put(b"".join(entries[:num_calls])),
            "num_calls": num_calls,
            "finish": self._put(b"".join(entries[num_calls:])),
            "num_finish": len(entries) - num_calls,
            "layers": layers,
        }

    # -- memory -----------------------------------------------------------------------------------------------------

    def _zeros(self, num_bytes: int) -> int:
        at = self.end
        self.end += cdiv(num_bytes, ALIGNED) * ALIGNED
        return at

    def _put(self, data: bytes) -> int:
        at = self._zeros(len(data))
        self.file += data + bytes(self.end - at - len(data))
        return at

    def _find(self, address: int | None) -> int:
        """There, of an address here."""
        for here, (size, there) in self.places.items():
            if address and here <= address < here + size:
                return there + address - here
        assert not address, "an argument points to memory that has no place"
        return 0

    # -- calls ------------------------------------------------------------------------------------------------------

    def _call(self, name: str, args: ctypes.Structure, times: int) -> bytes:
        """recorded_call of replay.c. In place of the function, its number in self.functions."""
        if isinstance(args, LinearArgs):
            raise NotPortable(
                "weights that are not quantized lie in memory as the processor of this machine wants them"
            )
        if name not in self.functions:
            self.functions.append(name)
        pointers = {field: getattr(args, field) for field, kind, *_ in args._fields_ if kind is PTR}
        if isinstance(args, QuantizedArgs):
            weights = (PTR * args.num_weights).from_address(pointers.pop("weights"))
            lists = [self._parts((QuantizedPart * args.num_parts).from_address(weight or 0)) for weight in weights]
            own = {"weights": self._put(struct.pack(f"{len(lists)}I", *lists))}
        else:
            own = {"step": self.layout["step"]} if pointers.pop("step", None) else {}
        there = {field: self._find(address) for field, address in pointers.items()} | own
        return struct.pack("2Iq", self.functions.index(name), self._put(as_bytes(args, **there)), times)

    def _table(self, table: MergedWeight) -> int:
        parts_of(table)
        return self._parts(table.kernel_args)

    def _attended(self, args: RotaryArgs, num_calls: int) -> dict[str, int]:
        """Where a layer's queries and keys are, once so many calls of a step are made."""
        found = {"q": self._find(args.q), "k_cache": self._find(args.k_cache), "num_calls": num_calls}
        return found | {"q_stride": args.q_stride, "block_stride": args.block_stride}

    def _parts(self, parts: Sequence[QuantizedPart]) -> int:
        places = [{"blocks": self._find(part.blocks), "order": self._find(part.order)} for part in parts]
        return self._put(b"".join(as_bytes(part, **there) for part, there in zip(parts, places, strict=True)))


def facts_of(runner: Any) -> dict[str, Any]:
    """What does not depend on addresses."""
    config = runner.model_config
    sizes = "hidden_size", "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads"
    pool = "num_blocks", "block_size", "max_model_len"
    return {
        **{name: getattr(config, name) for name in sizes},
        **{name: getattr(runner, name) for name in pool},
        "eos_token_ids": sorted(config.eos_token_ids),
        "table_width": cdiv(runner.max_model_len, runner.block_size),
        "base": BASE,
        "task_rows": TASK_ROWS,
        "few_rows": FEW_ROWS,
    }


def memory_of(tensors: Iterable[Any]) -> dict[int, int]:
    """{address: bytes} of the memory of those that are tensors."""
    storages = [x.untyped_storage() for x in tensors if isinstance(x, Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}
