"""What a checkpoint's configuration says of how its weights were quantized, module by module (chapter 12). No torch.

Which weights are quantized, the files say: what was left out (modules_to_not_convert, ignore) lies in them as ordinary
tensors. Here is read how the others are to be understood.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_choice, check_number, list_of, shorten
from nanovllm.files.config_json import read_json
from nanovllm.files.model_fields import QUANTIZATION_FIELDS, QUANTIZATION_FILES

logger = logging.getLogger("nanovllm")

OTHERWISE = (
    'choose the same model in one of them, or an unquantized one, with quantization="int4" on a CPU if memory is short'
)
ALL = 0  # of a block: all rows, or all inputs
# Who writes QUANTIZATION_FILES, unless the fields say otherwise: AutoGPTQ, AutoAWQ, ModelOpt.
SEPARATE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
FIELDS_OF = {"awq": {"w_bit", "q_group_size", "zero_point"}, "gptq": {"desc_act", "sym"}}
# Formats of compressed-tensors: (layout, bits that are read)
FORMATS = {"pack-quantized": ("packed", (4, 8)), "int-quantized": ("integers", range(2, 9))}
FORMATS |= {"float-quantized": ("floats", (8,))}


@dataclass(frozen=True)
class Scheme:
    """How the weight of a module is stored.

    layout       a class of layouts.py
    bits         of a code
    block        (rows, inputs) that share a scale: (1, 128) are groups of 128, (128, 128) DeepSeek's blocks
    added_zero   what a stored zero point is short of: 1 in GPTQ's first format
    divides      the number that is stored is one over the scale
    has_zeros    there must be zero points; otherwise they count if the file has some
    has_order    the same of the group of each input (g_idx)
    """

    layout: str
    bits: int
    block: tuple[int, int]
    added_zero: int = 0
    divides: bool = False
    has_zeros: bool = False
    has_order: bool = False

    def __str__(self) -> str:
        rows, inputs = self.block
        shared = f"{inputs or 'all'} inputs" if rows == 1 else f"{rows or 'all'} rows and {inputs or 'all'} inputs"
        return f"{self.bits} bits{' (float)' * (self.layout == 'floats')}, a scale for {shared}"


@dataclass(frozen=True)
class Rule:
    """Modules whose name is `pattern` or, of a regular expression, begins as it says. scheme: None, not quantized."""

    pattern: str
    is_regex: bool
    scheme: Scheme | None

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """Compiled once. re.match() keeps 512 patterns and compiles what is beyond them each time."""
        return re.compile(self.pattern)

    def fits(self, module: str) -> bool:
        return bool(self.regex.match(module)) if self.is_regex else self.pattern == module


@dataclass(frozen=True)
class Published:
    """A checkpoint's own quantization.

    rules         the first one that fits a module says how it is stored
    default       what holds for a module that none of them fits
    activations   what the file asks for; "": activations as they are
    unpacks       the weights are wanted as ordinary numbers
    """

    method: str
    rules: tuple[Rule, ...]
    default: Scheme | None
    activations: str = ""
    unpacks: bool = False

    @cached_property
    def _names(self) -> dict[str, int]:
        """{a module's name: the first rule that is of it alone}. Some files leave out thousands of modules by name."""
        return {rule.pattern: i for i, rule in reversed([*enumerate(self.rules)]) if not rule.is_regex}

    @cached_property
    def _expressions(self) -> list[int]:
        return [i for i, rule in enumerate(self.rules) if rule.is_regex]

    def scheme_of(self, module: str) -> Scheme | None:
        fitting = (i for i in self._expressions if self.rules[i].fits(module))
        first = min(next(fitting, len(self.rules)), self._names.get(module, len(self.rules)))
        return self.default if first == len(self.rules) else self.rules[first].scheme

    @property
    def schemes(self) -> list[Scheme]:
        """[] where all weights are ordinary: the file may ask for few bits of K/V only."""
        found = [*(rule.scheme for rule in self.rules), self.default]
        return [scheme for scheme in dict.fromkeys(found) if scheme is not None]

    def __str__(self) -> str:
        return f"{self.method}, {'; '.join(dict.fromkeys(map(str, self.schemes))) or 'no weights of few bits'}"


def read_published(whole: Any, text: Any, path: Path) -> Published:
    """What config.json, or a file beside it, says; there is one of them.

    whole, text: transformers' configuration of the checkpoint and of its language model. Raises ValueError for what
    is not read, by its name.
    """
    found, where = _find(whole, text, path)
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in METHODS:
        is_mlx = method is None and {"group_size", "bits"} <= found.keys() and not FIELDS_OF["gptq"] & found.keys()
        named = "the format is MLX's" if is_mlx else f"quant_method is {shorten(method)}"
        raise ValueError(f"{where}: {named}, which is not read; {', '.join(METHODS)} are; {OTHERWISE}")
    return METHODS[method](found, where)


def _find(whole: Any, text: Any, path: Path) -> tuple[dict[str, Any], str]:
    """The object that says it, and where it stands."""
    for config in (whole, text):
        for name in QUANTIZATION_FIELDS:
            if getattr(config, name, None):
                return _object(vars(config), name, str(path)), f"{path}: {name}"
    name = next(name for name in QUANTIZATION_FILES if path.with_name(name).is_file())
    found = read_json(path.with_name(name))
    method = next((method for method, fields in FIELDS_OF.items() if fields & found.keys()), SEPARATE_FILES[name])
    return {"quant_method": method} | found, str(path.with_name(name))


def _object(found: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """An object inside an object; {} where there is none."""
    value = found.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {name} must be an object, found {shorten(value)}")
    return value


def _first(found: Mapping[str, Any], *names: str) -> Any:
    """The value under the first of a field's names that is there."""
    return next((found[name] for name in names if found.get(name) is not None), None)


def _refuse(where: str, name: str, found: Any, would: str) -> ValueError:
    return ValueError(f"{where}: {name} is {shorten(found)}, which is not read; {would}")


def _groups(size: Any, where: str) -> tuple[int, int]:
    """A block of one row. -1: all of it."""
    size = check_number(f"{where}: group_size", size, Integral, -1, 2**24)
    return 1, max(size, ALL)


def _bits(found: Mapping[str, Any], where: str, readable: Collection[int], *names: str) -> int:
    bits: int = check_number(f"{where}: {names[0]}", _first(found, *names), Integral)
    if bits not in readable:
        raise _refuse(where, names[0], bits, f"{', '.join(map(str, readable))} are")
    return bits


def _gptq(found: dict[str, Any], where: str) -> Published:
    """AutoGPTQ and GPTQModel. Whether it is symmetric (sym), the zero points say."""
    form = "marlin" if found.get("is_marlin_format") else str(_first(found, "checkpoint_format", "format") or "gptq")
    if form.lower() not in ("gptq", "gptq_v2"):
        raise _refuse(where, "checkpoint_format", form, "gptq and gptq_v2 are")
    if (pack_dtype := found.get("pack_dtype") or "int32") != "int32":
        raise _refuse(where, "pack_dtype", pack_dtype, "int32 is")
    for name in ("rotation", "adapter"):  # what else a layer would have to compute
        if found.get(name):
            raise _refuse(where, name, found[name], "a checkpoint without it is")

    def scheme_of(fields: Mapping[str, Any], where: str) -> Scheme:
        bits = _bits(fields, where, (4, 8), "bits")
        added_zero, has_order = int(form.lower() == "gptq"), bool(fields.get("desc_act"))
        block = _groups(fields.get("group_size"), where)
        return Scheme("gptq", bits, block, added_zero, has_zeros=True, has_order=has_order)

    rules, dynamic = list[Rule](), _object(found, "dynamic", where)
    # As GPTQModel: first the patterns that leave modules out, then the others as they come.
    for pattern in sorted(dynamic, key=lambda pattern: not pattern.startswith("-:")):
        name = f"dynamic[{pattern!r}]"
        changes = _object(dynamic, pattern, f"{where}: dynamic")
        if other := {"method", "format", "checkpoint_format", "pack_dtype"} & changes.keys():
            raise _refuse(where, name, changes, f"bits and group_size of single modules are, {min(other)} is not")
        scheme = None if pattern.startswith("-:") else scheme_of(found | changes, f"{where}: {name}")
        rules.append(_regex(pattern.removeprefix("-:").removeprefix("+:"), scheme, f"{where}: dynamic"))
    return Published("gptq", tuple(rules), scheme_of(found, where))


def _awq(found: dict[str, Any], where: str) -> Published:
    """AutoAWQ."""
    version = "llm-awq" if found.get("backend") == "llm-awq" else _first(found, "version", "format") or "gemm"
    if str(version).lower() != "gemm":
        raise _refuse(where, "version", version, "gemm is")
    bits = _bits(found, where, (4,), "bits", "w_bit")
    if found.get("dynamic"):
        raise _refuse(where, "dynamic", found["dynamic"], "one scheme for all modules is")
    block = _groups(_first(found, "group_size", "q_group_size"), where)
    return Published("awq", (), Scheme("awq", bits, block, has_zeros=found.get("zero_point") is not False))


def _fp8(found: dict[str, Any], where: str) -> Published:
    """DeepSeek's and Qwen's FP8 in blocks, AutoFP8's with a scale a tensor, GPTQModel's with the inverse of a scale."""
    if (kind := found.get("expert_dtype") or "fp8") != "fp8":
        raise _refuse(where, "expert_dtype", kind, "fp8 is")
    block = found.get("weight_block_size") or (ALL, ALL)
    scheme = Scheme("floats", 8, pair_of(block, f"{where}: weight_block_size", ALL), divides=_is_inverse(found))
    scheme_of_activations = found.get("activation_scheme")
    asked = f"FP8 ({scheme_of_activations})" if scheme_of_activations else ""
    return Published("fp8", (), scheme, asked)


def _is_inverse(found: dict[str, Any]) -> bool:
    """GPTQModel divides by what it calls weight_scale_inv; everybody else multiplies by it."""
    return found.get("weight_scale_semantics") == "inverse"


def pair_of(value: Any, where: str, least: int = 1) -> tuple[int, int]:
    """(rows, inputs), each from `least` on. Raises ValueError for anything but two whole numbers."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ValueError(f"{where} must be two numbers, rows and inputs, found {shorten(value)}")
    rows, inputs = (check_number(where, number, Integral, least, 2**24) for number in value)
    return rows, inputs


def _bitsandbytes(found: dict[str, Any], where: str) -> Published:
    """NF4 and FP4. The block's size and what else there is to know stand beside each weight."""
    if found.get("load_in_8bit") or found.get("_load_in_8bit"):
        raise _refuse(where, "load_in_8bit", True, "load_in_4bit is")
    if (dtype := found.get("bnb_4bit_quant_storage") or "uint8") != "uint8":
        raise _refuse(where, "bnb_4bit_quant_storage", dtype, "uint8 is")
    return Published("bitsandbytes", (), Scheme("bitsandbytes", 4, (1, 64)))


def _compressed_tensors(found: dict[str, Any], where: str) -> Published:
    """What llm-compressor writes."""
    found = _object(found, "quantization_config", where) or found  # old files have one object more
    sparsity = _object(found, "sparsity_config", where).get("format", "dense")
    if sparsity != "dense":
        raise _refuse(where, "sparsity_config", sparsity, f"dense weights are; {OTHERWISE}")
    if transforms := _object(found, "transform_config", where).get("config_groups"):
        raise _refuse(where, "transform_config", transforms, "a checkpoint without transforms is")
    rules = [_rule(name, None, where) for name in list_of(found.get("ignore"), str, "names", f"{where}: ignore")]
    named, default, asked = list[Rule](), None, set[str]()
    for name in _object(found, "config_groups", where):
        place = f"{where}: config_groups.{name}"
        group = _object(found["config_groups"], name, place)
        scheme = _compressed_scheme(group, found.get("format"), place)
        if activations := _object(group, "input_activations", place):
            asked.add(f"{activations.get('num_bits')} bits ({activations.get('type')})")
        for target in list_of(group.get("targets"), str, "names", f"{place}: targets"):
            if target == "Linear":
                default = default or scheme
            else:
                named.append(_rule(target, scheme, place))
    named.sort(key=lambda rule: (rule.is_regex, rule.pattern))  # as compressed-tensors does; vLLM takes the first
    if scheme_of_kv := _object(found, "kv_cache_scheme", where):
        kind = f"{scheme_of_kv.get('num_bits')} bits ({scheme_of_kv.get('type')})"
        logger.warning(
            "%s: kv_cache_scheme asks for K/V of %s, which is not done; kv_cache_dtype may be int8", where, kind
        )
    return Published("compressed-tensors", (*rules, *named), default, ", ".join(sorted(asked)))


def _compressed_scheme(group: dict[str, Any], whole_format: Any, where: str) -> Scheme | None:
    """Of a group of modules. None: their weights are ordinary."""
    weights, form = _object(group, "weights", where), group.get("format") or whole_format
    if not weights or form == "dense":
        return None
    weights = {name: value.lower() if isinstance(value, str) else value for name, value in weights.items()}
    kind = weights.get("type") or "int"
    if form == "naive-quantized":
        form = "float-quantized" if kind == "float" else "int-quantized"
    if form not in FORMATS:
        raise _refuse(where, "format", form, f"{', '.join(FORMATS)} are; {OTHERWISE}")
    readable_kind = "float" if form == "float-quantized" else "int"
    if kind != readable_kind:
        raise _refuse(where, "type", weights.get("type"), f"{readable_kind} is, with the format {form}")
    layout, readable = FORMATS[form]
    bits = _bits(weights, where, readable, "num_bits")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    check_choice(f"{where}: strategy", strategy, ("tensor", "channel", "group", "block"))
    if strategy == "block":
        block = weights.get("block_structure")
        if isinstance(block, str):  # as older files have it: "128x128"
            block = [int(number) if number.isdecimal() else number for number in block.split("x")]
        block = pair_of(block, f"{where}: block_structure")
    else:
        block = {"tensor": (ALL, ALL), "channel": (1, ALL)}.get(strategy) or _groups(size, where)
    has_order = weights.get("actorder") in (True, "group", "dynamic")
    return Scheme(layout, bits, block, has_zeros=weights.get("symmetric") is False, has_order=has_order)


def _rule(target: str, scheme: Scheme | None, where: str) -> Rule:
    """Of a name, or of "re:" and a regular expression, as compressed-tensors writes them."""
    if target.startswith("re:"):
        return _regex(target.removeprefix("re:"), scheme, where)
    return Rule(target, False, scheme)


def _regex(pattern: str, scheme: Scheme | None, where: str) -> Rule:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{where}: {shorten(pattern)} is no regular expression: {error}") from error
    return Rule(pattern, True, scheme)


METHODS: dict[str, Callable[[dict[str, Any], str], Published]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "bitsandbytes": _bitsandbytes,
}
