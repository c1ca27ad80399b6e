"""A batch job's input and model: what must be the same when it is continued, and stay the same while it runs."""

import json
import os
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from nanovllm.config import EngineConfig
from nanovllm.features.lora.adapter import adapter_folder
from nanovllm.features.lora.request import LoRARequest
from nanovllm.files.gguf_file import GGUFFile
from nanovllm.serving.openai.json_lines import read_lines

WEIGHTS = (".safetensors", ".gguf")
MODEL_SUFFIXES = (".json", ".jinja", ".model", ".txt", *WEIGHTS)
TENSOR_SAMPLES, TENSOR_SAMPLE_BYTES = 16, 4_096  # a tensor of up to 64 KiB is read whole: norms and biases are


@dataclass(frozen=True)
class Job:
    """The input and the model as they are when the job begins.

    num_lines     that are not blank
    model_hash    of the checkpoint, and of the options that change what a model answers
    line_hashes   by line number; 0 for a blank one
    input_stat    device, inode, size and time of the input
    """

    num_lines: int
    last_line: int
    input_hash: str
    model_hash: str
    line_hashes: array = field(default_factory=lambda: array("Q"), repr=False)
    input_stat: tuple[int, ...] = field(default=(), compare=False)

    @property
    def id_prefix(self) -> str:
        return f"batch_req_{self.input_hash}_{self.model_hash}_"

    @classmethod
    def of(cls, input_file: Path, directory: Path, config: EngineConfig, adapters: Iterable[LoRARequest] = ()) -> "Job":
        stat, hashes = _stat(input_file), _hash_lines(input_file)
        num_lines, last_line = len(hashes) - hashes.count(0), len(hashes) - 1
        model_hash = hash_model(directory, config, adapters)
        return cls(num_lines, last_line, xxhash.xxh3_64_hexdigest(hashes), model_hash, hashes, stat)

    def lines(self, input_file: Path) -> Iterator[tuple[int, bytes]]:
        """Read the input once more. ValueError for a line that has changed: its answer would answer something else."""
        for number, raw in read_lines(input_file):
            if number > self.last_line:
                return
            if self.line_hashes[number] != xxhash.xxh3_64_intdigest(raw):
                raise ValueError(f"line {number} of {input_file} has changed since the job began")
            yield number, raw

    def check_input(self, input_file: Path) -> None:
        """Raise ValueError if the input is not what it was: lines may be lost or have come, and are not answered."""
        try:
            same = _stat(input_file) == self.input_stat or _hash_lines(input_file) == self.line_hashes
        except OSError:
            same = False
        if not same:
            raise ValueError(f"{input_file} has changed since the job began; the records answer what it held then")

    def check_model(self, directory: Path, config: EngineConfig, adapters: Iterable[LoRARequest] = ()) -> None:
        """Raise ValueError if the checkpoint is not what it was: the records' ids would name another one."""
        if hash_model(directory, config, adapters) != self.model_hash:
            raise ValueError(f"the checkpoint {directory}, or an adapter, has changed since the job began")


def hash_model(directory: Path, config: EngineConfig, adapters: Iterable[LoRARequest] = ()) -> str:
    """Of name, size and time of each file of a checkpoint, of what the small ones hold and of parts of every tensor.

    And of the options that change answers; of other places that they name, the small files.
    """
    names = ("tokenizer", "load_format", "hf_overrides", "generation_config")
    changed = {name: getattr(config, name) for name in names if getattr(config, name) != getattr(EngineConfig, name)}
    digest = xxhash.xxh3_64(f"{config.dtype},{config.seed},{config.quantization}{changed or ''}".encode())
    _hash_files(digest, directory)
    for place in (config.tokenizer, config.generation_config):
        if place is not None and Path(place).is_dir():
            _hash_files(digest, Path(place), with_weights=False)
    for adapter in adapters:
        digest.update(f"{adapter.lora_name!r};".encode("utf-8", "surrogatepass"))
        _hash_files(digest, adapter_folder(adapter))
    return digest.hexdigest()


def _hash_files(digest: Any, directory: Path, with_weights: bool = True) -> None:
    """Into the digest. directory: or a GGUF file."""
    paths = [directory] if directory.is_file() else sorted(directory.rglob("*"))
    for path in (path for path in paths if path.suffix in MODEL_SUFFIXES and path.is_file()):
        if path.suffix in WEIGHTS and not with_weights:
            continue
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            digest.update(b"%s,%d,%d;" % (os.fsencode(path.relative_to(directory)), stat.st_size, stat.st_mtime_ns))
            if path.suffix not in WEIGHTS:
                digest.update(file.read())
                continue
            for start, end in _parts(path, file, stat.st_size):
                step = max((end - start) // TENSOR_SAMPLES, TENSOR_SAMPLE_BYTES)
                for offset in (*range(start, end, step), max(start, end - TENSOR_SAMPLE_BYTES)):
                    digest.update(_read(file, min(TENSOR_SAMPLE_BYTES, end - offset), offset))


def _read(file: BinaryIO, num_bytes: int, offset: int) -> bytes:
    file.seek(offset)
    return file.read(num_bytes)


def _parts(path: Path, file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Where a file of weights has its header and its tensors; the file as one part if its header can't be read."""
    begin = 8 + int.from_bytes(_read(file, 8, 0), "little")
    try:
        if path.suffix == ".gguf":
            tensors = sorted((t.start, t.start + t.num_bytes) for t in GGUFFile(path).tensors.values())
            return [(0, min(tensors)[0]), *tensors]
        header = json.loads(_read(file, min(begin, size) - 8, 8))
        offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
        tensors = [(begin + start, begin + end) for start, end in sorted(offsets)]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OSError):
        return [(0, size)]  # loading it will fail, and say why
    return [(0, begin), *((start, end) for start, end in tensors if 0 < start < end <= size)]


def _stat(path: Path) -> tuple[int, ...]:
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _hash_lines(path: Path) -> array:
    hashes = array("Q", [0])
    for number, raw in read_lines(path):
        hashes.extend([0] * (number - len(hashes)))
        hashes.append(xxhash.xxh3_64_intdigest(raw))
    return hashes
