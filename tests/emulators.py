"""Programs of other systems: PyPI's ziglang compiles them, an emulator runs them."""

import importlib.util
import shutil
import sys
from pathlib import Path

import pytest

ZIG = [sys.executable, "-m", "ziglang", "cc"]
needs_zig = pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs PyPI's ziglang")
EMULATORS = {
    "aarch64-linux-musl": "qemu-aarch64",
    "wasm32-wasi": "node",
    "x86_64-linux-musl": "env",  # none is needed
    "x86_64-windows-gnu": "wine64",
}
V3 = ["-mcpu=x86_64_v3"]
# One processor a target: for each, ziglang compiles a C library first, which for Windows takes a minute.
PROCESSORS = {
    "aarch64-linux-musl": ["-mcpu=neoverse_n1"],  # with products of bytes, which the first 64-bit Arms lack
    "wasm32-wasi": ["-msimd128"],
    "x86_64-linux-musl": V3,
    "x86_64-macos": V3,
    "x86_64-windows-gnu": V3,
}


def compile_for(target: str) -> list[str]:
    return [*ZIG, "-target", target, *PROCESSORS.get(target, [])]


def runner(target: str, folder: Path) -> list[str]:
    """The command that runs a target's programs; `folder` is for its files. Skips the test where it cannot be had."""
    name = EMULATORS[target]
    found = shutil.which(name) or shutil.which(name, path="/usr/lib/wine")
    runs = not target.startswith("x86_64") or "avx2" in Path("/proc/cpuinfo").read_text("utf-8")
    if importlib.util.find_spec("ziglang") is None or found is None or not runs:
        pytest.skip("needs PyPI's ziglang, AVX2, Debian's qemu-user (Arm) and wine64 (Windows), Node (WebAssembly)")
    return ["env", f"WINEPREFIX={folder / 'wine'}", "WINEDEBUG=-all", found] if name == "wine64" else [found]
