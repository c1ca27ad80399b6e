"""The kernels' results have the same bits on every processor, but for bf16 that is multiplied in pairs.

digests.c computes with all kernels and prints digests. It is compiled here for vectors of each length that this machine
has, and with PyPI's ziglang, a C compiler for every machine, for Arm (run by qemu-user), Windows (run by Wine) and
WebAssembly (run by Node).
A change that means to change results records new digests: run this file's commands and read what they print.
"""

import platform
import subprocess
from itertools import product, starmap
from pathlib import Path

import pytest

from nanovllm.worker.cpu.compiler import COMPILE, FOLDER
from tests.emulators import ARM, build, runner
from tests.marks import by_night
from tests.processes import LIMIT_S

SOURCE = Path(__file__).with_name("digests.c")
FLAGS = [flag for flag in COMPILE if not flag.startswith("-march") and flag not in ("-fPIC", "-pthread")]
KINDS = {"f32": ["-DTYPE_f32"], "bf16": ["-DTYPE_bf16"], "f16": ["-DTYPE_f16"], "int8kv": ["-DTYPE_f32", "-DKV_INT8"]}
FLAGS += ["-DNO_PAIRS", "-DEVERYWHERE", "-DHEAD_DIM=64", "-DGROUP=3", "-DTASK_ROWS=16", "-I", str(FOLDER)]
NAMES = (
    "numbers",
    "small",
    "attention",
    "products",
    "rounding",
    "quantized",
    "delta",
    "logits",
    "sampling",
    "published",
)
DIGESTS = {
    "f32": "d26a86df670c6932 d045966d1634feda e4f0d31f5e64f4b9 3e8ede2371ffef4d "
    "c3665129e70b10fe 957477c94c52015e a99ea3aa08f763eb 010eca1735b958da f47fb97b9997d692 6b28ab978905a796",
    "bf16": "d26a86df670c6932 a7ee0687183faf08 99571fb742cfe6c9 665d439fa8193ad2 "
    "c3665129e70b10fe d2edebba3e7308ad e2d2af5e47f2dbce ad2d26b18a3d1b5c f47fb97b9997d692 3468dac57646b92e",
    "int8kv": "d26a86df670c6932 d045966d1634feda 8dd50c36d7955c85 3e8ede2371ffef4d "
    "c3665129e70b10fe 957477c94c52015e a99ea3aa08f763eb 010eca1735b958da f47fb97b9997d692 6b28ab978905a796",
    "f16": "d26a86df670c6932 c3071687ed3df7dd ea2462ecc16e9e61 11f9fdee7d351ca0 "
    "c3665129e70b10fe 360dbc538a085e62 0dd290a4c8ed268d 29b7682d17e11a34 f47fb97b9997d692 46f8bb3f02738487",
}
# x86-64-v2 has vectors of 128 bits and no fused multiply-add, v3 has 256 bits, a processor's own may have 512.
LEVELS = {"native": "", "x86-64-v2": "sse4_2", "x86-64-v3": "avx2"}
# A program without a C library, as a page's: what digests.c calls of one is here. Values of printf lie in memory.
RUN_WASM = """
import { readFile } from "node:fs/promises";
const env = {
  printf(format, values) {
    const view = new DataView(memory.buffer), bytes = new Uint8Array(memory.buffer, view.getUint32(values, true));
    const name = new TextDecoder().decode(bytes.subarray(0, bytes.indexOf(0)));
    console.log(name, view.getBigUint64(values + 8, true).toString(16).padStart(16, "0"));
  },
  aligned_alloc(alignment, bytes) {
    const at = Math.ceil(top / alignment) * alignment;
    top = at + bytes;
    memory.grow(Math.max(0, Math.ceil((top - memory.buffer.byteLength) / 65536)));
    return at;
  },
  log: Math.log,
};
const { instance } = await WebAssembly.instantiate(await readFile(process.argv[2]), { env });
const { memory, __heap_base, print_digests } = instance.exports;
let top = __heap_base.value;
print_digests();
"""
EXPORTS = ["-Wl,--export=print_digests", "-Wl,--export=__heap_base"]


def digests(run: list[str], program: Path) -> dict[str, str]:
    printed = subprocess.run([*run, str(program)], check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    return dict(line.split() for line in printed.splitlines())


def recorded(kind: str) -> dict[str, str]:
    return dict(zip(NAMES, DIGESTS[kind].split(), strict=True))


@pytest.mark.compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "kind", "optimized"),
    [
        ("native", "f32", "-O2"),  # -O3 takes 2.5 times as long
        *starmap(by_night, product(["native"], KINDS, ["-O3"])),
        *starmap(by_night, product(["x86-64-v2"], ["f32", "bf16"], ["-O2"])),
        *starmap(by_night, product(["x86-64-v3"], ["f32", "f16"], ["-O3"])),
    ],
)
def test_this_machine(tmp_path, level, kind, optimized):
    if level != "native" and platform.machine() != "x86_64":
        pytest.skip("a level of x86-64")
    if LEVELS[level] not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this processor has no {LEVELS[level]}")
    program = tmp_path / "digests"
    flags = [f"-march={level}", *FLAGS, *KINDS[kind], optimized]  # the last one counts
    subprocess.run(["cc", *flags, str(SOURCE), "-o", str(program), "-lm"], check=True)
    assert digests([], program) == recorded(kind)


@pytest.mark.ci
@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (ARM, "bf16"),
        by_night(ARM, "f32"),
        by_night("x86_64-windows-gnu", "bf16"),
        by_night("x86_64-windows-gnu", "f32"),
        ("wasm32-wasi", "bf16"),  # as the course's pages compute
    ],
)
def test_other_machines(tmp_path, target, kind):
    run = runner(target, tmp_path.parent)
    if "wasm" in target:
        script = tmp_path / "run.mjs"
        script.write_text(RUN_WASM, "utf-8")
        run = [*run, str(script)]
    # Optimized as on a page, or little: -O3 takes four times as long, and is tried on this machine.
    flags = [flag.replace("-O3", "-Os" if "wasm" in target else "-O1") for flag in (*FLAGS, *KINDS[kind])]
    flags += ["-Dmain=print_digests", *EXPORTS] if "wasm" in target else []
    build(target, SOURCE, tmp_path / "digests", flags)
    assert digests(run, tmp_path / "digests") == recorded(kind)
