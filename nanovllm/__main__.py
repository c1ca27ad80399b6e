"""python -m nanovllm: the `nanovllm` command."""

from typing import NoReturn

from nanovllm.tools.own_process import run_as_process


def command() -> int:
    from nanovllm.tools.cli import main

    return main()


def run() -> NoReturn:
    run_as_process(command)


if __name__ == "__main__":
    run()
