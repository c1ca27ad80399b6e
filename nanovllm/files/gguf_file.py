"""A GGUF file, llama.cpp's format: metadata, a table of tensors and the tensors, all in one file (chapter 12).

The format: github.com/ggml-org/ggml, docs/gguf.md. The header is parsed here, because the `gguf` package's GGUFReader
takes seconds for a vocabulary of 50,000 words; the package knows the types of tensors. No torch.
"""

import mmap
import re
import struct
import sys
from dataclasses import dataclass
from math import log, prod
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from nanovllm.checks.values import check_choice, check_number, shorten
from nanovllm.files.system import MAPPED_BYTES

# general.architecture -> model_type of config.json
HYBRID = {"qwen35": "qwen3_5_text", "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next"}
MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"} | HYBRID
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
POOLING_TYPES = {1: "MEAN", 2: "CLS", 3: "LAST", 4: "RANK"}  # of llama.cpp; 0 is what it takes where a file has none
REQUIRED = [name for name in SIZES if name != "feed_forward_length"]  # a mixture of experts has no MLP of that size
NOT_SUPPORTED = "attention.sliding_window expert_count attention.scale logit_scale embedding_scale residual_scale"
NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
LAYER_NAMES |= {f"attn_{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
LAYER_NAMES |= {f"attn_{x}": f"self_attn.{x[0]}_proj" for x in ("q", "k", "v", "output")}
LAYER_NAMES |= {f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")}
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
MAX_HEADER_BYTES = 1 << 26  # the largest that are known have a third of it: a vocabulary of 262,144 words, its merges
LEAST_BYTES = {"strings": 8, "keys": 13, "tensors": 24}  # that one of them takes in a header
STRING, ARRAY = 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as in struct


@dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies in the file. files/gguf_weights.py reads it."""

    type: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    num_bytes: int
    num_heads: int = 0  # whose rows must be put back in order: of Llama's q and k


class GGUFFile:
    """metadata: {key: value}; tensors: {name in an ordinary checkpoint: GGUFTensor}, not read yet."""

    def __init__(self, path: Path) -> None:
        """Raises ValueError for a file that is damaged."""
        self.path = path
        self.position = 4
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} does not begin with GGUF, so it is not a GGUF file")
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # writable, as torch wants it
        self._num_read = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is damaged, or not whole: {error} in its header; download it again") from error

    def will_read(self, num_bytes: int) -> None:
        """What was read before leaves memory after every MAPPED_BYTES; whoever still needs it finds it in the file."""
        self._num_read += num_bytes
        if self._num_read > MAPPED_BYTES and sys.platform != "win32":
            self.data.madvise(mmap.MADV_DONTNEED)
            self._num_read = num_bytes

    @property
    def is_quantized(self) -> bool:
        return any(tensor.type.name not in FLOATS for tensor in self.tensors.values())

    def config(self) -> dict[str, Any]:
        """What config.json says of an ordinary checkpoint. Raises ValueError for what would be computed wrongly."""
        kind: Any = self.metadata.get("general.architecture")
        check_choice(f"{self.path}: general.architecture", kind, MODEL_TYPES)
        given = {k.removeprefix(f"{kind}."): v for k, v in self.metadata.items() if k.startswith(f"{kind}.")}
        if missing := [f"{kind}.{name}" for name in REQUIRED if name not in given]:
            raise ValueError(f"{self.path} lacks {', '.join(missing)}")
        num_heads = given["attention.head_count"]
        head_dim = given.get("attention.key_length", given.get("rope.dimension_count"))
        supported = {"attention.value_length": head_dim, "rope.dimension_count": head_dim}
        not_supported = dict.fromkeys(NOT_SUPPORTED.split())
        if kind in HYBRID:
            del supported["rope.dimension_count"], not_supported["expert_count"]
        for name, value in (supported | not_supported).items():
            if (found := given.get(name)) and found != value:
                raise ValueError(f"{self.path}: {kind}.{name} is {shorten(found)}, which is not supported")
        pooling_type = given.get("pooling_type", 0)
        if not isinstance(pooling_type, int):
            raise ValueError(f"{self.path}: {kind}.pooling_type is {shorten(pooling_type)}, which is not a number")
        embeddings = self.tensors.get("model.embed_tokens.weight")
        config = {ours: given[theirs] for theirs, ours in SIZES.items() if theirs in given} | {
            "model_type": MODEL_TYPES[kind],
            "num_key_value_heads": given.get("attention.head_count_kv", num_heads),
            "vocab_size": embeddings and embeddings.shape[0],
            "dtype": self._dtype(),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.tensors,
            "mlp_bias": "model.layers.0.mlp.down_proj.bias" in self.tensors,
            "rope_parameters": self._rope(given, kind),
            "is_causal": given.get("attention.causal"),
            "gguf_pooling_type": POOLING_TYPES.get(pooling_type, pooling_type) or None,
        }
        if head_dim or isinstance(num_heads, int):
            config["head_dim"] = head_dim or given["embedding_length"] // max(num_heads, 1)
        if kind in HYBRID:
            from nanovllm.features.hybrid.gguf_names import hybrid_fields

            config |= hybrid_fields(given)
        return {name: value for name, value in config.items() if value is not None}

    def _dtype(self) -> str:
        """What an engine computes in. Not float16: a file says by it how weights are stored, and llama.cpp keeps hidden
        states, which may be beyond float16's range, in float32."""
        is_plain = all(tensor.type.name == "F32" for tensor in self.tensors.values() if len(tensor.shape) > 1)
        return "float32" if is_plain else "bfloat16"

    def _rope(self, given: dict[str, Any], kind: str) -> dict[str, Any]:
        """rope_parameters. given: metadata without the architecture's prefix. As llama.cpp reads rope.scaling."""
        scaling = {k.removeprefix("rope.scaling."): v for k, v in given.items() if k.startswith("rope.scaling.")}
        rope = {"rope_theta": given.get("rope.freq_base", 10000.0)}
        scaling_type = scaling.get("type", "linear")
        check_choice(f"{self.path}: {kind}.rope.scaling.type", scaling_type, ("none", "linear", "yarn"))
        factor = scaling.get("factor", given.get("rope.scale_linear"))
        if scaling_type != "yarn" and (attention := scaling.get("attn_factor", 1.0)) != 1.0:
            raise ValueError(
                f"{self.path}: {kind}.rope.scaling.attn_factor is {shorten(attention)}, which is supported of yarn only"
            )
        if scaling_type == "none" or (scaling_type == "linear" and not factor):
            return rope
        if scaling_type == "linear":
            return rope | {"rope_type": "linear", "factor": factor}
        factor = check_number(f"{self.path}: {kind}.rope.scaling.factor", factor, Real, 1.0)
        for name, usual in {"yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}.items():
            if scaling.get(name, usual) != usual:
                raise ValueError(f"{self.path}: {kind}.rope.scaling.{name} is {scaling[name]}, which is not supported")
        length = scaling.get("original_context_length", given["context_length"])
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
        rope |= {x: scaling[f"yarn_{x}"] for x in ("beta_fast", "beta_slow") if f"yarn_{x}" in scaling}
        attention = scaling.get("attn_factor", 1.0) * scaling.get("yarn_attn_factor", 1.0)
        return rope | {"attention_factor": attention * (1.0 + 0.1 * log(factor))}

    def rope_divisors(self, head_dim: int) -> dict[str, list[float]]:
        """Llama 3's rotary scaling as these files have it: what each frequency is divided by."""
        tensor = self.tensors.get("rope_freqs.weight")
        if tensor is None:
            return {}
        where, size = f"{self.path}: rope_freqs.weight", head_dim // 2
        if (tensor.type.name, tensor.shape) != ("F32", (size,)):
            raise ValueError(f"{where} must be {size} numbers in F32, found {tensor.shape} in {tensor.type.name}")
        divisors = struct.unpack_from(f"<{size}f", self.data, tensor.start)
        return {"divisors": [check_number(where, divisor, Real, 1e-3, 1e6) for divisor in divisors]}

    def _read_header(self) -> None:
        (version,) = self._take("I")
        if version not in (2, 3):
            found = "is big-endian" if version in (2 << 24, 3 << 24) else f"is of version {version}"
            raise ValueError(f"{self.path} {found}; GGUF files of versions 2 and 3, little-endian, are read")
        num_tensors, num_keys = self._take("QQ")
        self._check_count(num_keys, LEAST_BYTES["keys"], "keys")
        self._check_count(num_tensors, LEAST_BYTES["tensors"], "tensors")
        for _ in range(num_keys):
            key = self._string()
            if key in self.metadata:
                raise ValueError(f"{self.path} has {shorten(key)} twice")
            self.metadata[key] = self._value(*self._take("I"))
        if (num_files := self.metadata.get("split.count", 1)) not in (0, 1):
            hint = "merge them with  llama-gguf-split --merge"
            raise ValueError(f"{self.path} is one of {shorten(num_files)} parts of a model; {hint}")
        alignment = self.metadata.get("general.alignment", 32)
        check_number(f"{self.path}: general.alignment", alignment, Integral, 8, 2**20)
        table: dict[str, tuple[Any, ...]] = {}
        for _ in range(num_tensors):
            name = self._string()
            (num_dims,) = self._take("I")
            shape = self._take("Q" * min(num_dims, 5))[::-1]
            kind, offset = self._take("IQ")
            stored = _checkpoint_name(name, self.metadata.get("general.architecture"))
            if len(shape) == 1 and _is_matrix(stored):
                shape = (1, *shape)  # llama.cpp leaves out a first dimension of 1
            if stored in table:
                raise ValueError(f"{self.path} has the tensor {shorten(stored)} twice")
            table[stored] = name, shape, kind, offset
        begin = -(-self.position // alignment) * alignment
        end = begin
        before = ""
        for stored, (name, shape, kind, offset) in sorted(table.items(), key=lambda item: item[1][3]):
            tensor = self._tensor(name, shape, kind, begin + offset)
            if tensor.start % alignment:
                raise ValueError(f"{self.path}: tensor {shorten(name)} does not begin at a multiple of {alignment}")
            if tensor.start < end:
                both = f"{shorten(before)} and {shorten(name)} have bytes in common"
                raise ValueError(f"{self.path}: the tensors {both}: the file is damaged, download it again")
            end = tensor.start + tensor.num_bytes
            before = name
            self.tensors[stored] = tensor

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
        """Raises ValueError unless all of it is in the file, in a type that can be read."""
        gguf = gguf_package()
        where = f"{self.path}: tensor {shorten(name)}"
        try:
            type = gguf.GGMLQuantizationType(kind)
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[type]
            gguf.dequantize(np.zeros(block_bytes, np.uint8), type)
        except (ValueError, NotImplementedError) as error:
            raise ValueError(f"{where} is of a type that cannot be unpacked ({error})") from error
        row_length = shape[-1] if len(shape) > 1 else 1  # the numbers of a vector share no block
        if not 1 <= len(shape) <= 4 or 0 in shape or row_length % block_size:
            raise ValueError(f"{where} of shape {shape} is not made of rows of whole {type.name} blocks")
        num_bytes = prod(shape) // block_size * block_bytes
        if start + num_bytes > len(self.data):
            found = f"ends at byte {start + num_bytes:,} of a file of {len(self.data):,} bytes"
            raise ValueError(f"{where} {found}: the file is not whole, download it again")
        num_heads = self.metadata.get("llama.attention.head_count", 0)
        heads = {"attn_q": num_heads, "attn_k": self.metadata.get("llama.attention.head_count_kv", num_heads)}
        part = name.rpartition(".")[0].rpartition(".")[2]  # blk.0.attn_q.weight -> attn_q
        return GGUFTensor(type, shape, start, num_bytes, heads.get(part, 0))

    def _take(self, kinds: str) -> tuple[Any, ...]:
        """Numbers at the current position, which moves past them."""
        values = struct.unpack_from(f"<{kinds}", self.data, self.position)
        self.position += struct.calcsize(f"<{kinds}")
        return values

    def _check_count(self, count: int, num_bytes: int, what: str) -> None:
        """Raises struct.error unless as many fit into the header, each of which takes at least so many bytes."""
        if count * num_bytes > min(len(self.data), MAX_HEADER_BYTES) - self.position:
            raise struct.error(f"{count:,} {what}, for which there is no room,")

    def _string(self) -> str:
        start = self.position + 8
        self.position = start + self._take("Q")[0]
        if self.position > min(len(self.data), MAX_HEADER_BYTES):
            raise struct.error("a text without end")
        return self.data[start : self.position].decode()

    def _value(self, kind: int) -> Any:
        if kind == ARRAY:
            (kind, count) = self._take("IQ")
            if kind == STRING:
                self._check_count(count, LEAST_BYTES["strings"], "strings")
                return [self._string() for _ in range(count)]
            if kind in NUMBERS:
                dtype, start = np.dtype(f"<{NUMBERS[kind]}"), self.position
                self._check_count(count, dtype.itemsize, "numbers")
                self.position += count * dtype.itemsize
                return np.frombuffer(self.data, dtype, count, start).tolist()
        if kind == STRING:
            return self._string()
        if kind in NUMBERS:
            return self._take(NUMBERS[kind])[0]
        raise ValueError(f"{self.path}: metadata of type {kind} is not known")


def _checkpoint_name(name: str, architecture: Any) -> str:
    """blk.0.attn_q.weight -> model.layers.0.self_attn.q_proj.weight. A name that is not known stays as it is."""
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+?)(\.(weight|bias))?", name)
    if layer and architecture in HYBRID:
        from nanovllm.features.hybrid.gguf_names import NAMES as HYBRID_NAMES

        if ours := HYBRID_NAMES.get(f"{layer[2]}{layer[3] or ''}"):
            return f"model.layers.{layer[1]}.{ours}"
    if layer and layer[2] in LAYER_NAMES and layer[3]:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}{layer[3]}"
    part, _, kind = name.rpartition(".")
    return f"{NAMES[part]}.{kind}" if part in NAMES else name


def _is_matrix(stored: str) -> bool:
    """In every checkpoint: among the weights of layers only those of norms are vectors."""
    return stored.startswith("model.layers.") and stored.endswith(".weight") and not stored.endswith("norm.weight")


def gguf_package() -> Any:
    """Raises ValueError where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError('GGUF files are read with the gguf package: run  pip install "nanovllm[gguf]"') from error
    return gguf
