"""A tokenizer.json whose rules make a text endless is refused before it is loaded; those of real models are not."""

import base64
import json
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.files.prompt_length import check_growth
from tests.checkpoints import SMALL
from tests.files.test_real_tokenizers import VOCABULARIES, files_of


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def charsmap(text: bytes) -> dict[str, Any]:
    """SentencePiece's table: a trie, here an empty one, and the texts that it leads to."""
    blob = struct.pack("<I", 4) + bytes(4) + b"a\0" + text + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(blob).decode()}


DOUBLING = replace("a", "aa")
UNTYPED = {name: value for name, value in DOUBLING.items() if name != "type"}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
ENDLESS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "doubled again and again": ("normalizer", [DOUBLING] * 40),
    "in another sequence": ("normalizer", [{"type": "Sequence", "normalizers": [DOUBLING] * 20}] * 2),
    "as older files write it": ("normalizer", [UNTYPED] * 40),
    "between all letters": ("normalizer", [replace("", "ab", "Regex")] * 30),
    "a few long ones": ("normalizer", [replace("a", "a" * 2000)] * 4),
    "one in front": ("normalizer", [{"type": "Prepend", "prepend": "a" * 50}, DOUBLING] * 10),
    "a table": ("normalizer", [charsmap(b"a" * 1200)] * 3),
    "bytes of bytes": ("pre_tokenizer", [BYTES] * 30),
    "of answers": ("decoder", [DOUBLING] * 40),
    "letter by letter": ("decoder", [replace("a", "ab"), replace("b", "ba")] * 20),
}
SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def with_parts(folder: Path, target: Path, place: str, parts: list[dict[str, Any]]) -> Path:
    shutil.copytree(folder, target)
    fields = json.loads((target / "tokenizer.json").read_text("utf-8"))
    fields.pop(place, None)
    fields[place] = {"type": "Sequence", SEQUENCES[place]: parts}  # behind the vocabulary
    for token in fields["added_tokens"]:
        token["normalized"] = True
    (target / "tokenizer.json").write_text(json.dumps(fields), "utf-8")
    return target


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("form", ["as it is", "with escapes", "another version"])
def test_endless_texts(name, form, checkpoint, tmp_path):
    folder = with_parts(checkpoint(), tmp_path / "model", *ENDLESS[name])
    path = folder / "tokenizer.json"
    if form == "with escapes":
        text = path.read_text("utf-8")
        for word in ("normalizer", "pre_tokenizer", "decoder", "Replace"):
            text = text.replace(word, f"\\u{ord(word[0]):04x}{word[1:]}")
        path.write_text(text, "utf-8")
    if form == "another version":
        path.rename(folder / "tokenizer.4.0.0.json")
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        config["fast_tokenizer_files"] = ["tokenizer.4.0.0.json"]
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        shutil.copy(checkpoint() / "tokenizer.json", path)
    started = time.thread_time()
    with pytest.raises(ValueError, match=r"may make a text .* times as long"):
        LLM(str(folder), **SMALL)
    assert time.thread_time() - started < 5


ORDINARY = {
    "Llama 2": [{"type": "Prepend", "prepend": "▁"}, replace(" ", "▁")],
    "T5": [charsmap("الله عليه وسلم".encode()), replace(" {2,}", "▁", "Regex")],
    "ALBERT": [
        replace("``", '"'),
        replace("''", '"'),
        {"type": "NFKD"},
        {"type": "StripAccents"},
        {"type": "Lowercase"},
    ],
    "tabs and lines": [replace("\t", "    "), replace("\n", "<br>"), {"type": "NFKC"}],
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_normalizers(name, checkpoint, tmp_path):
    folder = with_parts(checkpoint(), tmp_path / "model", "normalizer", ORDINARY[name])
    check_growth(folder / "tokenizer.json")
    if name != "T5":  # whose table is no real one
        assert LLM(str(folder), **SMALL).generate("two gulls", use_tqdm=False)[0].finished


@pytest.mark.ci
@pytest.mark.parametrize("name", VOCABULARIES)
def test_real_files(name):
    started = time.thread_time()
    check_growth(files_of(name) / "tokenizer.json")
    assert time.thread_time() - started < 1
