"""What K/V depends on beside its tokens, as one fingerprint: under an equal one, what was kept is what is computed.

Where the same bits hold (chapter 10), that is meant bit for bit: so the code that computes is part of it, and where
bits depend on the processor, the processor is, too.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from hashlib import blake2b
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import xxhash

import nanovllm
from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig

logger = logging.getLogger("nanovllm")

PACKAGE = Path(nanovllm.__file__).parent
COMPUTES = ("worker", "features", "files")  # folders whose code may change a bit of a weight, or of K/V
NOT_COMPUTED = ("end_tokens", "generation", "is_quantized")  # of a ModelConfig


def fingerprint(
    config: EngineConfig, model: ModelConfig, runner: Any, directory: Path, digest_of: Callable[[Path], str]
) -> str:
    """32 hexadecimal digits. runner: prepared. digest_of: a file's content."""
    dummies = config.load_format == "dummy"
    batch_invariant = runner.batch_invariant
    depends_on = {
        "weights": "dummy" if dummies else {path.name: digest_of(path) for path in weight_paths(directory)},
        "model": {name: value for name, value in asdict(model).items() if name not in NOT_COMPUTED},
        "numbers": (config.dtype, config.round_to, config.tower_quantization, config.kv_cache_dtype, runner.block_size),
        "how": (config.optimizations, config.tensor_parallel_size, torch.cuda.is_available(), batch_invariant),
        "layout": runner.kv_layout,
        "processor": "any" if batch_invariant == "on every processor" else processor(),
        "code": (torch.__version__, metadata.version("gguf") if directory.is_file() else None, code_digest()),
        "images": None if model.images is None else processor_digest(directory, config.mm_processor_kwargs),
    }
    text = json.dumps(depends_on, sort_keys=True, default=lambda value: sorted(value, key=repr))
    return blake2b(text.encode(), digest_size=16).hexdigest()


def processor() -> tuple[str, dict[str, Any]]:
    """What PyTorch's libraries choose their code by: the GPU where there is one."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), {}
    more = getattr(torch.cpu, "get_capabilities", dict)  # not in every version that we support
    return torch.backends.cpu.get_cpu_capability(), dict(more())


def processor_digest(directory: Path, options: dict[str, Any] | None) -> str:
    """A digest of what decides, beside its pixels, what a tower makes of an image."""
    import transformers

    from nanovllm.features.images.options import PROCESSOR_FILES

    files = [path.read_text("utf-8") for name in PROCESSOR_FILES if (path := directory / name).is_file()]
    versions = [transformers.__version__, metadata.version("pillow")] if find_spec("PIL") else []
    return xxhash.xxh3_128(json.dumps([files, versions, options], default=str).encode()).hexdigest()


def code_digest() -> str:
    """A digest of the package's own sources that compute."""
    digest = xxhash.xxh3_128()
    for folder in COMPUTES:
        for path in sorted(path for path in (PACKAGE / folder).rglob("*") if path.suffix in (".py", ".c", ".h")):
            digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """The digest of a file's content."""
    logger.info("prefix cache: reading %s once, to know its content again", path)
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while data := file.read(1 << 22):
            digest.update(data)
    return digest.hexdigest()


def weight_paths(directory: Path) -> list[Path]:
    """A checkpoint's files of weights. directory: or a GGUF file."""
    return [directory] if directory.is_file() else sorted(directory.glob("*.safetensors"))


def stamp_of(path: Path) -> str:
    """What changes when a file is written. Its time of writing can be set, as `cp -p` does; the time of that cannot."""
    stat = path.stat()
    return f"{stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
