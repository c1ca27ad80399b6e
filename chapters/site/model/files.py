"""The files of a page's model: beside the pages if a site is built --with-model, about 100 MB.

Weights and layout are made of the engine's own model (image.py), and the program of its own C sources, by PyPI's
ziglang. The tokenizer is the checkpoint's, read in the page by @huggingface/tokenizers from npm.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from chapters.site.runtime import TOKENIZERS, cached, sha384_of

HERE = Path(__file__).parent
MODEL, NAME = "demo:Q4_1", "SmolLM2-135M-Instruct"
# A prompt is computed in chunks of at most 64 tokens: a recorded step of more rows takes more of a page's memory.
OPTIONS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 1, "max_num_batched_tokens": 64, "block_size": 16}
EXPORTED = ("replay", "look_up", "most_likely", "__heap_base")  # and the functions of the calls
TARGET = ["-target", "wasm32-wasi", "-msimd128"]
# As cpu/compiler.py has them; -Os: as fast as -O3 here, and an eighth of the size.
FLAGS = ["-Os", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-std=gnu11"]
# The kernels call no function of a C library, so none is linked: ziglang would compile one first, for 24 s.
LINK = ["-nostdlib", "-Wl,--no-entry", "-Wl,--export-table", "-Wl,--growable-table", "-Wl,-z,stack-size=1048576"]


class MissingCompiler(ValueError):
    """Nothing here makes a WebAssembly program."""


class OnPages(NamedTuple):
    """What pages say of the model that is beside them. num_bytes: that a reader's browser fetches."""

    name: str
    num_bytes: int
    num_layers: int
    num_heads: int


def write_model(folder: Path, model: str | None = None) -> OnPages:
    """Write a model's files, by default the demo model's, into the folder.

    Raises MissingCompiler, DemoModelError, or ValueError for a model that cannot be computed with there.
    """
    from chapters.site.model.image import Image  # torch
    from nanovllm import LLM
    from nanovllm.tools.demo_model import demo_model_path

    folder.mkdir(parents=True, exist_ok=True)
    llm = LLM(model or str(demo_model_path(MODEL)), **OPTIONS)
    image = Image(llm)
    compile_program(folder / "program.wasm", image.defines, image.layout["functions"])
    (folder / "weights.bin").write_bytes(image.file)
    (folder / "layout.json").write_text(json.dumps(image.layout), "utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        llm.get_tokenizer().save_pretrained(temporary)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(Path(temporary) / name, folder / name)
    shutil.copyfile(cached(TOKENIZERS), folder / TOKENIZERS.name)
    shutil.copyfile(HERE / "kernels.js", folder / "kernels.js")
    manifest = {path.name: entry(path) for path in sorted(folder.iterdir()) if path.name != "manifest.json"}
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), "utf-8")
    num_bytes, name = sum(file["size"] for file in manifest.values()), Path(model).stem if model else NAME
    return OnPages(name, num_bytes, len(image.layout["layers"]), image.layout["num_attention_heads"])


def entry(path: Path) -> dict[str, Any]:
    """Of the manifest, as runtime.py writes it."""
    data = path.read_bytes()
    return {"url": path.name, "size": len(data), "integrity": f"sha384-{sha384_of(data)}"}


def compile_program(target: Path, defines: list[str], functions: list[str]) -> None:
    """The engine's C kernels as WebAssembly. Raises MissingCompiler."""
    if not find_spec("ziglang"):
        raise MissingCompiler('--with-model takes a compiler for WebAssembly: pip install "nanovllm[compiler]"')
    package = HERE.parents[2] / "nanovllm"
    include = ["-I", str(package / "worker" / "cpu"), "-I", str(package / "features" / "quantization")]
    exports = [f"-Wl,--export={name}" for name in (*functions, *EXPORTED)]
    zig, made = [sys.executable, "-m", "ziglang", "cc", *TARGET, *FLAGS], target.with_suffix(".o")
    try:
        for command in (
            [*zig, *defines, *include, "-c", str(HERE / "program.c"), "-o", str(made)],
            [*zig, *LINK, *exports, str(made), "-o", str(target)],
        ):
            subprocess.run(command, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise MissingCompiler(f"ziglang could not compile the kernels: {error.stderr.strip()[:2000]}") from error
    finally:
        made.unlink(missing_ok=True)
