"""The tokenizer of a GGUF file gives the ids that its metadata implies: vocabularies of our own making.

test_real_tokenizers.py does the same with those of real models.
"""

import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers.pre_tokenizers import ByteLevel

from nanovllm import LLM, SamplingParams
from nanovllm.files.gguf_file import GGUFFile
from nanovllm.files.prompt_length import length_check
from nanovllm.files.tokenizer import load_tokenizer
from tests.checkpoints import CORPUS, SMALL
from tests.errors import expect
from tests.gguf_files import add_metadata, write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
ALPHABET = sorted(ByteLevel.alphabet())


def spelled(text: str) -> str:
    """As a byte-level vocabulary has it."""
    return "".join(piece for piece, _ in ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text))


def load(folder: Path, **values: Any) -> Any:
    """The tokenizer of a file with these tokenizer.ggml values and nothing else."""
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    add_metadata(writer, {f"tokenizer.ggml.{name}": value for name, value in values.items()})
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(folder / "model.gguf")


def byte_level(folder: Path, special: dict[str, int] | None = None, words: tuple[str, ...] = (), **values: Any) -> Any:
    """A token for each byte, for "ab", which a merge leads to, for words that no merges lead to, and special ones."""
    special = special or {}
    texts = [*ALPHABET, "ab", *map(spelled, words), *special]
    kinds = [NORMAL] * (len(texts) - len(special)) + list(special.values())
    return load(folder, **{"model": "gpt2", "tokens": texts, "merges": ["a b"], "token_type": kinds} | values)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def test_same_ids_as_the_checkpoint_in_a_directory(checkpoint, tmp_path):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf")
    (tmp_path / "tokenizer.json").write_text("{}")  # of another model: not read
    (tmp_path / "chat_template.jinja").write_text("no")
    ours, theirs = load_tokenizer(path), load_tokenizer(checkpoint())
    for text in (*CORPUS, "", "  naïve\n\n3.14 你好 😀", "<|im_start|>user\nhi<|im_end|>", "<|bos|><|eos|>"):
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == theirs.decode(theirs(text).input_ids)
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)
    assert (ours.bos_token_id, ours.eos_token_id) == (0, 1)


# -- how a text is cut ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "x =  12", ["x", " =", "  ", "1", "2"]),
        ("smollm", "\t\t3.14", ["\t\t", "3", ".", "1", "4"]),
        ("smollm", "a\n  1. b", ["a", "\n  ", "1", ".", " b"]),
        ("gpt-2", "x =  12", ["x", " =", " ", " 12"]),
        ("llama-bpe", "I'LL pay  12345\n\n ", ["I", "'LL", " pay", " ", " ", "123", "45", "\n\n", " "]),
        ("qwen2", "pay 123!\n", ["pay", " ", "1", "2", "3", "!\n"]),
        ("qwen35", "हिन\u094dदी", ["हिन\u094dदी"]),
        ("qwen2", "हिन\u094dदी", ["ह", "िन", "\u094dद", "ी"]),
        ("tekken", "HTTPServer12 don't/\n", ["HTTPServer", "1", "2", " don", "'t", "/\n"]),
        ("gpt-4o", "fooBar don't 1234", ["foo", "Bar", " don't", " ", "123", "4"]),
        ("deepseek-v3", "1234你好吗.abc x", ["123", "4", "你好吗", ".abc", " x"]),
        ("deepseek-llm", "a\nb 123 d", ["a", "\n", "b", " ", "123", " d"]),
        ("deepseek-coder", "f(12)\n", ["f", "(", "1", "2", ")", "\n"]),
        ("falcon", "a.b 1234", ["a", ".", "b", " ", "123", "4"]),
        ("afmoe", "1234567", ["1", "234", "567"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("superbpe", "a b 1234567", ["a b ", "1", "234", "567"]),
        ("bloom", "Hi, you (all)", ["Hi", ",", " you", " (", "all", ")"]),
        ("kimi-k2", "你好abc", ["你好", "abc"]),
        ("default", "a.b  x=12345", ["a", ".", "b", " ", " x", "=", "123", "45"]),
    ],
)
def test_a_name_stands_for_rules(tmp_path, pre, text, pieces):
    cut = byte_level(tmp_path, pre=pre).backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in cut] == pieces


def test_a_word_that_no_merges_lead_to(tmp_path):
    """It is one token in some vocabularies; others follow the merges alone."""
    for pre in ("llama-bpe", "llama-v3", "llama3", "falcon3", "tekken", "pixtral", "lfm2", "minicpm5"):
        assert ids_of(byte_level(tmp_path, words=(" Việt",), pre=pre), "ab Việt") == [256, 257], pre
    letters = [256, *map(ALPHABET.index, spelled(" Việt"))]
    for pre in ("qwen2", "smollm", "gpt-2", "default"):
        assert ids_of(byte_level(tmp_path, words=(" Việt",), pre=pre), "ab Việt") == letters, pre


def test_composed_characters(tmp_path):
    """Qwen's tokenizers normalize a text, and the file does not say so."""
    apart = "e\u0301"
    for pre in ("qwen2", "qwen35"):
        assert ids_of(byte_level(tmp_path, pre=pre), apart) == [ALPHABET.index(sign) for sign in spelled("é")]
    assert ids_of(byte_level(tmp_path, pre="llama-bpe"), apart) == [ALPHABET.index(sign) for sign in spelled(apart)]


@pytest.mark.parametrize(
    ("pre", "said"),
    [
        ("default", "tokenizer.ggml.pre is 'default', the name of no rules"),
        (None, "there is no tokenizer.ggml.pre"),
        ("new-one", "tokenizer.ggml.pre is 'new-one', which nobody here knows"),
    ],
)
def test_rules_that_are_not_known(checkpoint, tmp_path, caplog, pre, said):
    path = write_gguf(checkpoint(), tmp_path / "model.gguf", **{"tokenizer.ggml.pre": pre})
    llm = LLM(str(path), **SMALL)
    [warning] = [record.getMessage() for record in caplog.records if "tokenizer.ggml" in record.getMessage()]
    assert said in warning and "what llama.cpp does by default is assumed" in warning and str(path) in warning
    cut = llm.get_tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str("a.b 12345")
    assert len(cut) == 6  # a . b and a space, 123, 45


def test_nothing_is_said_where_rules_are_known(checkpoint, tmp_path, caplog):
    for pre in ("smollm", "llama-bpe", "gpt-2"):
        load_tokenizer(write_gguf(checkpoint(), tmp_path / "model.gguf", **{"tokenizer.ggml.pre": pre}))
    sentencepiece(tmp_path, pre="default")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# -- special tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pre", "is_added"),
    [("llama-bpe", True), ("falcon3", True), ("tekken", True), ("default", False), ("qwen2", False), ("smollm", False)],
)
def test_bos_where_the_file_does_not_say(tmp_path, pre, is_added):
    special = {"<|begin_of_text|>": CONTROL, "<|eot|>": CONTROL}
    tokenizer = byte_level(tmp_path, special, pre=pre, bos_token_id=257, eos_token_id=258)
    assert tokenizer("ab").input_ids == [257, 256][not is_added :]
    for says in (True, False):
        tokenizer = byte_level(tmp_path, special, pre=pre, bos_token_id=257, eos_token_id=258, add_bos_token=says)
        assert tokenizer("ab").input_ids == [257, 256][not says :]
    tokenizer = byte_level(tmp_path, special, pre="qwen2", bos_token_id=257, eos_token_id=258, add_eos_token=True)
    assert tokenizer("ab").input_ids == [256, 258]


def test_a_bos_that_nobody_names(tmp_path, caplog):
    assert byte_level(tmp_path, pre="llama-bpe")("ab").input_ids == [256]
    assert "the file does not name one: none is added" in caplog.text


def test_words_that_a_file_calls_bos_stay_words(tmp_path):
    """As converters write it where config.json has the defaults of another model."""
    tokenizer = byte_level(tmp_path, pre="qwen2", bos_token_id=ALPHABET.index('"'), eos_token_id=ALPHABET.index("#"))
    assert tokenizer.decode(ids_of(tokenizer, 'a "b" #c'), skip_special_tokens=True) == 'a "b" #c'
    assert tokenizer.bos_token is None


def deepseek(checkpoint: Path, path: Path, **changes: Any) -> Path:
    """A tiny model whose vocabulary has DeepSeek's special tokens at the end."""
    names = ["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>"]
    known = GGUFFile(write_gguf(checkpoint, path)).metadata
    tokens = known["tokenizer.ggml.tokens"][: -len(names)] + names
    kinds = [*known["tokenizer.ggml.token_type"][: -len(names)], CONTROL, USER_DEFINED, USER_DEFINED, USER_DEFINED]
    template = "{{ bos_token }}{% for m in messages %}<｜User｜>{{ m.content }}{% endfor %}<｜Assistant｜><think>"
    changes = {
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": tokens.index(names[0]),
        "tokenizer.chat_template": template,
    } | changes
    return write_gguf(checkpoint, path, **changes)


@pytest.mark.parametrize("pre", ["deepseek-v3", "llama-bpe", "qwen2"])
def test_special_tokens_beyond_the_byte_alphabet(checkpoint, tmp_path, pre):
    """A chat of DeepSeek's, and one of the models distilled from it, which have other models' vocabularies."""
    path = deepseek(checkpoint(), tmp_path / "model.gguf", **{"tokenizer.ggml.pre": pre})
    llm = LLM(str(path), **SMALL)
    [output] = llm.chat([{"role": "user", "content": "the quick"}], SamplingParams(max_tokens=2, temperature=0))
    bos, user, assistant, think = range(316, 320)
    tokenizer = llm.get_tokenizer()
    words = ids_of(tokenizer, "the quick")
    assert output.prompt_token_ids == [bos, user, *words, assistant, think]
    assert tokenizer.decode([bos, user, *words, think]) == "<｜begin▁of▁sentence｜><｜User｜>the quick<think>"
    assert tokenizer.decode([bos, user, *words, think], skip_special_tokens=True) == "<｜User｜>the quick<think>"


def test_a_chat_has_one_bos(checkpoint, tmp_path):
    changes = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": None}
    llm = LLM(str(deepseek(checkpoint(), tmp_path / "model.gguf", **changes)), **SMALL)
    params = SamplingParams(max_tokens=1)
    [chat] = llm.chat([{"role": "user", "content": "the quick"}], params)
    [plain] = llm.generate("the quick", params)
    assert chat.prompt_token_ids.count(316) == 1 == plain.prompt_token_ids.count(316)


def test_special_tokens_of_other_vocabularies_are_text(checkpoint, tmp_path):
    """Whatever a user writes has ids that the model knows."""
    llm = LLM(str(write_gguf(checkpoint(), tmp_path / "model.gguf", **{"tokenizer.ggml.pre": "llama-bpe"})), **SMALL)
    text = "<|endoftext|></s><｜User｜><unk>[PAD7]"
    [output] = llm.generate(text, SamplingParams(max_tokens=1))
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == text
    assert max(output.prompt_token_ids) < 320


@pytest.mark.parametrize("kind", [NORMAL, UNUSED, CONTROL, None])
def test_special_tokens_of_the_wrong_kind(tmp_path, kind):
    """Some converters have them as words, and old ones have no kinds at all."""
    special = {"<|im_start|>": kind, "<｜User｜>": kind}
    changes = {"token_type": None} if kind is None else {}
    tokenizer = byte_level(tmp_path, special, pre="qwen2", **changes)
    assert ids_of(tokenizer, "<｜User｜>ab<|im_start|>") == [258, 256, 257]
    assert tokenizer.decode([258, 256, 257], skip_special_tokens=True) == "ab"


def test_flags_that_are_not_honoured(tmp_path, caplog):
    byte_level(tmp_path, pre="qwen2", add_sep_token=True, remove_extra_whitespaces=False)
    [warning] = [record.getMessage() for record in caplog.records]
    assert "tokenizer.ggml.add_sep_token is set, and is not done here" in warning


def test_tokens_of_equal_text(tmp_path):
    """The last one counts, and each can be shown."""
    tokenizer = byte_level(tmp_path, {"<x>": CONTROL, "": CONTROL, "<y>": USER_DEFINED, "ab": NORMAL}, pre="gpt-2")
    assert ids_of(tokenizer, "ab<x>") == [260, 257] and len(tokenizer) == 261
    assert tokenizer.decode([256, 258, 260]) == "abab"


# -- SentencePiece ----------------------------------------------------------------------------------------------------

WORDS = ["▁", "▁a", "b", "[", "▁[", "x", "a", "▁▁", "▁ab", "]"]


def sentencepiece(folder: Path, words: list[str] = WORDS, scores: list[float] | None = None, **values: Any) -> Any:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, "<tool>", "  \n"]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words), USER_DEFINED, USER_DEFINED]
    scores = [0.0] * 259 + (scores or [-float(i) for i in range(len(words))]) + [-1000.0] * 2
    return load(folder, **{"model": "llama", "tokens": tokens, "token_type": kinds, "scores": scores} | values)


def shown(tokenizer: Any, text: str, **options: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer(text, **options).input_ids)


def test_a_space_comes_before_the_text_and_after_special_tokens(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    assert shown(tokenizer, "[x", add_special_tokens=False) == ["▁[", "x"]
    assert shown(tokenizer, "[x") == ["<s>", "▁[", "x"]
    assert shown(tokenizer, "<s>[x</s>ab", add_special_tokens=False) == ["<s>", "▁[", "x", "</s>", "▁ab"]
    assert shown(tokenizer, " [x", add_special_tokens=False) == ["▁", "▁[", "x"]
    assert tokenizer.decode(tokenizer("ab [x").input_ids, skip_special_tokens=True) == "ab [x"


def test_no_space_where_the_file_says_so(tmp_path):
    tokenizer = sentencepiece(tmp_path, add_space_prefix=False)
    assert shown(tokenizer, "<s>[x a", add_special_tokens=False) == ["<s>", "[", "x", "▁a"]
    assert tokenizer.decode(tokenizer(" a", add_special_tokens=False).input_ids) == " a"


def test_bytes_and_user_defined_tokens(tmp_path):
    tokenizer = sentencepiece(tmp_path)
    assert shown(tokenizer, "aé\n<tool>b", add_special_tokens=False) == [
        *("▁a", "<0xC3>", "<0xA9>", "<0x0A>"),
        *("<tool>", "▁", "b"),
    ]
    assert shown(tokenizer, "x  \nb", add_special_tokens=False)[-3:] == ["  \n", "▁", "b"]
    assert tokenizer.decode(tokenizer("aé\n").input_ids, skip_special_tokens=True) == "aé\n"
    assert "<tool>" in tokenizer.decode(tokenizer("<tool>").input_ids, skip_special_tokens=True)


def test_the_best_score_is_merged_first(tmp_path):
    words = ["a", "b", "c", "ab", "bc"]
    for scores, expected in (([0, 0, 0, -2, -1], ["a", "bc"]), ([0, 0, 0, -1, -2], ["ab", "c"]), (None, ["ab", "c"])):
        scores = scores and [float(score) for score in scores]
        tokenizer = sentencepiece(tmp_path, words, scores or [-1000.0] * 5, add_space_prefix=False)
        assert shown(tokenizer, "abc", add_special_tokens=False) == expected


def test_a_token_that_is_no_word(tmp_path):
    """All of its halves would be looked at: ten gigabytes for 100,000 characters."""
    with pytest.raises(ValueError, match="token 269 has 1,001 characters"):
        sentencepiece(tmp_path, [*WORDS, "x" * 1001])


def test_bos_of_sentencepiece(tmp_path):
    """It is added unless the file says otherwise, and is 1 unless the file says otherwise."""
    assert sentencepiece(tmp_path)("x").input_ids[0] == 1
    assert sentencepiece(tmp_path, bos_token_id=2)("x").input_ids[0] == 2
    assert sentencepiece(tmp_path, add_bos_token=False)("x").input_ids[0] != 1


@pytest.fixture
def sentencepiece_llm(checkpoint, tmp_path) -> LLM:
    """A tiny model with a token for each byte, and some for words."""
    words = [*WORDS, *(f"▁w{number}" for number in range(320 - 259 - len(WORDS)))]
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    changes = {
        "model": "llama",
        "tokens": texts,
        "token_type": [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)],
        "scores": [-float(number) for number in range(320)],
        "merges": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": None,
    }
    changes = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    return LLM(str(write_gguf(checkpoint(), tmp_path / "model.gguf", **changes)), **SMALL)


def test_an_answer_of_bytes_is_the_text_of_its_stream(sentencepiece_llm):
    """Most bytes that a random model writes are no characters."""
    llm = sentencepiece_llm
    for seed in range(5):
        params = SamplingParams(max_tokens=30, temperature=2.0, seed=seed, ignore_eos=True)
        shown = [output.outputs[0].text for output in llm.stream("ab [x", params)]
        [whole] = llm.generate("ab [x", params)
        assert all(later.startswith(text) for text, later in pairwise(shown))
        assert shown[-1] == whole.outputs[0].text and "\ufffd" in shown[-1]


def test_a_chat_of_sentencepiece(sentencepiece_llm):
    template = "{{ bos_token }}[{{ messages[0].content }}]"
    params = SamplingParams(max_tokens=1)
    [output] = sentencepiece_llm.chat([{"role": "user", "content": "x a"}], params, chat_template=template)
    tokens = sentencepiece_llm.get_tokenizer().convert_ids_to_tokens(output.prompt_token_ids)
    assert tokens == ["<s>", "▁[", "x", "▁a", "]"]


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenized(sentencepiece_llm, monkeypatch):
    engine = sentencepiece_llm.engine
    monkeypatch.setattr(engine, "check_length", length_check(engine.tokenizer, engine.kv_pool.max_model_len))
    expect("no token has more than 6 characters", sentencepiece_llm.generate, "x" * 100_000)


# -- what is wrong with it --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model": "rwkv"}, "tokenizer.ggml.model must be llama, gpt2 or gemma4, found 'rwkv'; name another tokenizer"),
        ({"tokens": None}, "there is no tokenizer.ggml.tokens; name another"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens has entries of a wrong type"),
        ({"token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for 257 tokens"),
        ({"merges": None}, "there is no tokenizer.ggml.merges"),
        ({"pre": 3}, "tokenizer.ggml.pre must be of type str, found 3"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token must be of type bool, found 1"),
        ({"bos_token_id": "<s>"}, "tokenizer.ggml.bos_token_id must be of type int"),
    ],
)
def test_broken_metadata(tmp_path, changes, text):
    expect(text, byte_level, tmp_path, **changes)


def test_ids_beyond_the_vocabulary(tmp_path, caplog):
    assert byte_level(tmp_path, pre="gpt-2", padding_token_id=2**32 - 1).pad_token is None
    assert "padding_token_id is 4294967295, and there is no such token" in caplog.text


def test_templates_by_name(checkpoint, tmp_path):
    named = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    tokenizer = load_tokenizer(write_gguf(checkpoint(), tmp_path / "model.gguf", **named))
    assert tokenizer.get_chat_template() == "plain"
    assert tokenizer.get_chat_template(tools=[{}]) == "with tools"
