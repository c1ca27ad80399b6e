"""Where files are: a checkpoint's (a directory, a GGUF file, a hub's repository), and this project's own. No torch.

"demo" is the demo model's name, and "demo:Q4_1" that of its GGUF file, unless a file or a folder here is so called.
"""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

from nanovllm.files.tokenizer import TOKENIZER_FILES

WEIGHTS = ["*.safetensors"]
REST = ["*.json", "*.jinja", "tokenizer.model", "*.txt"]
NOT_READ = ["consolidated*"]  # Mistral's repositories hold the same weights once more, under names of its own
DEMO = "demo"


def user_folder(variable: str, default: str) -> Path:
    """nanovllm/ in the folder that an environment variable names, else in ~/`default`. OSError if there is no home."""
    try:
        return Path(os.environ.get(variable) or Path.home() / default) / "nanovllm"
    except RuntimeError:
        raise OSError(f"there is no home directory, and {variable} names no folder instead") from None


def cache_folder() -> Path:
    """Where this project keeps what it downloads and compiles."""
    return user_folder("XDG_CACHE_HOME", ".cache")


def is_demo_name(model: str) -> bool:
    """Whether it names the demo model, in a form that demo_model.py may know, and nothing that lies here."""
    return model.partition(":")[0] == DEMO and not os.path.exists(model)


def check_path(name: str) -> None:
    """Raises ValueError for a path that the libraries which read checkpoints cannot be told: they want it in UTF-8."""
    try:
        os.fsencode(name)
        name.encode("utf-8")
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        if encoding == "utf-8":
            problem, remedy = "is no valid UTF-8", "rename it"
        else:
            problem = f"is not all ASCII, and this Python takes names of files to be in {encoding} (LANG, LC_ALL)"
            remedy = "set LC_ALL=C.UTF-8 or PYTHONUTF8=1, or rename it"
        raise ValueError(f"the path {name!a} {problem}; {remedy}") from None


def resolve_tokenizer(name: str) -> Path:
    """Where the tokenizer's files are: a directory, a GGUF file, or where the hub's were downloaded to."""
    check_path(name)
    if any(os.path.isfile(os.path.join(os.path.expanduser(name), file)) for file in TOKENIZER_FILES):
        return Path(os.path.expanduser(name))
    return resolve_checkpoint(name, load_format="dummy")


def resolve_checkpoint(model: str, revision: str | None = None, load_format: str = "auto") -> Path:
    """A checkpoint's directory or GGUF file: `model` itself, the demo model, or where the hub's copy was downloaded to.

    revision: of the hub's repository. load_format: "dummy" needs no weights, "gguf" and "safetensors" choose.
    """
    check_path(model)
    path = Path(os.path.expanduser(model))
    exists, is_folder = os.path.exists(path), os.path.isdir(path)  # Path's own raise for a name that is too long
    if is_folder or (exists and _is_gguf_file(path)):
        found = (is_folder and _gguf_file_in(path)) or path
        _check_format(load_format, found.is_file(), model)
        return found
    if is_demo_name(model):
        found = _demo_model(model)
        _check_format(load_format, found.is_file(), model)
        return found
    repository, _, quantization = model.partition(":")
    if exists or model.startswith((".", "/", "~")) or repository.count("/") != 1:
        problem = "is a file" if exists else "does not exist"
        known = "a checkpoint's directory, a GGUF file or a hub id like 'owner/name' (its GGUF file: 'owner/name:Q8_0')"
        raise FileNotFoundError(f"model {model!r} {problem}; give {known}")
    _check_format(load_format, bool(quantization), model)
    from huggingface_hub import snapshot_download

    try:
        if quantization:
            return _download_gguf_file(repository, quantization, revision)
        patterns = REST if load_format == "dummy" else REST + WEIGHTS
        folder = Path(snapshot_download(model, allow_patterns=patterns, ignore_patterns=NOT_READ, revision=revision))
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(
            f"model {model!r} is not a local directory and could not be downloaded from the hub: {reason}"
        ) from error
    is_adapter = (folder / "adapter_config.json").is_file()  # whoever reads one says what it lacks
    if load_format != "dummy" and not is_adapter and not any(folder.glob("*.safetensors")):
        hint = f"if it has GGUF files, choose one by its quantization, as in '{model}:Q8_0'"
        raise FileNotFoundError(f"the hub's {model!r} has no *.safetensors file; {hint}")
    return folder


def _demo_model(name: str) -> Path:
    from nanovllm.files.demo_model import DemoModelError, demo_model_path

    try:
        return demo_model_path(name)
    except DemoModelError as error:
        raise FileNotFoundError(str(error)) from error


def _check_format(load_format: str, is_gguf: bool, model: str) -> None:
    if load_format == ("safetensors" if is_gguf else "gguf"):
        problem = "is a GGUF file" if is_gguf else "is no GGUF file, or has *.safetensors beside it"
        raise FileNotFoundError(f"load_format={load_format!r}, and {model!r} {problem}")


def _is_gguf_file(path: Path) -> bool:
    """By its name, or by how it begins: Ollama calls its files sha256-...."""
    if _is_named_gguf(path.name):
        return True
    with suppress(OSError):
        if path.is_file():  # no pipe, for example
            with path.open("rb") as file:
                return file.read(4) == b"GGUF"
    return False


def _is_named_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")


def _gguf_file_in(directory: Path) -> Path | None:
    """The GGUF file of a directory that has no other weights. FileNotFoundError if it is not clear which."""
    paths = sorted(path for path in directory.iterdir() if _is_named_gguf(path.name) and not _is_tower(path.name))
    if not paths or any(directory.glob("*.safetensors")):
        return None
    if len(paths) > 1:
        names = ", ".join(path.name for path in paths)
        raise FileNotFoundError(f"{directory} has {len(paths)} GGUF files ({names}); give the path of one")
    return paths[0]


def _is_tower(name: str) -> bool:
    """Of a model that sees images, llama.cpp keeps the tower in a file beside it: mmproj-model-Q8_0.gguf."""
    return "mmproj" in name.rpartition("/")[2].lower()


def _download_gguf_file(repository: str, quantization: str, revision: str | None) -> Path:
    """The one file that is called model-Q8_0.gguf or model.Q8_0.gguf, for example; capital letters or not."""
    from huggingface_hub import hf_hub_download, list_repo_files, snapshot_download

    try:
        names = list_repo_files(repository, revision=revision)
    except Exception:
        names = []
        with suppress(Exception):  # without a network, what has been downloaded before is there
            folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
            names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        if not names:
            raise
    names = [name for name in names if _is_named_gguf(name) and not _is_tower(name)]
    ending = re.compile(rf"(.*[-./])?{re.escape(quantization)}\.gguf", re.IGNORECASE)
    found = [name for name in names if ending.fullmatch(name)]
    if len(found) != 1:
        listed = ", ".join(found or names) or "none at all"
        hint = "give the path of one that you have downloaded" if found else "files in several parts are not read"
        raise FileNotFoundError(f"{len(found)} of its GGUF files are called ...-{quantization}.gguf: {listed} ({hint})")
    return Path(hf_hub_download(repository, found[0], revision=revision))
