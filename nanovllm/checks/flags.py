"""EngineArgs: the engine's options on a command line, as vLLM's scripts have them; how a dataclass becomes flags."""

import argparse
import json
from ast import literal_eval
from collections.abc import Iterable
from dataclasses import Field, fields
from types import NoneType
from typing import Any, get_args, get_origin

from nanovllm.checks.options import SIZES
from nanovllm.checks.vllm_names import ENGINE
from nanovllm.config import EngineConfig

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # vLLM's


class EngineArgs(EngineConfig):
    """EngineConfig under vLLM's name: LLM(**dataclasses.asdict(EngineArgs(...))), LLMEngine.from_engine_args(...)."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Flags for all options. Those of vLLM's that this engine lacks are there, too, and judged by their value."""
        group = parser.add_argument_group("engine")
        group.add_argument("--model", default=DEFAULT_MODEL, help="checkpoint directory, GGUF file or hub id")
        add_flags(group, (f for f in fields(EngineConfig) if f.name != "model"))
        for name in ENGINE:
            kind: dict[str, Any] = {"type": _literal, "nargs": "?", "const": True}
            group.add_argument(flag_of(name), **kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        names = {*cls.__dataclass_fields__, *ENGINE}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


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
        short = ["-tp"] if f.name == "tensor_parallel_size" else []
        group.add_argument(*short, flag_of(f.name), **options)


def _literal(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text
