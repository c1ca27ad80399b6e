"""What vLLM's scripts make their command lines of: a parser, and EngineArgs."""

import argparse
import sys
from dataclasses import fields
from typing import Any

from nanovllm.compat.names import ANY, ENGINE
from nanovllm.config import EngineConfig
from nanovllm.tools.flags import ALIASES, add_flags, flag_of, literal

DEFAULT_MODEL = "Qwen/Qwen3-0.6B"  # vLLM's


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An ArgumentParser to which --max_model_len is the same as --max-model-len."""

    def add_argument(self, *names: Any, **options: Any) -> Any:
        return super().add_argument(*map(_with_dashes, names), **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        end = given.index("--") if "--" in given else len(given)
        return super().parse_known_args([*map(_with_dashes, given[:end]), *given[end:]], namespace)


def _with_dashes(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg


class EngineArgs(EngineConfig):
    """EngineConfig under vLLM's name: LLM(**dataclasses.asdict(EngineArgs(...))), LLMEngine.from_engine_args(...)."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Flags for all options. Those of vLLM's that this engine lacks are there, too, and judged by their value."""
        group = parser.add_argument_group("engine")
        group.add_argument("--model", default=DEFAULT_MODEL, help="checkpoint directory, GGUF file or hub id")
        add_flags(group, (f for f in fields(EngineConfig) if f.name != "model"))
        for name, (_, neutral) in ENGINE.items():
            default = next((value for value in neutral if value is not ANY), None)
            kind: dict[str, Any] = {"type": literal, "nargs": "?", "const": True, "default": default}
            group.add_argument(flag_of(name), *ALIASES.get(name, ()), **kind, help=argparse.SUPPRESS)
        # Scripts read the options off what was parsed, and hand all of them to LLM.
        parser.set_defaults(**{f.name: f.default for f in fields(EngineConfig) if f.name != "model"})
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        names = {*cls.__dataclass_fields__, *ENGINE}
        return cls(**{name: value for name, value in vars(args).items() if name in names})


class AsyncEngineArgs(EngineArgs):
    """EngineArgs for AsyncLLM.from_engine_args(...)."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """async_args_only: the one flag that EngineArgs has not."""
        parser.add_argument("--enable-log-requests", action=argparse.BooleanOptionalAction, help=argparse.SUPPRESS)
        return parser if async_args_only else EngineArgs.add_cli_args(parser)
