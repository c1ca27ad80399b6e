"""A checkpoint's tokenizer: transformers reads it."""

import logging
import re
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.files.config_json import read_json
from nanovllm.files.end_tokens import described, overriding, with_tokenizer
from nanovllm.files.prompt_length import check_growth

# transformers imports tqdm, which asks for widgets in a notebook. Our bar needs none (features/callers/notebook.py).
warnings.filterwarnings("ignore", "IProgress not found")

if TYPE_CHECKING:
    from nanovllm.checkpoint import ModelConfig

logger = logging.getLogger("nanovllm")

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in a checkpoint's directory or GGUF file. FileNotFoundError or ValueError when none works."""
    is_gguf = directory.is_file()
    if not is_gguf and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise FileNotFoundError(f"{directory} has no tokenizer (looked for {', '.join(TOKENIZER_FILES)})")
    path = directory / "tokenizer_config.json"
    if path.is_file():
        read_json(path)  # refuses one that asks to run code
    try:
        tokenizer = _from_gguf(directory) if is_gguf else _from_directory(directory)
        _make_repeatable(tokenizer, directory)
        tokenizer.decode(tokenizer("a").input_ids)
        return tokenizer
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise ValueError(f"the tokenizer in {directory} cannot be used: {error}") from error
        raise


def with_eos(
    config: "ModelConfig", tokenizer: Any, path: Path, overrides: dict[str, Any] | None = None
) -> "ModelConfig":
    """The model's configuration, with the tokenizer's end token beside those of its files; a log line names all.

    overrides: the caller's hf_overrides. If they name end tokens, or none, the tokenizer's does not count.
    """
    found = config.end_tokens
    if not overriding(overrides or {}):
        found = with_tokenizer(found, tokenizer.eos_token_id, "the tokenizer", config.vocab_size, path)
    if found:
        logger.info("End tokens: %s", ", ".join(described(found, tokenizer)))
    elif config.pooling is None:
        logger.warning("%s: no file names an end token: an answer ends where max_tokens or stop end it", path)
    return replace(config, end_tokens=found)


def _make_repeatable(tokenizer: Any, directory: Path) -> None:
    """Switch off what serves training: to split the same text now in one way, now in another."""
    if (getattr(tokenizer, "sp_model_kwargs", None) or {}).get("enable_sampling"):
        raise ValueError("it samples (enable_sampling in sp_model_kwargs); take that out of tokenizer_config.json")
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    for name in ("dropout", "alpha", "nbest_size"):  # of BPE, of Unigram
        if getattr(model, name, None) is not None:
            logger.warning("%s: the tokenizer's %s is switched off, a text always gets the same ids", directory, name)
            setattr(model, name, None)


def _from_directory(directory: Path) -> Any:
    from transformers import AutoTokenizer

    for path in directory.glob("tokenizer*.json"):  # transformers takes other versions of it, too
        check_growth(path)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        _check_packages(directory / "tokenizer.model")
    return AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False, local_files_only=True)


def _check_packages(path: Path) -> None:
    """Raises ValueError if what reads this tokenizer.model isn't installed: transformers would not always name it."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        is_tiktoken = re.fullmatch(rb"[A-Za-z0-9+/]+=* \d+\s*", file.readline(1000))
    kind, packages = ("tiktoken", ["tiktoken"]) if is_tiktoken else ("SentencePiece", ["sentencepiece", "protobuf"])
    modules = {"protobuf": "google.protobuf"}
    missing = [package for package in packages if not _is_installed(modules.get(package, package))]
    if missing:
        found = f"{path.name} is a {kind} model, which is read with {' and '.join(missing)}, not installed here"
        raise ValueError(f"{found}: run  pip install {' '.join(missing)}  (or add the model's tokenizer.json)")


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # not even the package that it is part of
        return False


def _from_gguf(path: Path) -> Any:
    from nanovllm.files.gguf_tokenizer import gguf_tokenizer

    return gguf_tokenizer(path)


def is_panic(error: BaseException) -> bool:
    """The tokenizers' Rust code has given up. Python sees no Exception then, and has no name for the class."""
    return type(error).__name__ == "PanicException"
