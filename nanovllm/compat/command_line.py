"""What vLLM's scripts make their command lines of: a parser, and EngineArgs."""

import argparse
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.checks.names import names_checked
from nanovllm.compat.neutral import ANY, NEUTRAL
from nanovllm.config import EngineConfig
from nanovllm.tools.flags import ALIASES, FlexibleArgumentParser, add_flags, flag_of, literal

__all__ = ["FlexibleArgumentParser", "EngineArgs", "AsyncEngineArgs"]

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # vLLM's


@names_checked("LLM")
@dataclass(frozen=True)
class EngineArgs(EngineConfig):
    """EngineConfig under vLLM's name: LLM(**dataclasses.asdict(EngineArgs(...))), LLMEngine.from_engine_args(...)."""

    model: str = DEFAULT_MODEL

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Flags for all options. Those of vLLM's that this engine lacks are there, too, and judged by their value."""
        group = parser.add_argument_group("engine")
        group.add_argument("--model", default=DEFAULT_MODEL, help="checkpoint directory, GGUF file or hub id")
        add_flags(group, (f for f in fields(EngineConfig) if f.name != "model"))
        for name, neutral in NEUTRAL["LLM"].items():
            default = None if ANY in neutral else next(iter(neutral), None)
            given: dict[str, Any] = {"type": literal, "nargs": "?", "const": True, "default": default}
            group.add_argument(flag_of(name), *ALIASES.get(name, ()), **given, help=argparse.SUPPRESS)
            if isinstance(default, bool):
                off: dict[str, Any] = {"dest": name, "action": "store_false", "default": argparse.SUPPRESS}
                group.add_argument(flag_of(f"no_{name}"), **off, help=argparse.SUPPRESS)
        # Scripts read the options off what was parsed, and hand all of them to LLM.
        left_out = ("model", "cpu_cache_bytes")  # the latter's value may be given as --kv-offloading-size
        parser.set_defaults(**{f.name: f.default for f in fields(EngineConfig) if f.name not in left_out})
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        names = {*cls.__dataclass_fields__, *NEUTRAL["LLM"]}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


class AsyncEngineArgs(EngineArgs):
    """EngineArgs for AsyncLLM.from_engine_args(...)."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """async_args_only: the one flag that vLLM's EngineArgs has not."""
        if not async_args_only:
            return EngineArgs.add_cli_args(parser)
        parser.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        return parser
