"""What works where PyTorch is not installed, on every Python, with -OO as without: python tests/without_torch.py

Needs xxhash and rich (and tomli before Python 3.11). pytest runs it with -OO on its own Python, where torch is made
unimportable; tests/every_python.py runs it on all others of this machine.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
MISSING = ("torch", "numpy", "transformers", "safetensors", "tokenizers")
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({MISSING}))"  # importing one raises ModuleNotFoundError
NANOVLLM_COMMANDS = ("chat", "generate", "run-batch", "analyze", "bench", "serve")
COURSE_COMMANDS = ("read", "lab", "quiz", "check", "site")
GRADED = {4: 18, 7: 33, 13: 12, 16: 19}  # chapter -> checks of its solution that pass without a model, at least


def expect(is_so: bool, what: str) -> None:
    if not is_so:  # -OO drops assertions
        sys.exit(f"Python {sys.version.split()[0]}, optimize={sys.flags.optimize}: {what}")


def printed(main: Callable[[list[str]], int], *arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(list(arguments))
    return out.getvalue()


def run(*command: str, stdin: str = "") -> tuple[int, str]:
    """The course's command, in a process with the same -O; its exit code, and what it says."""
    optimize = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    result = subprocess.run(
        [sys.executable, *optimize, "-m", "chapters", *command], input=stdin, capture_output=True, text=True
    )
    said = result.stdout + result.stderr
    expect("Traceback" not in said, f"python -m chapters {' '.join(command)}:\n{said}")
    return result.returncode, said


def help_says_what_each_flag_does() -> None:
    from chapters.__main__ import main as course
    from nanovllm.tools.cli import main as nanovllm

    for main, commands in ((nanovllm, NANOVLLM_COMMANDS), (course, COURSE_COMMANDS)):
        overview = printed(main, "--help")
        for command in commands:
            expect(command in overview, f"--help does not name {command}")
            text = printed(main, command, "--help")
            flags = re.findall(r"\n  (-\S.*?)(?: {2,}|\n {10,})\S.*|\n  (-.*)", text)
            bare = [flag for said, flag in flags if not said]
            expect(len(flags) > 0 and not bare, f"{command} --help does not say what {bare or text} do")


def options_are_checked() -> None:
    import argparse

    from nanovllm import EngineArgs, SamplingParams
    from nanovllm.serving.http.options import ServeOptions

    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(["--max-model-len", "8k", "--no-enable-prefix-caching"]))
    expect((args.max_model_len, args.enable_prefix_caching) == (8000, False), f"flags gave {args}")
    expect("sequences that run at a time" in parser.format_help(), "EngineArgs' flags have no help")
    for make, options in (
        (SamplingParams, {"top_p": 3}),
        (ServeOptions, {"port": -1}),
        (EngineArgs, {"seed": "x", "model": "m"}),
    ):
        try:
            make(**options)
        except ValueError as error:
            expect(f"{next(iter(options))} must be" in str(error), str(error))
        else:
            expect(False, f"{make.__name__} took {options}")


def core_schedules() -> None:
    from nanovllm.core.block_manager import BlockManager
    from nanovllm.core.scheduler import Scheduler
    from nanovllm.core.sequence import Sequence

    manager = BlockManager(8, 4)
    scheduler = Scheduler(manager, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=32)
    num_tokens = []
    for _ in range(2):  # the second finds the first's blocks
        scheduler.add(Sequence(list(range(10))))
        output = scheduler.schedule()
        num_tokens.append(output.num_tokens)
        scheduler.update(output, [[1]] * len(output.chunks))
    scheduler.check_integrity()
    expect(num_tokens == [10, 1 + 2], f"steps computed {num_tokens} tokens")


def course_is_read_and_asked() -> None:
    code, said = run()
    expect(code == 0 and "0 of 3" in said and "python -m chapters read 1" in said, said)
    expect(run("read", "7")[0] == 0, "read 7 failed")
    code, said = run("quiz", "7", stdin="nonsense\n" * 1000)
    expect(code == 1 and re.search(r"\b0 of \d+\n", said) is not None and "The answer is" in said, said)
    code, said = run("lab", "1", "--plain")
    expect(code == 2 and "torch" in said, said)


def exercises_are_graded() -> None:
    for chapter, num_checks in GRADED.items():
        code, said = run("check", str(chapter), "--solution")
        expect(code == 1 and said.count("\n  + ") >= num_checks and "\n  x " not in said, said)
    code, said = run("check", "7")
    expect(code == 1 and "not started" in said, said)
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "ada.py"
        solution = (ROOT / "chapters/ch07_prefix_caching/solution.py").read_text("utf-8")
        wrong.write_text(f"{solution}\n\ndef hash_block(*args):\n    return 1 / 0\n", "utf-8")
        code, said = run("check", "7", "--file", str(wrong))
        expect(code == 1 and "ZeroDivisionError" in said and "ada.py" in said, said)
    code, said = run("check", "1")
    expect(code == 2 and "torch" in said, said)


def main() -> None:
    exec(BLOCK)
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(BLOCK, "utf-8")  # for the processes that this one starts
        os.environ |= {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "XDG_DATA_HOME": folder, "XDG_CACHE_HOME": folder}
        os.environ["COLUMNS"] = "100"
        for check in (
            help_says_what_each_flag_does,
            options_are_checked,
            core_schedules,
            course_is_read_and_asked,
            exercises_are_graded,
        ):
            check()


if __name__ == "__main__":
    main()
