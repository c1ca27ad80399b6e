"""A checkpoint's tokenizer: transformers reads it."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.config_json import read_json

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer in a checkpoint's directory or GGUF file. FileNotFoundError or ValueError when none works."""
    is_gguf = directory.is_file()
    if not is_gguf and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise FileNotFoundError(f"{directory} has no tokenizer (looked for {', '.join(TOKENIZER_FILES)})")
    if (directory / "tokenizer_config.json").is_file():
        read_json(directory / "tokenizer_config.json")  # refuses one that asks to run code
    from transformers import AutoTokenizer

    try:
        options = dict(trust_remote_code=False, local_files_only=True)
        tokenizer = _from_gguf(directory) if is_gguf else AutoTokenizer.from_pretrained(str(directory), **options)
        tokenizer.decode(tokenizer("a").input_ids)
        return tokenizer
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise ValueError(f"the tokenizer in {directory} cannot be used: {error}") from error
        raise


def _from_gguf(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast  # AutoTokenizer makes the same one and takes ten times as long

    with TemporaryDirectory() as folder:  # with nothing else in it: tokenizer files beside a GGUF file would come first
        Path(folder, "model.gguf").symlink_to(path.absolute())
        return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file="model.gguf", local_files_only=True)


def is_panic(error: BaseException) -> bool:
    """The tokenizers' Rust code has given up. Python sees no Exception then, and has no name for the class."""
    return type(error).__name__ == "PanicException"
