"""From a C source to a shared library: compiled at first use, then kept (chapter 10).

The system's C compiler takes a few seconds. The library is kept in the user's cache folder under a name that is a hash
of sources, flags and processor.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from nanovllm.files.hub import cache_folder

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
# -ffp-contract=off: a product and a sum are rounded one by one unless the source says otherwise, on every processor. No
# -ffast-math: what it allows would change results, but for errno and traps.
# -fno-tree-slp-vectorize: gcc 12 makes wrong code of short loops over _Float16 with it, and nothing gains from it.
COMPILE = ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
COMPILE += ["-fno-tree-slp-vectorize", "-fPIC", "-std=gnu11", "-pthread"]
if platform.machine() == "x86_64":
    COMPILE.append("-mprefer-vector-width=512")  # where there are vectors of 512 bits, gcc is shy of them


def compile_library(source: str, defines: list[str]) -> Path:
    """Path of a source file's shared library, made if need be. Two processes may make it at once: each renames files.

    A file with the library's hash stands beside it: loading a damaged library would end the process.
    """
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or ""]
    if not compiler[0]:
        raise OSError("there is no C compiler (cc): install gcc or clang")
    texts = [path.read_text() for path in SOURCES]
    key = [source, *texts, *compiler, *COMPILE, *defines, platform.machine(), _processor()]
    path = cache_folder() / "kernels" / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.so"
    hash_path = path.with_suffix(".sha256")
    if path.is_file() and hash_path.is_file() and hash_path.read_bytes() == _hash(path):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    source_path = str(Path(__file__).with_name(source))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target, made, hashed = (Path(folder, name) for name in ("kernels.o", "kernels.so", "kernels.sha256"))
        compile_command = [*compiler, *COMPILE, *defines, "-c", source_path, "-o", str(target)]
        link_command = [*compiler, "-shared", "-pthread", str(target), "-o", str(made), "-lm"]
        for command in (compile_command, link_command):
            subprocess.run(command, check=True, capture_output=True, text=True, errors="replace", timeout=120)
        if not made.is_file():
            raise OSError(f"the C compiler {compiler[0]} made no library")
        hashed.write_bytes(_hash(made))
        os.replace(made, path)
        os.replace(hashed, hash_path)
    return path


def pairs_pay() -> bool:
    """Whether the instruction that multiplies pairs of bf16 is faster than converting them.

    Intel's processors make a quarter as many of these instructions as fused multiply-adds: a prompt of 1,024 tokens
    takes 1.36 times as long with them.
    """
    with suppress(OSError):
        return "GenuineIntel" not in Path("/proc/cpuinfo").read_text()
    return True


def _hash(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


def _processor() -> str:
    """What -march=native depends on: a cache folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    except OSError:
        return platform.processor()
