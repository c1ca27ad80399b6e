"""What the scripts share: arguments, clocks, runs that take turns, tables, and processes that measure alone.

Nothing but the standard library is imported before it is used: what vLLM runs under has a Python of its own.
"""

import argparse
import functools
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from torch import Tensor

    from nanovllm import SamplingParams

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
RESULT = "RESULT "  # begins the line in which a process says what it has measured


# -- arguments ---------------------------------------------------------------------------------------------------------


def arguments(
    doc: str | None, model: str | None = "directory or hub id (default: the demo checkpoint)"
) -> argparse.ArgumentParser:
    """A parser whose help is the script's docstring. model: the help of the argument MODEL; None: there is none.

    From here on, what the terminal's encoding lacks is printed as escapes: a model may say anything.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):  # a notebook has something else
        sys.stdout.reconfigure(errors="backslashreplace")
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if model is not None:
        parser.add_argument("model", nargs="?", help=model)
    return parser


def add_some_of(parser: argparse.ArgumentParser, option: str, names: Iterable[str], **more: Any) -> None:
    """An option that takes some of these names, and all of them if it is not given."""
    parser.add_argument(option, nargs="+", choices=list(names), default=list(names), **more)


def positive(text: str) -> int:
    """The type of an argument that is a count or a size: 1 or more."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more (found {text})")
    return number


def not_negative(text: str) -> int:
    """The type of a count that may be 0, which leaves something out."""
    if (number := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more (found {text})")
    return number


def above_zero(text: str) -> float:
    """The type of an argument that is a rate, a share or a size, and no whole number."""
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0 (found {text})")
    return number


def existing_file(text: str) -> Path:
    """The type of an argument that is a file to read; a pipe will do."""
    path = Path(text)
    if not path.exists() or path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def file_to_write(text: str) -> Path:
    """The type of an argument that is a file to write, in a folder that is there."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}")
    return path


def text_of(file: Path | None) -> str:
    """What is in it, or (None) Python's language reference, which every Python has.

    Ends the script if the file is not UTF-8 text.
    """
    if file is None:
        return "\n\n".join(topics[name] for name in sorted(topics))
    try:
        return file.read_text("utf-8")
    except UnicodeDecodeError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {file} is not UTF-8 text: {error}")


def program(text: str) -> str:
    """The type of an argument that is a program to run."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(f"there is no program {text}")
    return text


@contextmanager
def needs(packages: str) -> Iterator[None]:
    """Around imports: where one is missing, the script ends and says so. packages: what to give to pip install."""
    try:
        yield
    except ModuleNotFoundError as error:
        what = f"this needs {error.name}, which is not installed here"
        sys.exit(f"{Path(sys.argv[0]).name}: {what}: pip install {packages}")


# -- clocks ------------------------------------------------------------------------------------------------------------


def seconds(function: Callable[..., object], *args: Any, **kwargs: Any) -> float:
    """How long a call takes."""
    started = time.perf_counter()
    function(*args, **kwargs)
    return time.perf_counter() - started


def timed(spent: dict[str, float], name: str, function: Callable[..., T]) -> Callable[..., T]:
    """The same function, whose calls add the seconds that they take to spent[name]."""

    def call(*args: Any, **kwargs: Any) -> T:
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - started

    return call


def in_turn(ways: Mapping[K, Callable[[], T]], rounds: int, title: str = "") -> dict[K, list[T]]:
    """What each way has returned in each round. Ways take turns, so that a slow minute does not meet only one."""
    found: dict[K, list[T]] = {name: [] for name in ways}
    for _ in progress(range(rounds), title):
        for name, way in ways.items():
            found[name].append(way())
    return found


def median_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> float:
    """The median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def greedy(num_output: int, **more: Any) -> "SamplingParams":
    """So many output tokens, whatever they are."""
    from nanovllm import SamplingParams

    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=num_output, **more)


# -- what is printed ---------------------------------------------------------------------------------------------------


@functools.cache
def console() -> "Console":
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterable[T]:
    """The same items, with a bar on stderr that is gone afterwards. total: how many, where that cannot be asked."""
    from rich.console import Console
    from rich.progress import track

    return track(items, title, total, console=Console(stderr=True), transient=True)


def table(title: str, *columns: str, **more: Any) -> "Table":
    """Labels on the left, figures on the right."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", **more)
    for number, column in enumerate(columns):
        made.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    return made


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The same as lines of Markdown, which read well as they are, too."""
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in [columns, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


# -- processes ---------------------------------------------------------------------------------------------------------


class ChildFailed(Exception):
    """A process has ended without a result; the message is what it wrote to stderr."""

    @property
    def line(self) -> str:
        """The last line."""
        return (str(self).strip().splitlines() or ["no output"])[-1]

    @property
    def reason(self) -> str:
        """The same, cut to what a table has room for."""
        return self.line[:100]


def in_child(
    command: Sequence[str | Path], env: Mapping[str, str] | None = None, timeout_s: float | None = None
) -> Any:
    """What a process hands over with `result()`. ChildFailed if it ends without, subprocess.TimeoutExpired if late."""
    ended = subprocess.run(
        [str(part) for part in command], env=os.environ | (env or {}), capture_output=True, text=True, timeout=timeout_s
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith(RESULT)]
    if not lines:
        raise ChildFailed(ended.stderr)
    return json.loads(lines[-1].removeprefix(RESULT))


def write_beside(script: str, *given: str | Path) -> None:
    """Run the script of this folder that writes a model's file, in a process of its own. Raises ChildFailed."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, given)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise ChildFailed(ended.stderr)


def compress_beside(model: str, folder: Path, rounding: str) -> str:
    """The folder, in which make_compressed.py has written the model. Ends the script with a line if it could not."""
    try:
        write_beside("make_compressed.py", model, folder, "--rounding", rounding)
    except ChildFailed as failed:
        sys.exit(failed.line)
    return str(folder)


def result(value: object) -> None:
    """In the process: hand this over."""
    print(RESULT + json.dumps(value), flush=True)


def vllm_env(kv_cache_gb: int = 4) -> dict[str, str]:
    """What makes vLLM for CPUs use all the cores that this process may use, and nothing but local files."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }


# -- checkpoints and prompts -------------------------------------------------------------------------------------------


def vocab_size_of(model: str) -> int:
    from nanovllm.checkpoint import ModelConfig
    from nanovllm.files.hub import resolve_checkpoint

    return ModelConfig.from_directory(resolve_checkpoint(model, load_format="dummy")).vocab_size


def tensors_of(directory: Path) -> Iterator[tuple[str, "Tensor"]]:
    """(name, tensor) of a checkpoint's weights, as its files hold them and from the files that the engine reads.

    Ends the script if it is no directory, if its weights are quantized already, or if a file is missing or damaged.
    """
    from nanovllm.files.config_json import read_json
    from nanovllm.files.model_fields import QUANTIZATION_FIELDS, QUANTIZATION_FILES
    from nanovllm.files.tensor_files import tensor_files

    script = Path(sys.argv[0]).name
    if not (directory / "config.json").is_file():
        sys.exit(f"{script}: {directory} is no directory with a config.json")
    try:
        fields = read_json(directory / "config.json")
        files = tensor_files(directory)
    except (OSError, ValueError) as error:
        sys.exit(f"{script}: {error}")
    configs = [config for config in (fields, fields.get("text_config")) if isinstance(config, dict)]
    marks = [name for name in QUANTIZATION_FIELDS if any(config.get(name) for config in configs)]
    marks += [name for name in QUANTIZATION_FILES if (directory / name).is_file()]
    if marks:
        sys.exit(f"{script}: {directory} is quantized already, as its {marks[0]} says; give the original")
    slices = ((name, file.get_slice(name)) for name, file in files.items())
    return ((name, stored[tuple(map(slice, stored.get_shape()))]) for name, stored in slices)


def prompt_ids(vocab_size: int, first: int = 100) -> range:
    """The token ids that random prompts are made of: from the first up to 40,000, as far as the vocabulary goes."""
    end = min(vocab_size, 40_000)
    return range(min(first, end // 2), end)


def random_checkpoint(folder: Path, config: Any) -> Path:
    """Random weights in bf16 of a transformers configuration, with the demo model's tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from nanovllm.tools.demo_model import model_or_demo

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for file in Path(model_or_demo()).glob("*token*"):
        shutil.copy(file, folder)
    return folder
