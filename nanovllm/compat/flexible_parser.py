"""The parser that vLLM's scripts use."""

import argparse
import sys
from typing import Any


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
