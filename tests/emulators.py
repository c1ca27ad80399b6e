"""Programs of other systems: PyPI's ziglang compiles them, an emulator runs them."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import LIMIT_S

ZIG = [sys.executable, "-m", "ziglang", "cc"]
HAS_ZIG = importlib.util.find_spec("ziglang") is not None
# Before a first program is linked, ziglang compiles a C library: musl and Windows' take most of a minute of a core; of
# glibc it makes stubs, in five seconds. So programs link Debian's libraries, libc6-arm64-cross for Arm and
# mingw-w64-x86-64-dev for Windows; and ziglang's where these are not installed.
ARM_LIBRARIES, WINDOWS_LIBRARIES = Path("/usr/aarch64-linux-gnu"), Path("/usr/x86_64-w64-mingw32/lib")
ARM = "aarch64-linux-gnu" if (ARM_LIBRARIES / "lib" / "libc.so.6").exists() else "aarch64-linux-musl"
EMULATORS = {
    ARM: "qemu-aarch64",
    "wasm32-wasi": "node",
    "x86_64-linux-gnu": "env",  # none is needed
    "x86_64-windows-gnu": "wine64",
}
V3 = ["-mcpu=x86_64_v3"]
# One processor a target: where programs link ziglang's C library, that is compiled for each.
PROCESSORS = {
    ARM: ["-mcpu=neoverse_n1"],  # with products of bytes, which the first 64-bit Arms lack
    "wasm32-wasi": ["-msimd128"],  # as chapters/site/model/files.py compiles
    "x86_64-linux-gnu": V3,
    "x86_64-macos": V3,
    "x86_64-windows-gnu": V3,
}
LINK_WASM = ["-nostdlib", "-Wl,--no-entry", "-Wl,--import-symbols"]  # with what JavaScript has, and no C library


def needs_zig(test: Callable) -> Callable:
    """A test for CI that compiles with it."""
    return pytest.mark.ci(pytest.mark.skipif(not HAS_ZIG, reason="needs PyPI's ziglang")(test))


def compile_for(target: str) -> list[str]:
    return [*ZIG, "-target", target, *PROCESSORS.get(target, [])]


def build(target: str, source: Path, made: Path, flags: list[str], is_library: bool = False) -> None:
    """Compile and link, as compile_library() does."""
    object_file = f"{made}.o"
    commands = [[*compile_for(target), *flags, "-c", str(source), "-o", object_file]]
    if target == "x86_64-windows-gnu" and (WINDOWS_LIBRARIES / "crt2.o").exists():
        commands += link_for_windows(object_file, made, is_library)
    else:
        shared = ["-shared", "-pthread"] if is_library else []
        libraries = LINK_WASM if "wasm" in target else ["-O3", "-lm"]  # -O1 would have a C library of its own
        commands.append([*compile_for(target), *flags, *shared, object_file, "-o", str(made), *libraries])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
        assert done.returncode == 0, done.stderr


def link_for_windows(object_file: str, made: Path, is_library: bool) -> list[list[str]]:
    """With Debian's libraries, which know some names of ziglang's headers and of gcc's by others."""
    zig, names, other = ZIG[:-1], Path(f"{made}.def"), f"{made}.lib"
    names.write_text("LIBRARY ntdll.dll\nEXPORTS\n__chkstk\n", "utf-8")
    begins = "dllcrt2.o" if is_library else "crt2.o"
    found = [begins, *(f"lib{name}.a" for name in "mingw32 pthread mingwex ucrt msvcrt kernel32".split())]
    options = ["-lldmingw", "-stack:8388608", *["-dll"] * is_library]  # lld's default stack is an eighth of ziglang's
    same = ("__image_base__=__ImageBase", "___chkstk_ms=__chkstk", "clock_gettime64=clock_gettime")
    options += ["-subsystem:console", *(f"-alternatename:{pair}" for pair in same)]
    files = [object_file, *(str(WINDOWS_LIBRARIES / name) for name in found), other]
    return [
        [*zig, "dlltool", "-m", "i386:x86-64", "-d", str(names), "-l", other],
        [*zig, "lld-link", f"-out:{made}", *options, *files],
    ]


def runner(target: str, folder: Path) -> list[str]:
    """The command that runs a target's programs. Skips the test, which is one for CI, where it cannot be had.

    folder: for files of Wine, which makes them in six seconds, so tests share one.
    """
    name = EMULATORS[target]
    found = shutil.which(name) or shutil.which(name, path="/usr/lib/wine")
    runs = not target.startswith("x86_64") or "avx2" in Path("/proc/cpuinfo").read_text("utf-8")
    missing = [what for what, is_here in (("PyPI's ziglang", HAS_ZIG), (name, found), ("AVX2", runs)) if not is_here]
    if missing:
        pytest.skip(f"{target} needs {' and '.join(missing)}")
    if target == "aarch64-linux-gnu":
        return [found, "-L", str(ARM_LIBRARIES)]
    return ["env", f"WINEPREFIX={folder / 'wine'}", "WINEDEBUG=-all", found] if name == "wine64" else [found]
