"""Text as it grows: characters that span tokens, stop strings that span tokens."""

import random

import pytest

from nanovllm import SamplingParams
from nanovllm.detokenizer import Detokenizer
from tests.checkpoints import make_tokenizer

TEXTS = [
    "héllo wörld",
    "日本語のテキスト",
    "🙂👩‍👩‍👧 emoji",
    "a\u0301 combining",
    "plain text\nwith lines",
    "tab\t \x00 end",
]


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.mark.parametrize("text", TEXTS)
def test_text_grows_by_whole_characters(tokenizer, text):
    detokenizer, shown = Detokenizer(tokenizer), ""
    for token_id in tokenizer(text).input_ids:
        detokenizer.append([token_id])
        assert detokenizer.text.startswith(shown) and text.startswith(detokenizer.text)
        shown = detokenizer.text
    assert shown == text


def test_bytes_that_are_no_character_do_not_hold_the_text_back_for_ever(tokenizer):
    broken = tokenizer("🙂").input_ids[:1] * 200
    detokenizer = Detokenizer(tokenizer)
    detokenizer.append(broken)
    assert len(detokenizer.text) > 100


def test_random_tokens_show_a_prefix_of_the_whole_text(tokenizer):
    rng = random.Random(0)
    for _ in range(50):
        ids = [rng.randrange(4, len(tokenizer)) for _ in range(60)]
        detokenizer = Detokenizer(tokenizer)
        detokenizer.append(ids)
        assert tokenizer.decode(ids).startswith(detokenizer.text)


@pytest.mark.parametrize(
    ("stop", "expected", "found"),
    [
        (("fox",), "the quick brown ", "fox"),
        (("n f",), "the quick brow", "n f"),
        (("dog", "quick brown f"), "the ", "quick brown f"),
        (("cat",), "the quick brown fox jumps", None),
        (("the",), "", "the"),
    ],
)
def test_stop_strings_across_token_borders(tokenizer, stop, expected, found):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stop))
    result = None
    for token_id in tokenizer("the quick brown fox jumps").input_ids:
        result = detokenizer.append([token_id])
        assert not any(s in detokenizer.visible_text() for s in stop)
        assert expected.startswith(detokenizer.visible_text())
        if result:
            break
    assert (result, detokenizer.text) == (found, expected)


def test_what_may_become_a_stop_string_is_not_shown_yet(tokenizer):
    detokenizer = Detokenizer(tokenizer, SamplingParams(stop="<end>"))
    detokenizer.append(tokenizer("a <en").input_ids)
    assert (detokenizer.text, detokenizer.visible_text()) == ("a <en", "a ")
    detokenizer.append(tokenizer("x").input_ids)
    assert detokenizer.visible_text() == "a <enx"


def test_no_stop_string_before_min_tokens(tokenizer):
    ids = tokenizer("xyxyxyxy").input_ids
    assert Detokenizer(tokenizer, SamplingParams(stop="y")).append(ids) == "y"
    patient = Detokenizer(tokenizer, SamplingParams(stop="y", min_tokens=len(ids) - 1))
    assert patient.append(ids) == "y" and len(patient.text) >= 5
