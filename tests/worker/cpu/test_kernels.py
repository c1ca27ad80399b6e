"""The C kernels against their twins in PyTorch, and those against dense attention."""

import ctypes
import ctypes.util
import gc
import hashlib
import multiprocessing
import os
import platform
import random
import shutil
import stat
import subprocess
import time
import weakref
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, LoRARequest, SamplingParams
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu import c_kernels as cpu_kernels
from nanovllm.worker.cpu import compiler as c_compiler
from nanovllm.worker.cpu.reorder import reorder_weight
from nanovllm.worker.kernels import TORCH_KERNELS
from nanovllm.worker.layers import GatedLinear, Linear, plain_linear
from tests.checkpoints import SMALL
from tests.features.lora.adapters import make_adapter

# (cached before, computed now): decodes, prompts, chunks, prefix hits; lengths inside, at and beyond a block's border.
RAGGED = [(0, 1), (15, 1), (16, 1), (200, 1), (0, 16), (0, 17), (32, 3), (31, 130), (0, 300), (64, 16), (5, 1)]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def kernels(dtype, num_heads=6, num_kv_heads=2, head_dim=64):
    sizes = dict(num_key_value_heads=num_kv_heads, head_dim=head_dim, rotary_dim=head_dim)
    config = SimpleNamespace(num_attention_heads=num_heads, **sizes)
    found = cpu_kernels.load_cpu_kernels(config, dtype)
    if found is None:
        pytest.skip("no C compiler; PyTorch's operations are tested by every other test")
    return found


ENGINES = [
    ("llama", {"quantization": "int8"}),
    ("qwen3-moe", {}),
    ("qwen3.5", {}),
    ("llama", {"enable_lora": True, "max_lora_rank": 8}),
]


@pytest.mark.compiler
@pytest.mark.parametrize("variant, options", ENGINES)
def test_kernels_go_with_their_engine(variant, options, checkpoint, tmp_path):
    """And with them what wings have made of them, scratch memory among it."""
    lora_request = None
    if "enable_lora" in options:
        lora_request = LoRARequest("a", 1, str(make_adapter(tmp_path, checkpoint(variant))))
    llm = LLM(str(checkpoint(variant)), **SMALL | options)
    llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2), use_tqdm=False, lora_request=lora_request)
    kernels = weakref.ref(llm.engine.model_runner.kernels)
    assert kernels().made
    del llm
    gc.collect()
    assert kernels() is None


PROCESSORS = "x86-64 haswell alderlake skylake-avx512 icelake-server cooperlake sapphirerapids".split()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="processors with x86-64 instructions")
@pytest.mark.parametrize("dtype", cpu_kernels.TYPES.values())
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.nightly
def test_source_is_right_for_other_processors(processor, dtype):
    """This machine compiles only some of the branches: AVX2, AVX512 and their instructions for bf16 and int8."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    flags = [flag for flag in c_compiler.COMPILE if flag != "-march=native"]
    sizes = [f"-DTYPE_{dtype}", "-DHEAD_DIM=64", "-DGROUP=3", "-DTASK_ROWS=64"]
    warnings = ["-fsyntax-only", "-Wall", "-Wextra", "-Wno-psabi", "-Werror"]
    sources = [str(Path(c_compiler.__file__).with_name(name)) for name in ("kernels.c", "heads.c")]
    command = ["cc", *flags, f"-march={processor}", *sizes, *warnings, *sources]
    done = subprocess.run(command, capture_output=True, text=True)
    if "-march" in done.stderr or "_Float16 is not supported" in done.stderr:
        pytest.skip(f"this compiler does not know {processor}, or its float16")
    assert done.returncode == 0, done.stderr


def ragged_batch(block_size: int, lengths=RAGGED) -> tuple[Batch, int]:
    """A batch over shuffled blocks, and the size of its pool."""
    num_blocks = sum(-(-(a + b) // block_size) for a, b in lengths)
    free = list(range(num_blocks))
    random.Random(0).shuffle(free)
    chunks = []
    for before, now in lengths:
        seq = Sequence([1] * (before + now))
        seq.block_table = [free.pop() for _ in range(-(-len(seq.tokens) // block_size))]
        chunks.append(ScheduledChunk(seq, before, before + now, before))
    output = SchedulerOutput(chunks, [], sum(now for _, now in lengths))
    return Batch.from_scheduler_output(output, block_size), num_blocks


def stored(found, q, k_cache, v_cache):
    """K and V as a backend stores them: written through it, slot by slot. q: any queries, for the number of heads."""
    slots = torch.arange(k_cache.shape[0] * k_cache.shape[1])
    caches, k, v = torch.zeros(2, *k_cache.shape, dtype=k_cache.dtype), k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    batch = SimpleNamespace(slot_mapping=slots, written=(None, slots))
    no_queries = q.new_zeros(len(slots), *q.shape[1:])
    found.rotary_and_write(no_queries, k, v.contiguous(), None, (caches[0], caches[1]), batch)
    return caches


def unstored(found, k_cache, v_cache):
    """The other way round: [num_blocks, block_size, num_kv_heads, head_dim]."""
    if found is TORCH_KERNELS:
        return k_cache, v_cache
    num_blocks, block_size, num_heads, _ = k_cache.shape
    k = k_cache.reshape(num_blocks, num_heads, -1, block_size, found.library.unit_size())
    return k.permute(0, 3, 1, 2, 4).flatten(3), v_cache.reshape(num_blocks, num_heads, block_size, -1).transpose(1, 2)


def dense_attention(q, k_cache, v_cache, batch: Batch, window: int = 0) -> torch.Tensor:
    """One sequence at a time, all its scores in one matrix, in float64."""
    out, block_size = [], k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    for b, (num_rows, num_keys) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
        start = int(batch.cu_seqlens_q[b])
        slots = [int(batch.block_tables[b, p // block_size]) * block_size + p % block_size for p in range(num_keys)]
        k = k_cache.flatten(0, 1)[slots].double().repeat_interleave(group, 1)  # [num_keys, num_heads, head_dim]
        v = v_cache.flatten(0, 1)[slots].double().repeat_interleave(group, 1)
        scores = torch.einsum("rhd,shd->rhs", q[start : start + num_rows].double(), k) * q.shape[2] ** -0.5
        behind = (num_keys - num_rows + torch.arange(num_rows))[:, None, None] - torch.arange(num_keys)
        scores.masked_fill_((behind < 0) | (behind >= (window or num_keys)), -torch.inf)
        out.append(torch.einsum("rhs,shd->rhd", scores.softmax(-1), v))
    return torch.cat(out)


# Where a block begins does not depend on how numbers are stored, nor on how many heads there are: without CI a dtype of
# 16 bits meets one size of a block, and some numbers of heads, each of which is compiled.
NUMBERS = ("dtype", "block_size", "num_heads", "num_kv_heads", "head_dim")
QUICK = [*((torch.float32, size) for size in (1, 16, 256)), (torch.bfloat16, 16), (torch.float16, 1)]
STORED = [*QUICK, *((torch.bfloat16, size) for size in (1, 256)), *((torch.float16, size) for size in (16, 256))]
HEADS = [(6, 2, 64), (9, 1, 72), (4, 4, 24)]
ALL_HEADS = [*HEADS, (8, 1, 128), (4, 2, 16), (7, 1, 64), (4, 2, 80), (2, 2, 64)]


def cases(heads: list[tuple[int, int, int]]) -> Iterator:
    for stored, sizes in product(STORED, heads):
        is_quick = stored in QUICK and (stored == (torch.float32, 16) or sizes in HEADS)
        yield pytest.param(*stored, *sizes, marks=[] if is_quick else [pytest.mark.nightly])


@pytest.mark.parametrize(NUMBERS, list(cases(ALL_HEADS)))
def test_attention(dtype, block_size, num_heads, num_kv_heads, head_dim):
    torch.manual_seed(0)
    batch, num_blocks = ragged_batch(block_size)
    k_cache, v_cache = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim).to(dtype)
    # As in the model, q is a part of a wider tensor.
    q = torch.randn(len(batch.positions), num_heads + 3, head_dim).to(dtype)[:, :num_heads]
    expected = dense_attention(q, k_cache, v_cache, batch)
    for found in (TORCH_KERNELS, kernels(dtype, num_heads, num_kv_heads, head_dim)):
        result = found.paged_attention(q, *stored(found, q, k_cache, v_cache), batch).double()
        torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)


# Around the sizes of a block, of C's chunk of 64 keys and of PyTorch's tile of 128 rows; 1: a row sees itself alone.
WINDOWS = [1, 2, 7, 16, 17, 63, 64, 100, 129, 255, 1000]


@pytest.mark.parametrize(NUMBERS, list(cases(HEADS)))
def test_attention_with_a_window(dtype, block_size, num_heads, num_kv_heads, head_dim):
    """Blocks in front of every row's window are not read: what is in them would show, it is no number."""
    torch.manual_seed(0)
    batch, num_blocks = ragged_batch(block_size)
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim).to(dtype)
    q = torch.randn(len(batch.positions), num_heads, head_dim).to(dtype)
    # By day one kind meets every window: which keys are seen does not depend on how numbers are stored.
    is_short = (dtype, block_size) in QUICK and (dtype, block_size) != (torch.float32, 16)
    for window in WINDOWS[::3] if is_short else WINDOWS:
        expected = dense_attention(q, *caches, batch, window)
        k_cache, v_cache = caches.clone()
        for b, (num_rows, num_keys) in enumerate(zip(batch.query_lens, batch.key_lens, strict=True)):
            unseen = batch.block_tables[b, : max(0, num_keys - num_rows + 1 - window) // block_size]
            unseen = unseen[unseen > 0]  # block 0 pads the tables of sequences that are shorter
            k_cache[unseen], v_cache[unseen] = torch.nan, torch.nan
        for found in (TORCH_KERNELS, kernels(dtype, num_heads, num_kv_heads, head_dim)):
            result = found.paged_attention(q, *stored(found, q, k_cache, v_cache), batch, window).double()
            torch.testing.assert_close(result, expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(6, 2, 64, 16), (2, 2, 24, 12), (7, 1, 64, 1), (9, 1, 32, 64), (4, 1, 72, 16)],
)
def test_a_row_has_the_same_bits_however_its_step_is_cut(dtype, num_heads, num_kv_heads, head_dim, block_size):
    """Alone, beside drafts, in a prompt's tile, in parts side by side or one after another; with a window, too."""
    torch.manual_seed(0)
    found, num_keys = kernels(dtype, num_heads, num_kv_heads, head_dim), 600
    plain = torch.randn(2, -(-num_keys // block_size), block_size, num_kv_heads, head_dim)
    plain[1, ..., ::3] *= 1e-37  # products with weights are denormal numbers
    plain = plain.to(dtype)
    q = torch.randn(num_keys, num_heads, head_dim).to(dtype) * 3
    caches = stored(found, q, *plain)
    beside = [(num_keys - 1, 1)] * 40  # so much work that no task's keys are computed side by side
    for window in (0, 1, 300):
        whole = found.paged_attention(q, *caches, one_sequence(block_size, [(0, num_keys)]), window)
        for size, starts in ((1, (0, 63, 256, 599)), (2, (64,)), (9, (250,)), (30, (0, 240, 570))):
            for start in starts:
                part, expected = q[start : start + size], whole[start : start + size]
                alone = one_sequence(block_size, [(start, size)])
                assert torch.equal(found.paged_attention(part, *caches, alone, window), expected)
                crowded = one_sequence(block_size, [(start, size), *beside])
                rows = torch.cat([part, q[-1:].expand(40, -1, -1)])
                result = found.paged_attention(rows, *caches, crowded, window)
                assert torch.equal(result[:size], expected) and torch.equal(result[-1], whole[-1])


def one_sequence(block_size: int, lengths: list[tuple[int, int]]) -> Batch:
    """A batch of pieces of one sequence, whose blocks are the first ones of the pool."""
    longest = max(before + now for before, now in lengths)
    chunks = []
    for before, now in lengths:
        seq = Sequence([1] * longest)
        seq.block_table = list(range(-(-longest // block_size)))
        chunks.append(ScheduledChunk(seq, before, before + now, before))
    return Batch.from_scheduler_output(SchedulerOutput(chunks, [], 0), block_size)


@pytest.mark.parametrize("key", [1e20, -1e20, torch.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_rows", [1, 40])
def test_scores_that_are_infinite_do_not_become_a_sound_row(num_rows, dtype, key):
    """Nor may they touch other sequences."""
    torch.manual_seed(0)
    batch, num_blocks = ragged_batch(16, [(90, num_rows), (30, num_rows)])
    k_cache, v_cache = torch.randn(2, num_blocks, 16, 2, 64).to(dtype)
    q = torch.randn(2 * num_rows, 6, 64).to(dtype)
    expected = dense_attention(q, k_cache, v_cache, batch)[num_rows:]
    q[:num_rows] = 1e25
    k_cache[batch.block_tables[0].unique()] = key
    # PyTorch's attention gives 0 for a row whose scores are all -infinity.
    for found in (kernels(dtype), *([TORCH_KERNELS] if key != -1e20 else [])):
        result = found.paged_attention(q, *stored(found, q, k_cache, v_cache), batch)
        assert not result[:num_rows].isfinite().any()
        torch.testing.assert_close(result[num_rows:].double(), expected, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("num_keys", [1, 7, 1000])
def test_attention_of_a_lone_decode_is_split_over_the_cores(num_keys):
    torch.manual_seed(0)
    batch, num_blocks = ragged_batch(16, [(num_keys - 1, 1)])
    k_cache, v_cache = torch.randn(2, num_blocks, 16, 2, 64)
    q = torch.randn(1, 6, 64) * 4
    for window in (0, 1, 3, 70, 999):
        expected = dense_attention(q, k_cache, v_cache, batch, window)
        found = kernels(torch.float32)
        result = found.paged_attention(q, *stored(found, q, k_cache, v_cache), batch, window).double()
        torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_small_operations(dtype):
    torch.manual_seed(0)
    ours, rows = kernels(dtype), 40
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    hidden, stream, weight = (torch.randn(rows, 100).to(dtype) for _ in range(3))
    for residual in (None, stream):
        found, expected = (
            k.add_rms_norm(hidden.clone(), None if residual is None else residual.clone(), weight[0], 1e-5)
            for k in (ours, TORCH_KERNELS)
        )
        torch.testing.assert_close(found, expected, **close)
    gate_up = torch.randn(rows, 200).to(dtype) * 20
    torch.testing.assert_close(ours.silu_and_mul(gate_up), TORCH_KERNELS.silu_and_mul(gate_up), **close)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("is_rotary", [True, False])
def test_rotary_and_write(dtype, is_rotary):
    torch.manual_seed(0)
    batch, num_blocks = ragged_batch(4, [(0, 5), (6, 1), (8, 3)])
    batch.slot_mapping[[1, 5]] = -1
    qkv = torch.randn(9, 10, 64).to(dtype)
    cos_sin = torch.randn(9, 32).to(dtype), torch.randn(9, 32).to(dtype)
    results = []
    for found in (kernels(dtype), TORCH_KERNELS):
        q, k, v = qkv.clone().split((6, 2, 2), dim=1)
        caches = torch.full((2, num_blocks, 4, 2, 64), 7.0).to(dtype)
        found.rotary_and_write(q, k, v, cos_sin if is_rotary else None, (caches[0], caches[1]), batch)
        assert torch.equal(q, qkv[:, :6]) == torch.equal(k, qkv[:, 6:8]) == (not is_rotary)
        caches = torch.stack(unstored(found, *caches))
        results.append((q, k, caches))
        untouched = set(range(num_blocks * 4)) - set(batch.slot_mapping.tolist())
        assert bool((caches.flatten(1, 2)[:, sorted(untouched)] == 7).all())
        assert torch.equal(caches[1].flatten(0, 1)[batch.slot_mapping[0]], v[0])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, atol=TOLERANCE[dtype] * 2, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("in_c", [False, True], ids=["oneDNN", "C"])
@pytest.mark.parametrize("k", [64, 1300])  # C converts up to 1,024 numbers of a row at a time
def test_reordered_weights(dtype, bias, in_c, k):
    torch.manual_seed(0)
    layer = Linear(k, 96, bias).to(dtype).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    inputs = [(torch.randn(rows, k) * (64 / k) ** 0.5).to(dtype) for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 33, 300)]
    expected = [layer(x) for x in inputs]
    reorder_weight(layer, kernels(dtype) if in_c else TORCH_KERNELS)
    for x, y in zip(inputs, expected, strict=True):
        torch.testing.assert_close(layer(x), y, atol=TOLERANCE[dtype] * 8, rtol=0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("n", "k"), [(97, 64), (1, 40), (96, 600), (31, 7), (40, 8192), (70, 1000), (135, 1301)])
def test_a_product_takes_weights_of_any_size_and_a_row_has_the_same_bits_beside_others(dtype, n, k):
    torch.manual_seed(0)
    ours = kernels(dtype)
    num_rows = 560  # with 8,192 numbers each, that is more than one slab; with 1,000, a block goes through them twice
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    x = (torch.randn(num_rows, k) * min(1, 600 / k) ** 0.5).to(dtype)
    reordered = ours.reorder_weight(weight)
    if reordered is None:
        pytest.skip("PyTorch's libraries compute these products on this processor")
    together = ours.linear(x, reordered, bias)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(together.double(), expected, atol=TOLERANCE[dtype] * 10, rtol=TOLERANCE[dtype])
    assert ours.linear(x[:0], reordered, bias).shape == (0, n)
    for rows in (1, 2, 3, 5, 8, 70):
        for first in range(0, num_rows - rows, rows):
            part = ours.linear(x[first : first + rows], reordered, bias)
            assert torch.equal(part, together[first : first + rows])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("size", "k"), [(32, 40), (96, 600), (64, 1000), (40, 64), (64, 8192)])
def test_gate_and_up_in_one_pass_have_the_same_bits_as_one_by_one(dtype, size, k, bias):
    """Also where it is not one pass: a size that is no multiple of a block."""
    torch.manual_seed(0)
    ours = kernels(dtype)
    layer = GatedLinear(k, size, bias).to(dtype).requires_grad_(False)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = (torch.randn(560, k) * (16 / k) ** 0.5).to(dtype)
    expected = TORCH_KERNELS.gated_linear(x, layer)
    torch.testing.assert_close(ours.gated_linear(x, layer), expected, atol=TOLERANCE[dtype] * 8, rtol=TOLERANCE[dtype])
    if ours.reorder_weight(layer.weight) is None:
        pytest.skip("PyTorch's libraries compute these products on this processor")
    reorder_weight(layer, ours)
    for rows in (0, 1, 7, 33, 300, 560):
        found = ours.gated_linear(x[:rows], layer)
        assert torch.equal(found, ours.silu_and_mul(ours.linear(x[:rows], layer.weight, layer.bias)))
        torch.testing.assert_close(found, expected[:rows], atol=TOLERANCE[dtype] * 16, rtol=TOLERANCE[dtype])


# -- compiling ---------------------------------------------------------------------------------------------------------


def use_empty_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(c_compiler, "COMPILE", [flag.replace("-O3", "-O0") for flag in c_compiler.COMPILE])  # quick
    return folder / "nanovllm" / "kernels"


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> Path:
    return use_empty_cache(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Path:
    """A library in a cache of its own, with its hash beside it."""
    kernels(torch.float32)  # skips where there is no compiler
    with pytest.MonkeyPatch.context() as monkeypatch:
        return use_empty_cache(tmp_path_factory.mktemp("compiled"), monkeypatch) / compile_one(0)


def path_of(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def compile_one(_) -> str:
    return c_compiler.compile_library("pool.c", []).name


@pytest.mark.compiler
def test_compiled_once_also_when_several_start_at_once(empty_cache):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        names = set(pool.map(compile_one, range(4)))
    assert len(names) == 1 and names < set(path_of(empty_cache))
    before = (empty_cache / names.copy().pop()).stat().st_mtime_ns
    compile_one(0)
    assert (empty_cache / names.pop()).stat().st_mtime_ns == before
    left = {name.split(".")[1] for name in path_of(empty_cache)}
    assert left == {"so", "sha256"}, "nothing else is left behind"


@pytest.mark.compiler
def test_what_killed_processes_have_left_is_removed(empty_cache):
    for name, age_s in (("tmp_killed", 2 * 24 * 60 * 60), ("tmp_at_work", 60)):
        (empty_cache / name).mkdir(parents=True)
        (empty_cache / name / "kernels.o").touch()
        os.utime(empty_cache / name, (time.time() - age_s,) * 2)
    compile_one(0)
    assert [name for name in path_of(empty_cache) if name.startswith("tmp")] == ["tmp_at_work"]


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "random bytes": lambda data: bytes(random.Random(0).randbytes(len(data))),
    "empty": lambda data: b"",
    "one bit": lambda data: data[:5000] + bytes([data[5000] ^ 1]) + data[5001:],
    "no hash": None,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_library_is_never_loaded_and_made_again(compiled, empty_cache, damage):
    library = shutil.copytree(compiled.parent, empty_cache) / compiled.name
    data, hashed = library.read_bytes(), library.with_suffix(".sha256")
    if damage == "no hash":
        library.write_bytes(b"of an earlier release")
        hashed.unlink()
    else:
        library.write_bytes(DAMAGE[damage](data))
    compile_one(0)
    assert hashed.read_text() == hashlib.sha256(library.read_bytes()).hexdigest()
    assert hasattr(ctypes.CDLL(str(library)), "parallel_for")


IN_A_HEADER = "In file included from kernels.c:23:\nvectors.h: In function f:\nvectors.h:5:9: %s: no such type\n"
BROKEN_COMPILERS = {
    "fails in a header": f"[ $LC_ALL = C ] && said=error || said=Fehler; printf '{IN_A_HEADER}' $said >&2; exit 1",
    "cannot link": "printf 'ld: cannot find -lm\ncollect2: error: ld returned 1 exit status\n' >&2; exit 1",
    "fails": "echo 'internal compiler error' >&2; exit 1",
    "fails silently": "exit 3",
    "talks Latin-1": "printf 'Datei nicht gefunden: \\374\\n' >&2; exit 1",
    "makes nothing": "exit 0",
}


@pytest.mark.compiler
@pytest.mark.parametrize(
    "breakage", ["no compiler", "half a CC", "read-only cache", "no home", "another library", *BROKEN_COMPILERS]
)
def test_without_c_kernels_everything_still_works(checkpoint, empty_cache, tmp_path, monkeypatch, caplog, breakage):
    [expected] = LLM(str(checkpoint()), enforce_eager=True).generate("the quick", SamplingParams(temperature=0))
    cpu_kernels._warn_once.cache_clear()
    if breakage == "no compiler":
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setattr(c_compiler.shutil, "which", lambda name: None)
        monkeypatch.setattr(c_compiler, "find_spec", lambda name: None)
    elif breakage == "half a CC":
        monkeypatch.setenv("CC", "'gcc")
    elif breakage == "read-only cache":
        (tmp_path / "nanovllm").write_text("a file where the folder should be")
    elif breakage == "no home":

        def no_home():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(c_compiler.Path, "home", no_home)
    elif breakage == "another library":
        monkeypatch.setattr(cpu_kernels, "compile_library", lambda source, defines: ctypes.util.find_library("m"))
    else:
        compiler = tmp_path / "cc"
        compiler.write_text(f"#!/bin/sh\n{BROKEN_COMPILERS[breakage]}\n")
        compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CC", f"{compiler} --with-an-argument")
    for _ in range(2):
        llm = LLM(str(checkpoint()), optimizations=("c_kernels",))
    [record] = [r for r in caplog.records if "C kernels are off" in r.message]
    assert record.levelname == "WARNING" and "CC names another" in record.message, "once, and where users see it"
    reasons = {"fails": "internal compiler error", "no home": "home directory"}
    reasons |= {"half a CC": "CC='gcc: No closing", "read-only cache": "XDG_CACHE_HOME another folder"}
    reasons |= {"fails in a header": "slower: vectors.h:5:9: error: no such type", "cannot link": "ld: cannot find -lm"}
    reasons["no compiler"] = 'there is no C compiler (cc): install gcc or clang, or run  pip install "nanovllm'
    assert reasons.get(breakage, "") in record.message
    assert llm.generate("the quick", SamplingParams(temperature=0))[0].outputs == expected.outputs


@pytest.mark.compiler
def test_a_compiler_with_arguments(empty_cache, monkeypatch):
    before = compile_one(0)
    monkeypatch.setenv("CC", f"env LANG=C {shutil.which('cc')}")
    assert (empty_cache / compile_one(0)).is_file() and compile_one(0) != before


def test_heads_too_many_for_the_stack():
    """512 query heads over one KV head would overflow a thread's stack in C; the most that are let in do not."""
    with pytest.raises(pytest.skip.Exception):
        kernels(torch.float32, 512, 1, 64)
    found = kernels(torch.float32, 128, 1, 64)
    batch, num_blocks = ragged_batch(16, [(0, 40), (5, 1)])
    k_cache, v_cache = torch.randn(2, num_blocks, 16, 1, 64)
    q = torch.randn(41, 128, 64)
    expected, result = (k.paged_attention(q, *stored(k, q, k_cache, v_cache), batch) for k in (TORCH_KERNELS, found))
    torch.testing.assert_close(result, expected, atol=2e-5, rtol=0)


def test_optimizations_can_be_switched_off_one_at_a_time(checkpoint):
    def runner(**options):
        return LLM(str(checkpoint()), **options).engine.model_runner

    reordered = runner(optimizations=("reordered_weights",))
    assert reordered.kernels is TORCH_KERNELS and reordered.model.lm_head.product is TORCH_KERNELS.linear
    assert runner(optimizations=("c_kernels",)).model.lm_head.product is plain_linear
    plain = runner(enforce_eager=True)
    assert plain.kernels is TORCH_KERNELS and plain.model.lm_head.product is plain_linear
    with pytest.raises(ValueError, match=r"must be one of reordered_weights, c_kernels, .* found 'magic'"):
        runner(optimizations=("magic",))


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("variant", "options", "wings"),
    [
        ("llama", {}, set()),
        ("qwen3-moe", {}, {"experts.c"}),
        ("qwen3.5", {}, {"delta_rule.c"}),
        ("llama", {"quantization": "int8"}, {"quantized.c"}),
        ("llama", {"enable_lora": True}, {"adapters.c"}),
    ],
)
def test_the_c_of_a_wing_is_compiled_when_the_wing_is_used(checkpoint, monkeypatch, variant, options, wings):
    kernels(torch.float32)  # skips where there is no compiler
    sources, compile_library = [], cpu_kernels.compile_library

    def remembering(source, defines):
        sources.append(Path(source).name)
        return compile_library(source, defines)

    monkeypatch.setattr(cpu_kernels, "compile_library", remembering)
    sizes = dict(dtype="float32", block_size=4, num_gpu_blocks_override=16, max_model_len=32)
    LLM(str(checkpoint(variant)), **sizes, **options).generate([[5, 6, 7]], SamplingParams(max_tokens=2))
    assert set(sources) == {"kernels.c", "heads.c"} | wings


@pytest.mark.compiler
def test_the_kernels_of_a_plain_llama_need_no_file_of_a_wing(empty_cache, tmp_path, monkeypatch):
    folder = shutil.copytree(c_compiler.FOLDER, tmp_path / "cpu")
    monkeypatch.setattr(c_compiler, "FOLDER", folder)
    for source, defines in (("kernels.c", []), ("heads.c", ["-DHEAD_DIM=64", "-DGROUP=3", "-DTASK_ROWS=16"])):
        assert c_compiler.compile_library(source, ["-DTYPE_f32", *defines]).exists()


@pytest.mark.compiler
def test_a_wing_whose_c_cannot_be_compiled_computes_in_pytorch(checkpoint, monkeypatch, caplog):
    kernels(torch.float32)
    folder, sizes = checkpoint("qwen3.5"), dict(dtype="float32", block_size=4, num_gpu_blocks_override=16)
    sizes["max_model_len"] = 32
    params = SamplingParams(temperature=0, max_tokens=4)
    [expected] = LLM(str(folder), **sizes).generate([[5, 6, 7]], params)
    cpu_kernels._warn_once.cache_clear()
    compile_library = cpu_kernels.compile_library

    def failing(source, defines):
        if Path(source).name not in ("kernels.c", "heads.c"):
            raise OSError("no room on the disk")
        return compile_library(source, defines)

    monkeypatch.setattr(cpu_kernels, "compile_library", failing)
    [found] = LLM(str(folder), **sizes).generate([[5, 6, 7]], params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids and "no room on the disk" in caplog.text
