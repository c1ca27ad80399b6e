"""The files that hold a checkpoint's tensors, safetensors or GGUF, opened but not read."""

import logging
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import shorten, typed
from nanovllm.files.config_json import read_json
from nanovllm.files.system import MAPPED_BYTES, installed_bytes

logger = logging.getLogger("nanovllm")

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
ROWS_AT_A_TIME = 4096  # are compared
PART_NUMBERS = 1 << 22  # of a large tensor that are read at a time, or as many as PART_ROWS have
PART_ROWS = 32  # which a part has a multiple of: whole blocks of any layout that a weight gets

# Not weights: written by old exporters and computed here from the config; in a GGUF file a part of the config.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight")
FLOAT_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8}
GROUP_FORMATS = ("Q8_0", "Q4_0", "Q4_1", "Q8_M")  # features/quantization/formats.py
UNPACKED = "F8"  # of a published checkpoint: weights of few bits that are computed as ordinary numbers
WEIGHT_DTYPES = (*FLOAT_BYTES, *GROUP_FORMATS, UNPACKED)


class WeightFiles:
    """The tensors of a checkpoint, opened and checked, each read when it is asked for.

    stored   {name: how the file holds it}, a dtype or a format of few bits
    shares   {name: the slices that this process wants of it}; all of it unless a rank says otherwise
    """

    def __init__(self, directory: Path, config: ModelConfig, whole: Mapping[str, Tensor], dummy: bool) -> None:
        """whole: what the model needs. Raises ValueError or FileNotFoundError for files that are not this model's."""
        self.directory = directory
        self.whole = whole
        self._is_dummy = dummy
        self.shares = {name: tuple(slice(0, n) for n in tensor.shape) for name, tensor in whole.items()}
        self._files = dict[str, Any].fromkeys(whole, DummyWeights(whole)) if dummy else model_files(directory, config)
        spare = {HEAD} if config.tie_word_embeddings else set()  # some files hold the tied tensor twice
        if config.published is not None and not dummy:
            from nanovllm.features.published.tensors import tensors_beside

            spare |= tensors_beside(self._files, whole, directory)
        complaint = f"the tensors in {directory} do not fit its configuration"
        self.stored = check_tensors(self._files, whole, model=config.architecture, complaint=complaint, spare=spare)
        self.head = EMBEDDINGS if config.tie_word_embeddings else HEAD
        self.are_published = config.published is not None and self.are_quantized

    @property
    def are_quantized(self) -> bool:
        return not {*GROUP_FORMATS, UNPACKED}.isdisjoint(self.stored.values())

    def read(self, name: str) -> Any:
        """A Tensor, still in the mapped file; of weights of few bits their QuantizedRows."""
        return self._files[name].get_slice(name)[self.shares[name]]

    def num_rows(self, name: str) -> int:
        """Rows of this process's share."""
        rows = self.shares[name][0]
        return rows.stop - rows.start

    def read_in_parts(self, name: str) -> Iterator[tuple[slice, Any]]:
        """(rows of the share, what read() gives of them), so that a large tensor is never in memory twice."""
        if self.whole[name].numel() <= PART_NUMBERS or self._is_dummy:
            yield slice(None), self.read(name)
            return
        rows = self.shares[name][0]
        columns = self.shares[name][1:]
        num_rows = self.num_rows(name)
        step = max(1, PART_NUMBERS // (PART_ROWS * self.whole[name][0].numel())) * PART_ROWS
        stored = self._files[name].get_slice(name)
        for first in range(0, num_rows, step):
            part = slice(first, min(first + step, num_rows))
            share = (slice(rows.start + part.start, rows.start + part.stop), *columns)
            yield part, stored[share]

    def weight_bytes(self, dtype: torch.dtype, quantization: str | None, on_gpu: bool = False) -> int:
        """What the weights take of memory, to a few percent, without table_bytes(). on_gpu: those of few bits, too."""
        numbers = {name: tensor.numel() for name, tensor in self.whole.items()}
        if on_gpu or (quantization is None and not self.are_quantized):
            return sum(numbers.values()) * dtype.itemsize
        from nanovllm.features.quantization.formats import BYTES_PER_NUMBER

        if HEAD in numbers and self.table_bytes(quantization):
            del numbers[EMBEDDINGS]
        plain = BYTES_PER_NUMBER.get(quantization, dtype.itemsize)
        per_number = dict.fromkeys(numbers, plain)
        for name in numbers:
            if self.stored[name] in GROUP_FORMATS:
                stored: Any = self._files[name].get_slice(name)
                per_number[name] = BYTES_PER_NUMBER[self.stored[name]] * stored.places_per_number
        if self.are_published and self.head in numbers and self.stored[self.head] in FLOAT_BYTES:
            per_number[self.head] = BYTES_PER_NUMBER["int8"]  # see quantize_weights()
        return int(sum(n * per_number[name] for name, n in numbers.items()))

    def table_bytes(self, quantization: str | None) -> int:
        """Bytes of an embedding table that stays in its file, mapped: the system takes it out of memory as it likes."""
        stays = quantization is not None or self.are_published
        if not stays or self.stored[EMBEDDINGS] not in FLOAT_BYTES:
            return 0
        return self.whole[EMBEDDINGS].numel() * FLOAT_BYTES[self.stored[EMBEDDINGS]]

    def check_memory(self, dtype: torch.dtype, quantization: str | None, device: torch.device, num_ranks: int) -> None:
        """Raise a ValueError for weights that this machine cannot hold."""
        # A rank on a GPU has one of its own; those on a CPU share its memory.
        on_gpu = device.type != "cpu"
        memory = free_gpu_bytes(device) * num_ranks if on_gpu else installed_bytes()
        needed = self.weight_bytes(dtype, quantization, on_gpu)
        if needed > memory:
            needs = f"need {needed / 1e9:.1f} GB of {memory / 1e9:.1f} GB of memory"
            raise ValueError(f"the weights in {self.directory} {needs}")


def free_gpu_bytes(device: torch.device | None = None) -> int:
    """Free memory of a GPU, with what PyTorch's allocator keeps of tensors that are gone. None: the current one."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def as_stored(directory: Path, config: ModelConfig) -> ModelConfig:
    """The configuration; where the files hold an output head that is not its embeddings, both are kept, with a warning.

    config.json then says that they are one matrix. transformers does the same.
    """
    files = model_files(directory, config) if config.tie_word_embeddings else {}
    if not {EMBEDDINGS, HEAD} <= files.keys() or _are_equal(files[EMBEDDINGS], files[HEAD]):
        return config
    logger.warning(
        "%s: config.json says that embeddings and output head are one matrix (tie_word_embeddings), and the files hold "
        "two that differ: both are used",
        directory,
    )
    return replace(config, tie_word_embeddings=False)


def _are_equal(embeddings: Any, head: Any) -> bool:
    """Number by number. Both: open files."""
    one, other = embeddings.get_slice(EMBEDDINGS), head.get_slice(HEAD)
    num_rows, width = one.get_shape()
    is_ordinary = {one.get_dtype(), other.get_dtype()} <= FLOAT_BYTES.keys()
    if other.get_shape() != [num_rows, width] or not is_ordinary:
        return False
    parts = [(slice(i, min(i + ROWS_AT_A_TIME, num_rows)), slice(0, width)) for i in range(0, num_rows, ROWS_AT_A_TIME)]
    return all(torch.equal(one[part].float(), other[part].float()) for part in parts)


def model_files(directory: Path, config: ModelConfig) -> dict[str, Any]:
    """{name of a tensor here: the open file that holds it}, of a checkpoint of this kind."""
    files = tensor_files(directory, config.published)
    if config.images is not None:
        from nanovllm.features.images.image_config import language_tensors

        language, _ = language_tensors(files)
        files = {name: OtherName(file, stored) for name, (stored, file) in language.items()}
    if config.expert_layers:
        from nanovllm.features.experts.tensors import expert_tensors

        files = expert_tensors(files, config)
    if config.hybrid is not None:
        files = config.hybrid.tensors(files, config, directory.is_file())
    if config.pooling is not None:
        files = config.pooling.tensors(files)
    if config.tie_word_embeddings and HEAD in files and EMBEDDINGS not in files:
        files[EMBEDDINGS] = OtherName(files[HEAD], HEAD)  # one matrix, written under its other name
    return files


@dataclass(frozen=True)
class OtherName:
    """Looks like an open file: a tensor that `file` holds under `name`."""

    file: Any
    name: str

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(self.name)


def tensor_files(directory: Path, published: Any = None) -> dict[str, Any]:
    """{tensor name: the open file that holds it}. published: how others have quantized them, if they have."""
    if published is not None:
        from nanovllm.features.published.tensors import published_tensors

        return published_tensors(tensor_files(directory), published, directory)
    if directory.is_file():
        from nanovllm.files.gguf_weights import GGUFWeights

        weights = GGUFWeights(directory)
        return dict.fromkeys(weights.names, weights)
    index_path = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"  # some directories hold the same weights once more, differently named
    if index_path.is_file() and single.is_file():
        logger.warning("%s: the weights are those of %s, not those of the index beside it", directory, single.name)
    elif index_path.is_file():
        return _indexed_files(index_path)
    paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        others = ", ".join(sorted(p.name for p in directory.iterdir())) or "nothing"
        raise FileNotFoundError(f"{directory} has no *.safetensors file and no GGUF file, only {others}")
    files, places = dict[str, Any](), dict[str, str]()
    for path in paths:
        file = SafetensorsFile(path)
        for name in file.names():
            if name in files:
                twice = f"{shorten(name)} is in {places[name]} and in {path.name}"
                raise ValueError(
                    f"{directory}: the tensor {twice}, and no model.safetensors.index.json says which is the model's; "
                    "move the other file to another folder, or download the index"
                )
            files[name], places[name] = file, path.name
    return files


def _indexed_files(index_path: Path) -> dict[str, Any]:
    """tensor_files() of shards. The index says which file holds a tensor; what else a file has does not count."""
    directory = index_path.parent
    weight_map = typed(read_json(index_path), "weight_map", {}, index_path)
    if not weight_map:
        raise ValueError(f"{index_path} has no weight_map, so it is no index of tensors; download it again")
    names = sorted(set(map(str, weight_map.values())))
    if outside := [name for name in names if name != Path(name).name or not name.endswith(".safetensors")]:
        raise ValueError(
            f"{index_path}: weight_map may only name safetensors files beside it, not {shorten(outside[0])}"
        )
    if missing := [name for name in names if not (directory / name).is_file()]:
        raise FileNotFoundError(f"{index_path} names files that are not there: {shorten(missing)}")
    shards = {name: SafetensorsFile(directory / name) for name in names}
    held = {name: set(shard.names()) for name, shard in shards.items()}
    for tensor, name in weight_map.items():
        if tensor not in held[name]:
            others = [other for other in names if tensor in held[other]]
            where = f"which is in {others[0]}" if others else "which is in none of them"
            raise ValueError(
                f"{index_path} does not belong to the files beside it: it names {name} for the tensor "
                f"{shorten(tensor)}, {where}; download all of them again"
            )
    if spare := [f"{x} in {name}" for name in names for x in sorted(held[name]) if weight_map.get(x) != name]:
        more = f", and {len(spare) - 3} more" if len(spare) > 3 else ""
        logger.warning("%s: not read, the index assigns other files: %s%s", directory, ", ".join(spare[:3]), more)
    return {tensor: shards[name] for tensor, name in weight_map.items()}


def dtype_of_weights(directory: Path) -> str:
    """That of the largest tensor of ordinary numbers: "bfloat16", "float16" or "float32"."""
    known = {"BF16": "bfloat16", "F16": "float16"}
    slices = [file.get_slice(name) for name, file in tensor_files(directory).items()]
    floats = [each for each in slices if each.get_dtype() in FLOAT_BYTES]
    largest = max(floats, key=lambda each: prod(each.get_shape()), default=None)
    return "float32" if largest is None else known.get(largest.get_dtype(), "float32")


def check_tensors(
    files: Mapping[str, Any], whole: Mapping[str, Tensor], *, model: str, complaint: str, spare: Collection[str] = ()
) -> dict[str, str]:
    """{name: how the file holds it}. Raises one ValueError that lists missing, extra and wrongly shaped tensors.

    whole: what the model needs, of the whole model. model: what it is called. complaint: the error's first line. spare:
    names that may be there as well.
    """
    extra = [n for n in files if n not in whole and n not in spare and not n.endswith(IGNORED_SUFFIXES)]
    problems = [f"missing: {name}" for name in whole if name not in files]
    problems += [f"not part of a {model}: {name}" for name in extra]
    dtypes = {name: files[name].get_slice(name).get_dtype() for name in whole.keys() & files.keys()}
    for name, stored in dtypes.items():
        found, expected = files[name].get_slice(name).get_shape(), list(whole[name].shape)
        if found != expected:
            problems.append(f"wrong shape: {name} is {found}, the configuration implies {expected}")
        if stored not in WEIGHT_DTYPES:
            reason = f"wrong dtype: {name} is {stored}, only {', '.join(FLOAT_BYTES)} are read"
            is_code = stored.startswith("F8_") or stored in ("I8", "U8")
            problems.append(reason + "; config.json does not say how it was quantized" * is_code)
    if problems:
        shown = problems[:20]
        if len(problems) > 20:
            shown.append(f"and {len(problems) - 20} more")
        raise ValueError("\n  ".join([f"{complaint}:", *shown]))
    return dtypes


class DummyWeights:
    """Looks like an open file. A tensor's numbers depend on its name alone: ranks agree on them."""

    def __init__(self, shapes: Mapping[str, Tensor]) -> None:
        self._shapes = shapes

    def get_slice(self, name: str) -> "DummyTensor":
        return DummyTensor(name, list(self._shapes[name].shape))


class DummyTensor:
    def __init__(self, name: str, shape: list[int]) -> None:
        self._name, self._shape = name, shape

    def get_shape(self) -> list[int]:
        return self._shape

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, share: Any) -> Tensor:
        generator = torch.Generator(device="cpu").manual_seed(zlib.crc32(self._name.encode()))
        return torch.randn(self._shape, generator=generator, dtype=torch.float32, device="cpu").mul_(0.02)[share]


class SafetensorsFile:
    """An open file. It is memory-mapped, and mapped anew after every MAPPED_BYTES: what was read leaves memory."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is damaged."""
        self.path = path
        self._version = version_of(path)
        self._open()

    def _open(self) -> None:
        self._file = open_file(self.path)
        self._num_read = 0

    def names(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> "SafetensorsSlice":
        return SafetensorsSlice(self, name)

    def read(self, name: str, share: tuple[slice, ...]) -> Tensor:
        """Part of a tensor, in the mapped file. Raises ValueError if the file is no longer the one that was opened."""
        if self._num_read > MAPPED_BYTES:
            if version_of(self.path) != self._version:
                raise ValueError(f"{self.path} has changed while it was read; start again")
            self._open()
        with torch.device("cpu"):  # the library asks PyTorch for its default device
            tensor = self._file.get_slice(name)[share]
        self._num_read += tensor.nbytes
        return tensor

    def stored(self, name: str) -> Any:
        """The tensor's entry in the file: its shape and its dtype."""
        return self._file.get_slice(name)


@dataclass(frozen=True)
class SafetensorsSlice:
    """A tensor that is read when a share of it is asked for."""

    file: SafetensorsFile
    name: str

    def get_shape(self) -> list[int]:
        return self.file.stored(self.name).get_shape()

    def get_dtype(self) -> str:
        return self.file.stored(self.name).get_dtype()

    def __getitem__(self, share: tuple[slice, ...]) -> Tensor:
        return self.file.read(self.name, share)


def version_of(path: Path) -> tuple[int, int, int]:
    """Another one after the file has been replaced or written to."""
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def open_file(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); download it again") from error
