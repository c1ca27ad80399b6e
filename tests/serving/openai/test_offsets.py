"""text_offset: where tokens begin in a text, whatever bytes they are."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.files.token_bytes import TokenBytes, token_bytes
from nanovllm.serving.openai.offsets import MAX_OPEN, TextOffsets, byte_name, is_text
from tests.checkpoints import make_tokenizer

TOKENIZER = make_tokenizer()
KNOWN = token_bytes(TOKENIZER)
TEXTS = st.text(st.sampled_from("ab é😀你 \n<|") | st.characters(codec="utf-8"), max_size=30)


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.randoms(use_true_random=False))
def test_of_a_text(text, rng):
    """Every tokenization of it, here and there a special token that is not shown."""
    token_ids = []
    for byte in text.encode():
        token_ids += [rng.choice([0, 1, 2])] if rng.random() < 0.1 else []
        token_ids.append(KNOWN.all.index(bytes([byte])))
    for ids in (token_ids, TOKENIZER(text, add_special_tokens=False).input_ids):
        for is_whole in (True, False):
            offsets = TextOffsets(KNOWN).of(ids, text, is_whole)
            assert offsets == sorted(offsets)
            for token_id, at in zip(ids, offsets, strict=True):
                own = KNOWN.of(token_id)
                if token_id not in KNOWN.special_ids:
                    assert own in text[at:].encode() and (not is_text(own) or text.startswith(own.decode(), at))
        if KNOWN.special_ids.isdisjoint(ids):
            shown = text[: len(text) // 2]
            assert TextOffsets(KNOWN).of(ids, shown, is_whole=False) == TextOffsets(KNOWN).of(ids, text, is_whole=True)


@settings(max_examples=30, deadline=None)
@given(TEXTS, st.randoms(use_true_random=False))
def test_of_an_answer_that_grows(text, rng):
    """What is kept from one call to the next changes nothing, though a stop string may hold text back."""
    token_ids = [KNOWN.all.index(bytes([byte])) for byte in (text * 4).encode()]
    for place in rng.sample(range(len(token_ids)), len(token_ids) // 8):
        token_ids[place] = rng.choice([0, 1, 2, 200])  # special ones, and one that breaks a character off
    for ids in (token_ids, TOKENIZER(text * 4, add_special_tokens=False).input_ids):
        whole, growing, first, num = TOKENIZER.decode(ids, skip_special_tokens=True), TextOffsets(KNOWN, 7), 0, 0
        while num < len(ids):
            num = min(len(ids), num + rng.randrange(1, 6))
            is_whole, shown = num == len(ids), TOKENIZER.decode(ids[:num], skip_special_tokens=True)
            shown = whole if is_whole else shown.rstrip("\ufffd")[: rng.choice([None, -1, -9])]
            found = growing.of(ids[:num], shown, is_whole, first)
            assert found == [7 + at for at in TextOffsets(KNOWN).of(ids[:num], shown, is_whole)[first:]]
            first = num


def test_tokens_without_text_cost_what_is_new(monkeypatch):
    """Special tokens that are not shown, and no text that would say so."""
    read, of = [], TokenBytes.of
    monkeypatch.setattr(TokenBytes, "of", lambda self, *given: read.append(given) or of(self, *given))
    growing, ids, num_tokens = TextOffsets(KNOWN, 7), [1] * 1000, 1000
    for num in range(1, num_tokens + 1):
        assert growing.of(ids[:num], "", False, num - 1) == [7]
    assert len(read) < 2 * MAX_OPEN * num_tokens
    ids += TOKENIZER("two").input_ids
    assert growing.of(ids, "two", True, num_tokens) == [7 + at for at in TextOffsets(KNOWN).of(ids, "two", True)][1000:]


def test_of_bytes_that_are_no_character():
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.randrange(4, 260) for _ in range(12)] + TOKENIZER("the end").input_ids
        text = TOKENIZER.decode(ids)
        offsets = TextOffsets(KNOWN).of(ids, text, is_whole=True)
        assert offsets == sorted(offsets) and all(0 <= at <= len(text) for at in offsets)
        assert text.startswith("the", offsets[12]) and text[offsets[12] :] == "the end"


@pytest.mark.parametrize(
    ("text", "expected"), [("two gulls", [0, 3]), ("two gul", [0, 3]), ("two", [0, 3]), ("tw", [0, 2]), ("", [0, 0])]
)
def test_of_a_text_that_was_cut(text, expected):
    ids = TOKENIZER("two").input_ids[:1], TOKENIZER(" gulls").input_ids[:1]
    assert [KNOWN.of(i) for (i,) in ids] == [b"two", b" gulls"]
    assert TextOffsets(KNOWN).of([ids[0][0], ids[1][0]], text, is_whole=True) == expected


def test_names():
    assert byte_name(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert is_text("\ufffd".encode()) and is_text(b"") and not is_text(b"\x80")
