"""Grading of the exercises on adapters: small examples, random ones, then several adapters in the engine."""

import random
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from chapters.ch15_which_weights.tuning import random_adapter
from chapters.expect import Wrong, cases, differs, expect, unchanged
from chapters.grading import PROMPTS, Bench
from chapters.patching import replaced
from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.features.lora import slots as lora
from nanovllm.features.lora.adapter import Adapter, linear_shapes
from nanovllm.features.lora.adapter_rows import AdapterRows, LoRAWeights
from nanovllm.features.lora.registry import KnownAdapters
from nanovllm.features.lora.slots import AdapterSlots

AddAdapters = Callable[[Tensor, Tensor, Tensor, LoRAWeights], Any]
IdOfWeights = Callable[[dict[tuple[int, str], int], int, str], int]
SlotFor = Callable[[dict[int, int], int, set[int], int], int]
NUM_ADAPTERS, RANK = 4, 4
LOW_RANK = "A correction of low rank"  # a heading


# -- add_adapters -----------------------------------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products and their multiplications."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = self.num_multiplications = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket._qualified_op_name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::mv", "aten::dot"):
            tensors = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() > 0]
            left = tensors[-2]
            self.num_calls += 1
            self.num_multiplications += out.numel() * left.shape[-1]
        return out


def make_weights(
    out_sizes: tuple[int, ...], in_size: int, ranks: list[int], dtype: torch.dtype = torch.float32
) -> LoRAWeights:
    """Random adapters, the slot's number in their size; ranks: of each slot."""
    generator = torch.Generator().manual_seed(sum(out_sizes) + in_size)
    weights = LoRAWeights.empty(len(ranks), max(ranks), in_size, out_sizes, dtype, "cpu")
    weights.a[..., in_size:] = 7.0  # nobody may look there
    for slot, rank in enumerate(ranks):
        shape = len(out_sizes), rank, in_size
        weights.a[slot, :, :rank, :in_size] = torch.randn(shape, generator=generator) / in_size**0.5
        weights.b[slot, :rank] = (slot + 1) * torch.randn((rank, sum(out_sizes)), generator=generator)
        weights.ranks[slot] = rank
    return weights


def slowly(y: Tensor, x: Tensor, slots: Tensor, weights: LoRAWeights) -> Tensor:
    """What must come out, in float32: row by row, with the whole matrix B A."""
    out = y.float().clone()
    for t, slot in enumerate(slots.tolist()):
        start = 0
        for part, size in enumerate(weights.out_sizes if slot >= 0 else ()):
            a = weights.a[slot, part, :, : x.shape[1]].float()
            change = weights.b[slot, :, start : start + size].float().T @ a
            out[t, start : start + size] += change @ x[t].float()
            start += size
    return out


def ask(function: AddAdapters, slots: list[int], weights: LoRAWeights, hint: str, in_size: int = 16) -> Products:
    generator = torch.Generator().manual_seed(len(slots))
    dtype, out_size = weights.a.dtype, sum(weights.out_sizes)
    x = torch.randn((len(slots), in_size), generator=generator).to(dtype)
    y = torch.randn((len(slots), out_size), generator=generator).to(dtype)
    before, of_row = y.clone(), torch.tensor(slots, dtype=torch.int64)
    expected = slowly(y, x, of_row, weights)
    with unchanged("x or slots, which you were given, have been changed", x, of_row), Products() as products:
        returned = function(y, x, of_row, weights)
    if returned is not None:
        raise Wrong("change y, and return nothing", got=type(returned).__name__)
    if torch.equal(y, before) and differs(expected, y.float(), 1e-3).any():
        raise Wrong(f"slots {slots}: y is as it was. Did you change a copy of its rows, or another tensor called y?")
    tolerance = 1e-4 if dtype is torch.float32 else 0.01
    wrong = differs(expected, y.float(), tolerance, tolerance).any(1).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        shown = [[round(number, 3) for number in tensor[row].float().tolist()[:6]] for tensor in (expected, y)]
        where = f"slots {slots if len(slots) < 12 else '...'}, parts of {weights.out_sizes} columns, row {row}"
        raise Wrong(f"{where}: {hint}", expected=shown[0], got=shown[1])
    return products


def ask_small(
    function: AddAdapters, slots: list[int], out_sizes: tuple[int, ...], ranks: list[int], hint: str, in_size: int = 16
) -> None:
    ask(function, slots, make_weights(out_sizes, in_size, ranks), hint, in_size)


def check_bfloat16(function: AddAdapters, bench: Bench) -> None:
    """bf16 is computed in float32, and rounded once"""
    weights = make_weights((16, 8), 32, [8, 8, 8], torch.bfloat16)
    ask(function, [0, 1, 2, -1] * 6, weights, "round when the sum goes into y, not before", 32)
    weights = make_weights((1,), 16, [2], torch.bfloat16)
    weights.a[0, 0], weights.b[0, :2] = 0, 1
    weights.a[0, 0, 0, :2], weights.a[0, 0, 1, 0] = 1, -1
    x, y = torch.zeros(1, 16).bfloat16(), torch.zeros(1, 1).bfloat16()
    x[0, 0], x[0, 1] = 256, 0.5
    function(y, x, torch.tensor([0]), weights)
    hint = "A makes 256.5 and -256 of this row, and B adds them up: bf16 has no 256.5, so do not round in between"
    expect(0.5, float(y), hint)


def check_work(function: AddAdapters, bench: Bench) -> None:
    """Products are few and small, however many rows there are"""
    in_size, out_sizes, rank, num_rows = 64, (64, 32), 4, 120
    weights = make_weights(out_sizes, in_size, [rank] * 8)
    slots = [(-1, 0, 2, 3)[row % 4] for row in range(num_rows)]
    products = ask(function, slots, weights, "three adapters, and rows without", in_size)
    hint = f"{num_rows} rows meet three adapters, in a layer of two parts; how many matrix products?"
    if products.num_calls > 24:
        raise Wrong(hint, expected="at most four for each adapter and part", got=products.num_calls)
    num_meeting = sum(slot >= 0 for slot in slots)
    most = num_meeting * rank * (len(out_sizes) * in_size + sum(out_sizes))
    if products.num_multiplications > 1.01 * most:
        hint = "multiply x by A first, then the few numbers by B; and only the rows and adapters that belong together"
        raise Wrong(hint, expected=f"{most} multiplications", got=products.num_multiplications, section=LOW_RANK)


class AdapterBench(Bench):
    """An engine with room for two adapters at a time, and four that requests may name."""

    @cached_property
    def llm(self) -> LLM:
        sizes = {"max_model_len": 128, "max_num_seqs": 6, "num_gpu_blocks_override": 160, "block_size": 4}
        return LLM(self.model, dtype="float32", enable_lora=True, max_loras=2, max_lora_rank=RANK, **sizes)

    @cached_property
    def folder(self) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory(prefix="nanovllm-adapters-")

    @cached_property
    def requests(self) -> list[Any]:
        shapes = linear_shapes(self.llm.engine.model_config)
        with torch.random.fork_rng():
            torch.manual_seed(15)
            changed = [shapes] * NUM_ADAPTERS  # the last one leaves alone what others in its slot have changed
            changed[-1] = {path: sizes for path, sizes in shapes.items() if "q_proj" in path}
            paths = [
                random_adapter(Path(self.folder.name, str(i)), some, RANK - i % 2, 0.2)
                for i, some in enumerate(changed)
            ]
        return [LoRARequest(f"number {i}", i, path) for i, path in enumerate(paths, 1)]

    def answers(self, order: tuple[int, ...]) -> list[list[int]]:
        """order: which adapter each request names; 0: none."""
        self.llm.reset_prefix_cache()
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(order))]
        named = [self.requests[i - 1] if i else None for i in order]
        params = [SamplingParams(temperature=0, max_tokens=6 + i % 5, ignore_eos=True) for i in range(len(order))]
        outputs = self.llm.generate(prompts, params, use_tqdm=False, lora_request=named)
        return [output.outputs[0].token_ids for output in outputs]

    @cached_property
    def expected(self) -> dict[tuple[int, ...], list[list[int]]]:
        return {order: self.answers(order) for order in ORDERS}

    @property
    def adapters(self) -> AdapterSlots:
        slots = self.llm.engine.model_runner.parts["adapters"]
        assert isinstance(slots, AdapterSlots)
        return slots


ORDERS = ((0, 1, 2, 1, 0), (1, 2, 3, 4, 1, 0, 2, 3, 2))


@cache
def adapter_bench(model: str) -> AdapterBench:
    return AdapterBench(model)


@contextmanager
def engine_of(bench: Bench) -> Iterator[AdapterBench]:
    other = adapter_bench(bench.model)
    _ = other.expected  # with ours
    try:
        yield other
    finally:
        other.clean()


def compare_answers(other: AdapterBench, order: tuple[int, ...]) -> None:
    text = other.llm.get_tokenizer().decode
    for number, (ours, theirs) in enumerate(zip(other.expected[order], other.answers(order), strict=True)):
        who = f"adapter {order[number]}" if order[number] else "no adapter"
        expect(text(ours), text(theirs), f"requests name adapters {order}: number {number}, {who}, differs")


def check_adapters_generate(function: AddAdapters, bench: Bench) -> None:
    """The engine generates, with requests of several adapters in one batch: the same tokens"""

    def add(y: Tensor, x: Tensor, rows: AdapterRows, weights: LoRAWeights) -> None:
        slots = torch.full((len(x),), -1)
        for slot, indices in rows.groups:
            slots[indices] = slot
        function(y, x, slots, weights)

    with engine_of(bench) as other, replaced(other.adapters, "add_adapters", add):
        compare_answers(other, ORDERS[1])


# -- slot_for ---------------------------------------------------------------------------------------------------------


def ask_slot(
    function: SlotFor, before: dict[int, int], lora_id: int, needed: set[int], num_slots: int, hint: str
) -> int:
    slots, wanted = dict(before), set(needed)
    expected = OrderedDict(before)
    if lora_id not in expected:
        free = sorted(set(range(num_slots)) - set(before.values()))
        taken = free[0] if free else expected.pop(next(other for other in before if other not in needed))
        expected[lora_id] = taken
    expected.move_to_end(lora_id)
    got = function(slots, lora_id, wanted, num_slots)
    said = f"{num_slots} slots, {before} in memory, adapter {lora_id} of a step with {sorted(needed)}: {hint}"
    expect(expected[lora_id], got, f"{said} (the slot)")
    expect(set(expected.items()), set(slots.items()), f"{said} (what is in memory afterwards)")
    expect(list(expected), list(slots), f"{said} (the order, least recently used first)")
    expect(needed, wanted, "needed, which you were given, has been changed")
    return got


def check_many_steps(function: SlotFor, bench: Bench) -> None:
    """500 steps, with up to as many adapters as there are slots"""
    rng = random.Random(15)
    for num_slots in (1, 2, 5):
        slots: dict[int, int] = {}
        for _ in range(500 // 3):
            needed = set(rng.sample(range(1, 9), rng.randint(1, num_slots)))
            for lora_id in sorted(needed):
                ask_slot(function, slots, lora_id, needed, num_slots, "as in the steps before")
                function(slots, lora_id, set(needed), num_slots)
            expect(True, needed <= set(slots), "all adapters of a step are in memory when it begins")


def check_slots_generate(function: SlotFor, bench: Bench) -> None:
    """The engine generates, with four adapters in two slots: the same tokens"""

    with engine_of(bench) as other:
        try:
            with replaced(lora, "slot_for", function):
                for order in ORDERS:
                    compare_answers(other, order)
        finally:  # who has which slot was said by the student's function
            other.__dict__.pop("llm", None)


# -- id_of_weights ----------------------------------------------------------------------------------------------------

MAX_NUMBER = 2**31 - 1


def ask_ids(function: IdOfWeights, asked: list[tuple[int, str]], hint: str) -> None:
    """Asks for weights one after another, from the beginning of an engine."""
    ids: dict[tuple[int, str], int] = {}
    for at, (number, digest) in enumerate(asked):
        before = dict(ids)
        got: Any = function(ids, number, digest)
        said = f"weights named so far, (number, digest): {asked[: at + 1]}; ids before the last one: {before}: {hint}"
        if type(got) is not int:
            raise Wrong(f"{said} (an id is an int)", got=repr(got))
        if (number, digest) in before:
            expect(
                before[number, digest], got, f"{said} (the same weights under the same number: the same id as before)"
            )
        elif number not in {other for other, _ in before}:
            expect(number, got, f"{said} (a number's first weights have the number as id)")
        else:
            if got <= MAX_NUMBER:
                raise Wrong(f"{said} (a request may come whose number this is)", expected="2147483648 or more", got=got)
            if got in before.values():
                raise Wrong(f"{said} (other weights have had this id)", expected="an id that nobody has had", got=got)
        expect(before | {(number, digest): got}, ids, f"{said} (ids afterwards)")


def check_many_ids(function: IdOfWeights, bench: Bench) -> None:
    """200 engines, in which adapters are named, replaced and brought back"""
    rng = random.Random(15)
    for _ in range(200):
        asked = [(rng.choice([1, 2, 7, MAX_NUMBER]), rng.choice([*"abcde"])) for _ in range(rng.randint(1, 14))]
        ask_ids(function, asked, "work this one out by hand")


def play_replacement(model: str) -> dict[str, Any]:
    """What happens when an adapter is replaced while a request uses it, and then brought back."""
    other = AdapterBench(model)
    engine, path = other.llm.engine, Path(other.folder.name, "replaced")
    first, second = (Path(str(other.requests[i].lora_path)) for i in (0, 2))
    shutil.copytree(first, path)
    request = LoRARequest("replaced", 9, str(path), load_inplace=True)
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompt = other.llm.get_tokenizer()(" ".join(PROMPTS)).input_ids
    running = engine.make_request(prompt, params, request)
    engine.enqueue([running])
    for _ in range(4):
        engine.step()
    shutil.copy(second / "adapter_model.safetensors", path)
    [new] = other.llm.generate([prompt], params, False, lora_request=request)
    shutil.copy(first / "adapter_model.safetensors", path)
    [again] = other.llm.generate([prompt], params, False, lora_request=request)
    text = other.llm.get_tokenizer().decode
    return {
        "the request that had begun, with the earlier weights": text(running.output().outputs[0].token_ids),
        "a new request, with the new weights": text(new.outputs[0].token_ids),
        "cached tokens that the new request finds": new.num_cached_tokens,
        "a request when the earlier weights have come back": text(again.outputs[0].token_ids),
        "cached tokens that it finds": again.num_cached_tokens,
    }


def check_replaced_while_used(function: IdOfWeights, bench: Bench) -> None:
    """The engine replaces an adapter while a request uses it, and brings it back"""

    def lora_id(known: KnownAdapters, adapter: Adapter) -> int:
        return function(known._lora_ids, adapter.request.lora_int_id, adapter.digest)

    expected = play_replacement(bench.model)
    with replaced(KnownAdapters, "_lora_id", lora_id):
        got = play_replacement(bench.model)
    for what, ours in expected.items():
        expect(ours, got[what], f"an adapter is replaced while a request uses it, and brought back: {what}")


APART = "different weights must never have one id: their K and V and their slots would be taken for each other's"
BACK = "weights that come back find what was computed with them"
ID_CHECKS = (
    *cases(
        ask_ids,
        {
            "An adapter that is never replaced has its number": [
                ([(7, "aa")], "nobody has named it before"),
                ([(7, "aa"), (7, "aa")], "it is the same adapter"),
                ([(7, "aa"), (3, "bb"), (MAX_NUMBER, "cc")], "three adapters"),
                ([(7, "aa"), (3, "aa")], "each number has an id of its own, also for equal weights"),
            ],
            "Other weights under a number have another id": [
                ([(7, "aa"), (7, "bb")], APART),
                ([(7, "aa"), (7, "bb"), (7, "cc")], APART),
                ([(7, "aa"), (3, "bb"), (7, "cc"), (3, "dd")], APART),
            ],
            "Weights come back": [
                ([(7, "aa"), (7, "bb"), (7, "aa")], BACK),
                ([(7, "aa"), (7, "bb"), (7, "cc"), (7, "bb"), (7, "aa"), (7, "cc")], BACK),
            ],
            "Numbers that are named later": [
                ([(7, "aa"), (7, "bb"), (8, "cc")], "8 is a number like any other"),
                ([(MAX_NUMBER, "aa"), (MAX_NUMBER, "bb"), (1, "bb"), (1, "cc")], APART),
            ],
        },
    ),
    check_many_ids,
    check_replaced_while_used,
)
ADD_CHECKS = (
    *cases(
        ask_small,
        {
            ("One adapter, one part: y += B (A x)", LOW_RANK): [
                ([0], (6,), [1], "one row, rank 1"),
                ([0, 0, 0], (6,), [3], "three rows, rank 3"),
            ],
            "Only the first numbers of a row of a belong to A": [
                ([0, 0], (6,), [2], "x has 10 columns, and a has more", 10)
            ],
            "Slot -1 is no slot: these rows stay as they are": [
                ([-1, -1], (6,), [2, 2], "-1 is no slot, and not the last one either: no row meets an adapter"),
                ([-1, 1, -1], (6,), [2, 2], "rows with slot -1 stay; -1 is not the last slot"),
            ],
            "Rows of several adapters, in any order": [
                ([0, 0, 1, 1, 2], (6,), [2, 4, 1], "every row meets its own adapter"),
                ([2, 0, -1, 2, 1, 0, 2], (6,), [2, 4, 1], "rows of one adapter need not be neighbors"),
            ],
            "q, k and v in one: each part has an A of its own, and its own columns": [
                ([0, 1, 0], (4, 4), [2, 3], "part p takes a[slot, p]"),
                ([1, -1, 0, 1], (8, 3, 5), [2, 3], "columns begin where those of the part before end"),
            ],
        },
    ),
    check_bfloat16,
    check_work,
    check_adapters_generate,
)
SLOT_CHECKS = (
    *cases(
        ask_slot,
        {
            "A free slot, the smallest": [
                ({}, 5, {5}, 3, "nobody is there"),
                ({5: 0}, 8, {8}, 3, "slot 0 is taken"),
                ({5: 0, 8: 2}, 9, {9}, 3, "slot 1 is free"),
            ],
            "An adapter in memory keeps its slot, and is then the most recently used": [
                ({5: 0, 8: 1}, 8, {8}, 2, "it has a slot"),
                ({5: 1, 8: 0}, 5, {5}, 3, "it has a slot, and was used just now"),
            ],
            "The least recently used leaves": [
                ({5: 1, 8: 0}, 9, {9}, 2, "5 was used least recently"),
                ({8: 0, 5: 1, 7: 2}, 9, {9}, 3, "8 was used least recently"),
            ],
            "Never an adapter that the same step needs": [
                ({5: 1, 8: 0}, 9, {5, 9}, 2, "5 is needed in this step: 8 must go"),
                ({5: 1, 8: 0, 7: 2}, 9, {5, 8, 9}, 3, "only 7 is not needed"),
            ],
        },
    ),
    check_many_steps,
    check_slots_generate,
)
