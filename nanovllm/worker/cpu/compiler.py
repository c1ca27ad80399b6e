"""From a C source to a shared library: compiled at first use, then kept (chapter 10).

The system's C compiler takes a few seconds. Where there is none, PyPI's package ziglang is one: clang, with all that it
needs, for every system. The library is kept in the user's cache folder under a name that is a hash of sources, flags,
compiler and processor.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from nanovllm.files.hub import cache_folder

FOLDER = Path(__file__).parent
# -ffp-contract=off: a product and a sum are rounded one by one unless the source says otherwise, on every processor. No
# -ffast-math: what it allows would change results, but for errno and traps.
# -fno-tree-slp-vectorize: gcc 12 makes wrong code of short loops over _Float16 with it, and nothing gains from it.
FLAGS = ["-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fno-tree-slp-vectorize"]
FLAGS += ["-fPIC", "-std=gnu11", "-pthread"]
if platform.machine() in ("x86_64", "AMD64"):  # the latter on Windows
    FLAGS.append("-mprefer-vector-width=512")  # where there are vectors of 512 bits, gcc is shy of them
IS_ARM = platform.machine() in ("aarch64", "arm64", "ARM64")  # there -march=native is an error to some compilers
COMPILE = ["-mcpu=native" if IS_ARM else "-march=native", *FLAGS]
SECONDS_A_DAY = 24 * 60 * 60
SUFFIX = ".dll" if sys.platform == "win32" else ".so"


def compile_library(source: str | Path, defines: list[str]) -> Path:
    """Path of a source file's shared library, made if need be. Two processes may make it at once: each renames files.

    source: a file of this folder, or the path of a wing's, which may include this folder's headers and its own. A file
    with the library's hash stands beside it: loading a damaged library would end the process.
    """
    compiler = find_compiler()
    source_path = FOLDER / source
    texts = [
        path.read_text("utf-8") for folder in (FOLDER, source_path.parent) for path in sorted(folder.glob("*.[ch]"))
    ]
    key = [
        source_path.name,
        *texts,
        *compiler,
        _version(compiler),
        *COMPILE,
        *defines,
        platform.machine(),
        _processor(),
    ]
    path = cache_folder() / "kernels" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}{SUFFIX}"
    hash_path = path.with_suffix(".sha256")
    if path.is_file() and hash_path.is_file() and hash_path.read_bytes() == _hash(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path.parent)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target, made, hashed = (Path(folder, name) for name in ("kernels.o", f"kernels{SUFFIX}", "kernels.sha256"))
        compile_command = [*compiler, *COMPILE, *defines, "-I", str(FOLDER), "-c", str(source_path), "-o", str(target)]
        # Linking, ziglang compiles a part of its own once: without -O3 a slower one, in three times the time.
        link_command = [*compiler, "-O3", "-shared", "-pthread", str(target), "-o", str(made), "-lm"]
        for command in (compile_command, link_command):
            subprocess.run(
                command, check=True, capture_output=True, text=True, errors="replace", timeout=600,
                env=os.environ | {"LC_ALL": "C"},  # messages in English, as ours are
            )  # fmt: skip
        if not made.is_file():
            raise OSError(f"the C compiler {compiler[0]} made no library")
        hashed.write_bytes(_hash(made))
        try:
            os.replace(made, path)
            os.replace(hashed, hash_path)
        except PermissionError:
            if sys.platform != "win32":  # there, another process has made and loaded the same one meanwhile
                raise
    return path


def _remove_leftovers(folder: Path) -> None:
    """The temporary folders of processes that were killed while they compiled. A compiler has 10 minutes."""
    for leftover in folder.glob("tmp*"):
        with suppress(OSError):  # another process removes it, too
            if time.time() - leftover.stat().st_mtime > SECONDS_A_DAY:
                shutil.rmtree(leftover)


def find_compiler() -> list[str]:
    """The command: CC's, the system's cc, or ziglang's clang. Raises OSError for none, or half of one in CC."""
    named = os.environ.get("CC", "")
    try:
        command = shlex.split(named, posix=sys.platform != "win32")  # there \ is no escape
    except ValueError as error:
        raise OSError(f"CC={named}: {error}") from error
    if command:
        return command
    found = shutil.which("cc")
    # A Mac without Apple's developer tools has a cc, too: it asks whether to install them.
    if found and (sys.platform != "darwin" or found != "/usr/bin/cc" or _has_developer_tools()):
        return [found]
    if find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise OSError('there is no C compiler (cc): install gcc or clang, or run  pip install "nanovllm[compiler]"')


def _has_developer_tools() -> bool:
    return subprocess.run(["xcode-select", "-p"], capture_output=True).returncode == 0


def _version(compiler: list[str]) -> str:
    """What tells a compiler from an older one at the same place."""
    with suppress(OSError, PackageNotFoundError):
        if "ziglang" in compiler:
            return version("ziglang")
        return str(os.stat(shutil.which(compiler[0]) or "").st_mtime_ns)
    return ""


def pairs_pay() -> bool:
    """Whether the instruction that multiplies pairs of bf16 is faster than converting them.

    Intel's processors make a quarter as many of these instructions as fused multiply-adds: a prompt of 1,024 tokens
    takes 1.36 times as long with them.
    """
    with suppress(OSError):
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text("utf-8")
    return True


def _hash(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor()
