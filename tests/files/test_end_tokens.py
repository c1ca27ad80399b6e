"""An answer ends at every token that any of a checkpoint's files calls an end."""

import json
from pathlib import Path
from shutil import copytree

import pytest
from transformers import AutoTokenizer

from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.beam_search.params import BeamSearchParams
from nanovllm.files.end_tokens import MARKED_TEXTS, TEXTS, gguf_sources
from nanovllm.files.hub import cache_folder
from tests.checkpoints import EOS, SMALL, edit
from tests.gguf_files import write_gguf

PROMPT = [20, 21, 22]
PARAMS = SamplingParams(temperature=0, max_tokens=8)
OTHER = 300  # an end that no answer has


def answer(model: Path, **options) -> tuple[list[int], str | None]:
    (output,) = LLM(str(model), **SMALL | options).generate([PROMPT], PARAMS, use_tqdm=False)
    return output.outputs[0].token_ids, output.outputs[0].finish_reason


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    """A checkpoint whose files name OTHER only."""
    made = copytree(checkpoint("llama"), tmp_path / "model")
    edit(made / "config.json", eos_token_id=OTHER)
    edit(made / "generation_config.json", eos_token_id=OTHER)
    set_tokenizer(made, OTHER)
    return made


@pytest.fixture
def token(folder) -> int:
    """The third of the answer's eight."""
    tokens, reason = answer(folder)
    assert len(tokens) == 8 and reason == "length" and tokens[2] not in tokens[:2]
    return tokens[2]


def set_tokenizer(folder: Path, token: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(token)
    tokenizer.save_pretrained(folder)


def in_config(folder, token):
    edit(folder / "config.json", eos_token_id=token)
    return {}


def in_generation_config(folder, token):
    edit(folder / "generation_config.json", eos_token_id=[OTHER, token])
    return {}


def in_generation_config_that_gives_no_sampling(folder, token):
    return in_generation_config(folder, token) | {"generation_config": "vllm"}


def in_another_generation_config(folder, token):
    (folder / "other").mkdir()
    (folder / "other/generation_config.json").write_text(json.dumps({"eos_token_id": token}))
    return {"generation_config": str(folder / "other")}


def in_the_tokenizer(folder, token):
    set_tokenizer(folder, token)
    return {}


def in_the_tokenizer_alone(folder, token):
    edit(folder / "config.json", eos_token_id=None)
    (folder / "generation_config.json").unlink()
    return in_the_tokenizer(folder, token)


def in_the_tokenizer_without_generation_config(folder, token):
    (folder / "generation_config.json").unlink()
    return in_the_tokenizer(folder, token)


def in_another_tokenizer(folder, token):
    other = copytree(folder, folder / "tokenizer")
    set_tokenizer(other, token)
    return {"tokenizer": str(other)}


def in_overrides(folder, token):
    return {"hf_overrides": {"eos_token_id": [token]}}


PLACES = [
    in_config,
    in_generation_config,
    in_generation_config_that_gives_no_sampling,
    in_another_generation_config,
    in_the_tokenizer,
    in_the_tokenizer_alone,
    in_the_tokenizer_without_generation_config,
    in_another_tokenizer,
    in_overrides,
]


def test_a_folder_in_ones_home(folder, token, monkeypatch):
    in_another_generation_config(folder, token)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder().parent))  # compiled kernels stay where they are
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("USERPROFILE", str(folder))
    assert len(answer(folder, generation_config="~/other", allowed_local_media_path="~/other")[0]) == 3


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_whoever_names_it(folder, token, place):
    tokens, reason = answer(folder, **place(folder, token))
    assert (len(tokens), tokens[-1], reason) == (3, token, "stop")


def test_overrides_say_what_ends_and_nothing_else_does(folder, token):
    in_the_tokenizer(folder, token)
    for tokens in (OTHER, [], None):
        assert len(answer(folder, hf_overrides={"eos_token_id": tokens})[0]) == 8
    assert len(answer(folder, hf_overrides={"text_config": {"eos_token_id": OTHER}})[0]) == 8


def test_beams_end_there_too(folder, token):
    in_generation_config(folder, token)
    llm = LLM(str(folder), **SMALL)
    (output,) = llm.beam_search([PROMPT], BeamSearchParams(beam_width=2, max_tokens=8))
    assert all(token not in beam.tokens[len(PROMPT) : -1] for beam in output.sequences)


def test_who_has_named_them_is_said(folder, token, caplog):
    caplog.set_level("INFO", "nanovllm")
    in_the_tokenizer(folder, token)
    llm = LLM(str(folder), **SMALL)
    text = llm.get_tokenizer().convert_ids_to_tokens(token)
    assert llm.stats()["end_tokens"] == {token: ["the tokenizer"], OTHER: ["config.json", "generation_config.json"]}
    assert f"End tokens: {token} {text!r} (the tokenizer), {OTHER} " in caplog.text
    assert "(config.json, generation_config.json)" in caplog.text


def test_no_file_names_one(folder, caplog):
    edit(folder / "config.json", eos_token_id=None)
    edit(folder / "generation_config.json", eos_token_id=None)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            edit(folder / name, eos_token=None)
    assert len(answer(folder)[0]) == 8 and "no file names an end token" in caplog.text


def test_a_tokenizer_beyond_the_vocabulary(folder, caplog):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<|{i}|>" for i in range(321)])
    tokenizer.eos_token = "<|320|>"
    tokenizer.save_pretrained(folder)
    assert len(answer(folder)[0]) == 8
    assert "the tokenizer's end token 638 is not among the model's 320" in caplog.text


# -- GGUF -------------------------------------------------------------------------------------------------------------


def test_a_gguf_file(checkpoint, tmp_path):
    """The end of a text in its metadata, <|im_end|> in its vocabulary: an answer ends at either."""
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf")
    config = ModelConfig.from_directory(path)
    assert config.end_tokens == {EOS: ("tokenizer.ggml.eos_token_id",), 3: ("tokenizer.ggml.eot_token_id", "its text")}
    message = write_gguf(checkpoint("llama"), tmp_path / "message.gguf", **{"tokenizer.ggml.eom_token_id": 5})
    assert ModelConfig.from_directory(message).end_tokens[5] == ("tokenizer.ggml.eom_token_id",)
    assert set(LLM(str(path), **SMALL).stats()["end_tokens"]) == {EOS, 3}


def test_an_end_that_a_gguf_file_does_not_have(checkpoint, tmp_path):
    """-1 as an unsigned number, as some converters write for none."""
    none = {"tokenizer.ggml.eot_token_id": 2**32 - 1, "tokenizer.ggml.fim_sep_token_id": 5}
    path = write_gguf(checkpoint("llama"), tmp_path / "model.gguf", **none)
    ends = ModelConfig.from_directory(path).end_tokens
    assert ends == {EOS: ("tokenizer.ggml.eos_token_id",), 3: ("its text",), 5: ("tokenizer.ggml.fim_sep_token_id",)}


@pytest.mark.parametrize("text", [*TEXTS, *MARKED_TEXTS])
def test_texts_that_are_ends(text):
    for is_marked in (True, False):
        types = [1, 3 if is_marked else 1, 1]
        found = gguf_sources({"tokenizer.ggml.tokens": ["a", text, "b"], "tokenizer.ggml.token_type": types})
        assert (("its text", 1) in found) == (is_marked or text in TEXTS)


def test_in_harmony_a_message_is_no_answer():
    tokens = ["<|return|>", "<|call|>", "<|end|>"]
    of_text = [token_id for who, token_id in gguf_sources({"tokenizer.ggml.tokens": tokens}) if who == "its text"]
    assert of_text == [0, 1]
