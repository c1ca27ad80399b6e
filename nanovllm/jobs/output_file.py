"""The answers of a batch job: a file of records that only grows."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path

import xxhash

from nanovllm.config import MEDIA, EngineConfig
from nanovllm.features.lora.adapter import adapter_folder
from nanovllm.features.lora.lora_request import LoRARequest
from nanovllm.files.hub import resolve_tokenizer
from nanovllm.files.system import lock_file
from nanovllm.jobs.answer_lines import Answer
from nanovllm.serving.openai.json_lines import read_lines, to_json

MODEL_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".safetensors", ".gguf")
MODEL_OPTIONS = (
    *("dtype", "seed", "quantization", "kv_cache_dtype", "tower_quantization", "tokenizer", "load_format"),
    *("hf_overrides", "generation_config", "runner", "convert", "pooler_config", "max_model_len", "logits_processors"),
    *("scheduling_policy", *MEDIA),
)
# They size the KV pool, and max_model_len, where it is not given, is at most what the pool holds.
POOL_OPTIONS = (
    *("block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "state_cache_bytes"),
    *("gpu_memory_utilization", "tensor_parallel_size"),
)
RECORD_START = b'{"id": "batch_req_'
BINARY = getattr(os, "O_BINARY", 0)  # or Windows writes \r\n


def fingerprint(
    directory: Path,
    config: EngineConfig,
    adapters: Iterable[LoRARequest] = (),
    served_names: Iterable[str] = (),
    output_file: Path | None = None,
) -> str:
    """A digest of what records depend on beside their lines: options, and the files of the checkpoint and of adapters.

    A file is told by its name, size and time; the output file, which may lie beside them, does not count. directory: or
    a GGUF file. served_names: those that the job was given.
    """
    adapters = list(adapters)
    names = MODEL_OPTIONS if config.max_model_len is not None else MODEL_OPTIONS + POOL_OPTIONS
    options = {name: getattr(config, name) for name in names}
    told = [repr(options), repr([adapter.lora_name for adapter in adapters]), repr([*served_names])]
    places = []
    if config.tokenizer is not None:
        places.append(resolve_tokenizer(config.tokenizer))
    if config.generation_config not in ("auto", "vllm"):
        places.append(Path(config.generation_config))
    own = None if output_file is None else output_file.resolve()
    for place in [directory, *places, *map(adapter_folder, adapters)]:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if (path == place or path.suffix in MODEL_SUFFIXES) and path.resolve() != own:
                stat = path.stat()
                told.append(f"{path.relative_to(place)},{stat.st_size},{stat.st_mtime_ns}")
    return xxhash.xxh3_64_hexdigest("\n".join(told).encode("utf-8", "surrogateescape"))


class OutputFile:
    """Records of answers, one a line. Opened by one process at a time.

    A record's id holds the fingerprint of the model, a hash of the line that it answers, and that line's number. So a
    job that goes on knows which lines are done; whatever else the file may hold raises ValueError, and stays as it was.
    Only the torn end that a crash leaves behind is cut off.

    num_lines    of the input, without blank ones
    answered     ids of the records
    num_failed   of these, error records
    """

    def __init__(self, path: Path, input_file: Path, model: str) -> None:
        self.path = path
        self.model = model
        self.answered: set[str] = set()
        self.num_failed = 0
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | BINARY, 0o644)
        try:
            lock_file(self._fd, wait=False)
            self._size = self._read()
            self.num_lines = self._count(input_file)
            os.ftruncate(self._fd, self._size)
        except BaseException as error:
            os.close(self._fd)
            if isinstance(error, BlockingIOError):
                raise ValueError(f"{path} is being written by another run-batch") from error
            raise

    def record_id(self, line_number: int, raw: bytes) -> str:
        """raw: with the line's end, or, of a file's last line, perhaps without: lines may be added."""
        line = raw if raw.endswith(b"\n") else raw + b"\n"
        return f"batch_req_{self.model}_{xxhash.xxh3_64_hexdigest(line)}_{line_number}"

    def append(self, answers: dict[str, Answer]) -> None:
        """Write records, by their ids: all or none. OSError; ValueError if the file is not as it was left."""
        self._check()
        data = "".join(to_json(answer.record(record_id)) + "\n" for record_id, answer in answers.items()).encode()
        rest = data
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            os.ftruncate(self._fd, self._size)
            hint = f"{error.strerror}. The records in it are whole: make room and run the same command again"
            raise OSError(error.errno, hint, str(self.path)) from error
        self._size += len(data)
        self.answered.update(answers)
        self.num_failed += sum(answer.error is not None for answer in answers.values())

    def close(self) -> None:
        """Raises OSError, and ValueError if the file is not as it was left."""
        try:
            os.fsync(self._fd)
            self._check()
        finally:
            os.close(self._fd)

    def _check(self) -> None:
        """Raise ValueError if somebody has removed, cut or written to the file."""
        ours = os.fstat(self._fd)
        if self.path.exists() and os.path.samestat(ours, self.path.stat()) and ours.st_size == self._size:
            return
        raise ValueError(
            f"{self.path} was changed while the job ran; run the same command again to answer what is lost"
        )

    def _read(self) -> int:
        """Note which lines are answered. Returns the size of the whole records."""
        size = 0
        with open(os.dup(self._fd), "rb") as file:
            for number, line in enumerate(file, start=1):
                # Zeros: after a power cut a file may have room that nothing was written to.
                written = line.rstrip(b"\0\n")
                if line != written + b"\n" and RECORD_START.startswith(written[: len(RECORD_START)]):
                    break
                self._take(number, line)
                size += len(line)
        return size

    def _count(self, input_file: Path) -> int:
        num_lines = num_answered = 0
        for number, raw in read_lines(input_file):
            num_lines += 1
            num_answered += self.record_id(number, raw) in self.answered
        if num_answered < len(self.answered):
            raise ValueError(f"{self.path} holds answers to another input, or lines of {input_file} have changed")
        return num_lines

    def _take(self, number: int, line: bytes) -> None:
        where = f"line {number} of {self.path}"
        try:
            record = json.loads(line)
            found = re.fullmatch(r"batch_req_(\w{16})_(\w{16})_(\d+)", record["id"])
            is_error = record["error"] is not None
        except (ValueError, LookupError, TypeError, RecursionError):
            found = None
        if found is None:
            raise ValueError(f"{where} was not written by run-batch; choose another output file")
        if found[1] != self.model:
            options = "options (such as --dtype, --seed, --max-model-len, --served-model-name or --lora-modules)"
            raise ValueError(
                f"{self.path} holds answers to another model, or with other {options}: give what it was begun with to "
                "continue it, or choose another output file"
            )
        if record["id"] in self.answered:
            raise ValueError(f"{where} answers line {found[3]} once more; was it edited?")
        self.answered.add(record["id"])
        self.num_failed += is_error
