"""How options become flags of a command line."""

import argparse
import json
import re
import sys
from ast import literal_eval
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import Field
from types import NoneType
from typing import Any, get_args, get_origin

from nanovllm.config import SIZES

ENGINE_GROUPS = {
    "the checkpoint": "tokenizer revision load_format hf_overrides generation_config dtype quantization runner "
    "convert pooler_config".split(),
    "sequences and steps": "max_model_len max_num_seqs max_num_batched_tokens "
    "long_prefill_token_threshold scheduling_policy seed".split(),
    "the KV cache": "block_size kv_cache_dtype kv_cache_memory_bytes num_gpu_blocks_override gpu_memory_utilization "
    "enable_prefix_caching prefix_caching_hash_algo prefix_cache_dir prefix_cache_bytes cpu_cache_bytes "
    "kv_events_config kv_cache_metrics kv_cache_metrics_sample".split(),
    "the machine": "tensor_parallel_size enforce_eager optimizations profiler_config".split(),
    "adapters and draft tokens": "enable_lora max_loras max_lora_rank speculative_config".split(),
}
ALIASES = {"tensor_parallel_size": ["-tp"], "pipeline_parallel_size": ["-pp"], "data_parallel_size": ["-dp"]}
ALIASES |= {"quantization": ["-q"], "speculative_config": ["-sc"], "optimization_level": ["-O"]}
ALIASES |= {"disable_log_requests": ["--disable-uvicorn-access-log"]}
# --name.key VALUE, --name.key=VALUE, --name.key.other VALUE
KEY_OF_FLAG = re.compile(r"(--?[A-Za-z][\w-]*)\.([\w.-]+)(?:=(.*))?", re.DOTALL)


class FlexibleArgumentParser(argparse.ArgumentParser):
    """To it, --max_model_len is the same as --max-model-len, and --name.key VALUE as --name '{"key": VALUE}'."""

    def add_argument(self, *names: Any, **options: Any) -> Any:
        return super().add_argument(*map(_with_dashes, names), **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        plain = [*map(_with_dashes, self._with_dicts(given[:end]))]
        return super().parse_known_args([*plain, *given[end:]], namespace)

    def _with_dicts(self, args: list[str]) -> list[str]:
        """All keys of a flag as one JSON object, behind the other flags."""
        rest: list[str] = []
        dicts: dict[str, dict[str, Any]] = {}
        left = iter(args)
        for arg in left:
            found = KEY_OF_FLAG.fullmatch(arg)
            if found is None:
                rest.append(arg)
                continue
            flag, path, text = found.groups()
            text = next(left, None) if text is None else text
            if text is None:
                self.error(f"argument {arg}: expected one argument")
            inner = dicts.setdefault(_with_dashes(flag), {})
            *outer_keys, key = path.split(".")
            for name in outer_keys:
                if not isinstance(inner.get(name), dict):
                    inner[name] = {}
                inner = inner[name]
            inner[key] = _json_or_text(text)
        return rest + [word for flag, keys in dicts.items() for word in (flag, json.dumps(keys))]


def _with_dashes(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def add_flags(group: Any, chosen: Iterable[Field], *, show_defaults: bool = True) -> None:
    """A flag for each of a dataclass's fields, which are option()s; one not given leaves no attribute."""
    for f in chosen:
        default = f" (default: {f.default})" if show_defaults and f.default not in (None, ()) else ""
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": f.metadata["help"] + default}
        kind = next((t for t in get_args(f.type) if t is not NoneType), f.type)
        if f.type is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif f.name == "optimizations":
            options |= {"nargs": "*", "metavar": "NAME"}
        elif get_origin(f.type) is tuple:  # given once with several values, or several times
            options |= {"nargs": "+", "action": "extend", "metavar": "TEXT"}
        elif any(get_origin(t) is dict for t in get_args(f.type)):
            options |= {"type": json.loads, "metavar": "JSON"}
        elif f.name in SIZES:
            options["metavar"] = "N"  # a number or text like 8k: EngineConfig reads both
        else:
            options |= {"type": kind, "metavar": kind.__name__.upper() if kind is str else "N"}
        group.add_argument(flag_of(f.name), *ALIASES.get(f.name, ()), **options)


def add_grouped_flags(
    parser: argparse.ArgumentParser, chosen: Iterable[Field], groups: Mapping[str, Iterable[str]]
) -> None:
    """Flags under the headings that --help shows. groups: heading -> names; the rest comes last, under "more"."""
    left = {f.name: f for f in chosen}
    for heading, names in groups.items():
        add_flags(parser.add_argument_group(heading), [left.pop(name) for name in names if name in left])
    if left:
        add_flags(parser.add_argument_group("more"), left.values())


def add_vllm_flags(parser: argparse.ArgumentParser, neutral: Mapping[str, list[Any]]) -> None:
    """A flag for each option that has none yet. neutral: neutral_options().

    Only an option that may be a list takes several values: the model may follow any other.
    """
    known = {text for action in parser._actions for text in action.option_strings}
    for name in (name for name in neutral if flag_of(name) not in known):
        options: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if any(isinstance(value, bool) for value in neutral[name]):
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = literal
        if any(isinstance(value, list) for value in neutral[name]):
            options |= {"nargs": "+", "action": _OneOrMore}
        parser.add_argument(flag_of(name), *ALIASES.get(name, ()), **options)


class _OneOrMore(argparse.Action):
    """One value stays one, several are a list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values[0] if len(values) == 1 else values)


def _json_or_text(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text)
    return text


def literal(text: str) -> Any:
    for read in (json.loads, literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError):
            return read(text)
    return text
