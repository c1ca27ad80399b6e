"""Every form of a prompt, and what is none."""

import pickle
import random
from array import array
from collections import UserList, deque
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from unicodedata import decomposition, normalize

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm.files.prompt_length import PromptTooLong, composed, length_check
from nanovllm.prompts import tokenize
from tests.checkpoints import make_tokenizer
from tests.errors import expect
from tests.faults import PanicException, plant
from tests.short_requests import TEXT, sampled


def test_every_form_of_a_prompt(llm):
    tokenizer = llm.get_tokenizer()
    ids = tokenizer(TEXT).input_ids
    forms = [TEXT, ids, {"prompt": TEXT}, {"prompt_token_ids": ids}, {"prompt": "shown", "prompt_token_ids": ids}]
    outputs = llm.generate(forms, sampled(temperature=0))
    assert [o.prompt for o in outputs] == [TEXT, None, TEXT, None, "shown"]
    assert all(o.prompt_token_ids == ids for o in outputs)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert len(llm.generate(TEXT, sampled())) == len(llm.generate(ids, sampled())) == 1
    assert llm.generate([]) == []


class Column(Sequence):
    """As a data set's: it makes its items when they are asked for."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, at):
        return self.items[at]


class Series:
    """As those of Polars and Arrow: no Sequence, and it can make a list."""

    def __init__(self, items):
        self.items = items

    def to_list(self):
        return list(self.items)


OF_ANYTHING = {
    "tuple": tuple,
    "deque": deque,
    "UserList": UserList,
    "Column": Column,
    "Series": Series,
    "array": np.array,
}
OF_NUMBERS = OF_ANYTHING | {
    "int32": partial(np.array, dtype=np.int32),
    "tensor": torch.tensor,
    "array of C": partial(array, "q"),
}


@pytest.mark.parametrize("make", OF_ANYTHING.values(), ids=OF_ANYTHING)
def test_prompts_come_in_any_sequence(llm, make):
    """Conversations, parameters and priorities, too. Each is what a list of the same items is."""

    def same(found, expected) -> bool:
        shown = [[(output.prompt, output.outputs[0].token_ids) for output in outputs] for outputs in (found, expected)]
        return shown[0] == shown[1]

    texts, params = [TEXT, "two gulls"], [sampled(temperature=0, max_tokens=2), sampled(temperature=0, max_tokens=5)]
    expected = llm.generate(texts, params)
    assert same(llm.generate(make(texts), make(params)), expected)
    assert len(llm.generate(make([TEXT]), params[0], priority=make([0]))) == 1
    chats = [[{"role": "user", "content": text}] for text in texts]
    several = Column([make(chat) for chat in chats]) if make is np.array else make(chats)
    assert same(llm.chat(several, make(params)), llm.chat(chats, params))
    assert same(llm.chat(make(chats[0]), params[0]), llm.chat(chats[0], params[0]))
    expect("2 prompts need 2 sampling_params (or one for all), found 1", llm.generate, texts, make(params[:1]))
    assert llm.generate(make([])) == []


@pytest.mark.parametrize("make", OF_NUMBERS.values(), ids=OF_NUMBERS)
def test_token_ids_come_in_any_sequence(llm, make):
    ids = [70, 80, 90]
    made = make(ids)
    for prompts in (made, [made], {"prompt_token_ids": made}, (made,), Column([{"prompt_token_ids": made}])):
        [output] = llm.generate(prompts, sampled(max_tokens=1))
        assert output.prompt_token_ids == ids and all(type(token_id) is int for token_id in output.prompt_token_ids)
    assert len(llm.generate(np.array([ids, ids]), sampled(max_tokens=1))) == 2
    assert [*llm.stream(made, sampled(max_tokens=1))][-1].prompt_token_ids == ids


@pytest.mark.parametrize("odd", [b"text", {TEXT}, {"a": 1}.items(), np.array(TEXT), iter([TEXT])], ids=range(5))
def test_what_is_no_sequence_of_prompts(llm, odd):
    expect("prompts[0]: a prompt is a string, a list of token ids or a dict", llm.generate, odd)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "the prompt is empty"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ([5] * 256, "the prompt has 256 tokens; max_model_len is 256"),
        ([5, 320], "token id 320 at position 1 is outside the vocabulary (0 to 319)"),
        ([-1], "token id -1 at position 0"),
        ([1, "a"], "whole numbers"),
        ([True, 2], "whole numbers"),
        (7, "a prompt is a string, a list of token ids or a dict"),
        (None, "a prompt is a string"),
        ({"promt": "x"}, "did you mean 'prompt'"),
        ({"prompt": 3}, "prompt must be a string, found int"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt must be a string that is not empty"),
        ("half a pair: \ud83d", "not valid Unicode"),
    ],
)
def test_prompts(llm, prompt, text):
    expect(text, llm.generate, [[5, 6], prompt])
    expect(text, llm.stream, prompt)
    assert not llm.engine.has_unfinished_requests() and llm.stats()["num_steps"] == 0


MARKS = "e" + "\u0301" * 3
TEXTS = [sign * 99 for sign in (*"x \n\x047", "the ", "\u1f82", "\u0958", "\U0001f600", "J\u030c", "A\u0300", MARKS)]
TEXTS += ["\u1112\u1161\u11ab" * 40, "<|end|>" + " " * 99, "\x85\u3000\x1c" * 30]
TEXTS += ["".join(random.Random(seed).choices("ab \u0301\x04\u00e9\U0001f600", k=99)) for seed in range(9)]
SPLITS = {name: pre_tokenizers.Split(" ", name) for name in ("removed", "isolated")}
SPACE = normalizers.Sequence([normalizers.Prepend("_"), normalizers.Replace(" ", "_")])
LONG = normalizers.Replace("aaaa", "a")
TOKENIZERS = [  # byte-level or not, normalizer, pre-tokenizer, options of the model, options of a token; longest token
    (True, None, None, {}, {}, 8),
    (True, normalizers.NFC(), SPLITS["isolated"], {}, {}, 8),
    (True, None, None, {}, dict(rstrip=True), 8),
    (True, normalizers.Strip(), None, {}, {}, 0),
    (True, None, SPLITS["removed"], {}, {}, 0),
    (True, LONG, None, {}, {}, 0),
    (False, SPACE, None, dict(byte_fallback=True, fuse_unk=True), {}, 8),
    (False, normalizers.NFC(), pre_tokenizers.Metaspace(), dict(fuse_unk=False), {}, 8),
    (False, None, None, dict(fuse_unk=True), {}, 0),
    (False, None, pre_tokenizers.WhitespaceSplit(), dict(byte_fallback=True), {}, 0),
]


@pytest.mark.parametrize("is_byte_level, normalizer, pre_tokenizer, options, token, longest", TOKENIZERS)
def test_characters_bound_tokens(is_byte_level, normalizer, pre_tokenizer, options, token, longest):
    """A text is refused by its length only where it has more tokens than fit, whatever the tokenizer does to it."""
    signs = [f"<0x{byte:02X}>" for byte in range(256)]
    if is_byte_level:
        signs = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"\u0104"})  # of "\x04": SmolLM2 has none either
    vocabulary = {text: i for i, text in enumerate(["<unk>", *signs, "a", "b", "e", "_", "xx", "xxxx", "xxxxxxxx"])}
    merges = [("x", "x"), ("xx", "xx"), ("xxxx", "xxxx")]
    vocabulary.setdefault("x", len(vocabulary))
    unknown = {} if is_byte_level else {"unk_token": "<unk>"}
    model = Tokenizer(models.BPE(vocabulary, merges, **unknown, **options))
    if normalizer is not None:
        model.normalizer = normalizer
    parts = [part for part in (pre_tokenizer, pre_tokenizers.ByteLevel() if is_byte_level else None) if part]
    if parts:
        model.pre_tokenizer = pre_tokenizers.Sequence(parts)
    model.add_special_tokens([AddedToken("<|end|>", **token)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model)
    refused = []
    for text in TEXTS:
        num_tokens = len(tokenizer(text).input_ids)
        length_check(tokenizer, num_tokens)(text)
        try:
            length_check(tokenizer, 8)(text)
        except ValueError as error:
            assert num_tokens > 8 and f"more than {longest} characters;" in str(error)
            refused.append(text)
    assert bool(refused) == bool(longest)


def test_composing_is_bounded():
    """As many characters as the bound lets stand are left when a text is composed, whatever it is made of."""
    chars = [chr(code) for code in range(0x110000) if decomposition(chr(code))]
    texts = [normalize("NFD", char) for char in chars] + ["\u1112\u1161\u11ab", "a\u0301\u0316" * 9, "\u03b9\u0344"]
    for text in texts:
        assert len(text) - sum(map(text.count, composed())) <= len(normalize("NFC", text)), ascii(text)
    assert "\u0301" in composed() and not set("a\u00e9 ") & set(composed())


def test_a_prompt_too_long_is_so_in_another_process():
    """Ray hands on what an engine raises there."""
    error = pickle.loads(pickle.dumps(PromptTooLong("it has 9 tokens", 8)))
    assert str(error) == "it has 9 tokens (this model's maximum context length is 8 tokens)"


def test_a_text_too_long_is_not_tokenized(llm, monkeypatch):
    """A prompt, and what a chat template made."""
    length = 256 * 12  # the longest token has 12 characters
    monkeypatch.setattr(llm.engine, "check_length", length_check(llm.engine.tokenizer, 256))  # as in a server
    expect("the prompt has 3072 tokens", llm.generate, "x" * length)
    fake = SimpleNamespace(chat_template="x", special_tokens_map={}, get_chat_template=lambda *_: "{{ 'x' * 9999 }}")
    monkeypatch.setattr(llm.engine, "tokenizer", fake)
    expect(
        "the prompt has 3073 characters, and no token has more than 12 characters; max_model_len is 256",
        llm.generate,
        "x" * (length + 1),
    )
    expect("the prompt has 9999 characters", llm.chat, [{"role": "user", "content": "hi"}])


def test_a_tokenizer_that_gives_up(llm, monkeypatch):
    """Its Rust code panics, which Python sees as a BaseException; what a signal handler raises passes as it is."""
    for error, seen in ((PanicException, ValueError), (TimeoutError, TimeoutError)):
        with monkeypatch.context() as patch, pytest.raises(seen):
            plant(patch, type(llm.get_tokenizer()), "__call__", [1], error)
            llm.generate("the fox")


def test_a_regex_of_the_tokenizer_that_gives_up():
    """It is the checkpoint's, and the prompt is a text like any other."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    expect("the tokenizer fails at the prompt (PanicException: Onig: Regex", tokenize, tokenizer, "x" * 100)
    expect("the prompt is not valid Unicode text (TypeError", tokenize, tokenizer, "x\ud83d")


def test_numpy_integers_are_token_ids(llm):
    ids = [5, 6, 7]
    others = llm.generate([ids, [np.int64(i) for i in ids], {"prompt_token_ids": [np.uint8(i) for i in ids]}])
    assert all(output.prompt_token_ids == ids and type(output.prompt_token_ids[0]) is int for output in others)
    assert len(llm.generate([np.int64(i) for i in ids])) == 1, "a flat list is one prompt"
    expect("token id 1000", llm.generate, [[5, 10**400]])
