"""Text as it grows: characters that span tokens, stop strings that span tokens."""

import random
from itertools import pairwise
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM, SamplingParams
from nanovllm.detokenizer import Detokenizer
from tests.checkpoints import SMALL, make_tokenizer
from tests.short_requests import saying

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


# -- the text is that of the tokens' bytes ----------------------------------------------------------------------------


def byte_fallback(words: list[str], decoder: decoders.Decoder | None = None) -> PreTrainedTokenizerFast:
    """A SentencePiece vocabulary: words with ▁ for a space, and a token for each byte."""
    texts = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE({text: i for i, text in enumerate(texts)}, [], unk_token="<unk>", byte_fallback=True)
    backend = Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoder or decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


def shown_one_by_one(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text after each token."""
    detokenizer, texts = Detokenizer(tokenizer), []
    for token_id in ids:
        detokenizer.append([token_id])
        texts.append(detokenizer.text)
    return texts


def test_a_line_break_before_a_broken_byte_stays():
    tokenizer = byte_fallback(["x", "▁a", "▁x"])
    ids = tokenizer.convert_tokens_to_ids(["x", "<0x0A>", "<0x81>", "▁a", "▁x"])
    assert shown_one_by_one(tokenizer, ids) == ["x", "x\n", "x\n\ufffd", "x\n\ufffd a", "x\n\ufffd a x"]
    assert Detokenizer(tokenizer).whole_text(ids) == "x\n\ufffd a x"


def byte_level(pieces: list[bytes]) -> PreTrainedTokenizerFast:
    """A vocabulary with a token for each byte, and after these the pieces: any bytes."""
    signs = signs_of_bytes()
    texts = dict.fromkeys([*signs, *("".join(signs[byte] for byte in piece) for piece in pieces)])
    backend = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_only_what_is_not_yet_a_character_is_withheld():
    """One token may end a character and begin another."""
    data = " dư…".encode()
    tokenizer = byte_level([data[:3], data[3:5]])
    assert shown_one_by_one(tokenizer, [256, 257]) == [" d", " dư"]
    assert Detokenizer(tokenizer).whole_text([256, 257]) == " dư"


WORDS = ["a", "▁a", "▁", "▁▁", "né", "日", "▁日本", "🙂", "\n", "▁x", "<tag>"]
FALLBACKS = {
    "space dropped": None,
    "space kept": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "Metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]),
}


@pytest.mark.parametrize("kind", FALLBACKS)
def test_random_pieces_of_a_byte_fallback_vocabulary(kind):
    tokenizer = byte_fallback(WORDS, FALLBACKS[kind])
    rng = random.Random(0)
    for _ in range(200):
        characters = "".join(rng.choices("aé日🙂\n", k=3)).encode()[: rng.randrange(9)]
        pieces = [bytes([byte]) for byte in characters + rng.randbytes(rng.randrange(4))]
        names = [f"<0x{piece[0]:02X}>" for piece in pieces]
        for word in rng.choices(WORDS, k=rng.randrange(6)):
            at = rng.randrange(len(names) + 1)
            names.insert(at, word)
            pieces.insert(at, word.replace("▁", " ").encode())
        if kind == "space dropped" and pieces:
            pieces[0] = pieces[0].removeprefix(b" ")
        compare_with_bytes(tokenizer, tokenizer.convert_tokens_to_ids(names), pieces)


OF_THE_FIRST = {"of the first token": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])}


@pytest.mark.parametrize("kind", FALLBACKS | OF_THE_FIRST)
@pytest.mark.parametrize("first", ["<0x20>", "▁", "▁▁", "▁a", "<0xC3>", "<tag>", "<s>"])
def test_how_an_answer_begins(copy_of, kind, first):
    """A whole text may lose the space that it begins with, whichever token that is: as transformers decodes it.

    An answer's text goes on from the prompt's, if that has any.
    """
    folder, tokenizer = copy_of("llama"), byte_fallback(WORDS, (FALLBACKS | OF_THE_FIRST)[kind])
    tokenizer.save_pretrained(folder)
    follow = [["<0x20>", "<0x20>"], ["▁", "▁a"], ["<0xA9>", "<0x20>"], ["<s>", "▁x"]]
    answers = [tokenizer.convert_tokens_to_ids([first, *names]) for names in follow]

    llm = LLM(str(folder), **SMALL)
    for prompt in ([tokenizer.bos_token_id], tokenizer.convert_tokens_to_ids(["▁a", "x"])):
        before = tokenizer.decode(prompt, skip_special_tokens=True)
        outputs = llm.generate([prompt] * 4, [*map(saying, answers)], use_tqdm=False)
        for answer, output in zip(answers, outputs, strict=True):
            assert output.outputs[0].token_ids == answer
            expected = tokenizer.decode(prompt + answer, skip_special_tokens=True)
            if "\ufffd" not in expected:
                assert before + output.outputs[0].text == expected, tokenizer.convert_ids_to_tokens(answer)


def test_random_pieces_of_a_byte_level_vocabulary(tokenizer):
    rng, bytes_of_signs = random.Random(0), {sign: byte for byte, sign in enumerate(signs_of_bytes())}
    for _ in range(200):
        ids = [rng.randrange(4, len(tokenizer)) for _ in range(12)]
        pieces = [bytes(map(bytes_of_signs.__getitem__, piece)) for piece in tokenizer.convert_ids_to_tokens(ids)]
        compare_with_bytes(tokenizer, ids, pieces)
        assert tokenizer.decode(ids).startswith(Detokenizer(tokenizer).whole_text(ids))


def signs_of_bytes() -> list[str]:
    """What a byte-level vocabulary has for byte 0, 1, ...: its visible characters, and others for the rest."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in visible else next(others)) for byte in range(256)]


def compare_with_bytes(tokenizer: Any, ids: list[int], pieces: list[bytes]) -> None:
    """With a decoder of our own: bytes that begin a character and do not end it are one replacement character."""
    shown = shown_one_by_one(tokenizer, ids)
    for length, text in enumerate(shown, 1):
        data, expected = b"".join(pieces[:length]), ""
        while data:
            beginnings = [data[:size] for size in range(1, 5) if begins_character(data[:size])]
            taken = beginnings[-1] if beginnings else data[:1]
            if taken == data and beginnings and not is_character(taken):
                break  # withheld
            expected += taken.decode() if is_character(taken) else "\ufffd"
            data = data[len(taken) :]
        assert text == expected, pieces[:length]
    assert all(later.startswith(text) for text, later in pairwise(shown))
    assert Detokenizer(tokenizer).whole_text(ids) == (shown or [""])[-1]


def is_character(data: bytes) -> bool:
    return len(data.decode("utf-8", "ignore")) == 1 and len(data.decode("utf-8", "ignore").encode()) == len(data)


def begins_character(data: bytes) -> bool:
    endings = (first + rest for first in (b"", b"\x80", b"\xbf") for rest in (b"", b"\x80", b"\x80\x80"))
    return any(is_character(data + ending) for ending in endings)


def test_special_tokens_are_left_out_unless_asked_for():
    tokenizer = byte_fallback(WORDS)
    ids = tokenizer.convert_tokens_to_ids(["<s>", "▁a", "<s>", "▁a"])
    assert Detokenizer(tokenizer).whole_text(ids) == "a a"
    assert Detokenizer(tokenizer, SamplingParams(skip_special_tokens=False)).whole_text(ids) == "<s> a<s> a"
    assert Detokenizer(tokenizer).whole_text([10**6, *ids]) == tokenizer.decode([10**6, *ids], skip_special_tokens=True)


def test_a_vocabulary_whose_tokens_depend_on_each_other():
    """BERT's: the text is still that of the stream, and of decode()."""
    texts = ["[UNK]", "un", "##happ", "##y", "!", "cat"]
    backend = Tokenizer(models.WordPiece({text: i for i, text in enumerate(texts)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    ids = [1, 2, 3, 5, 5, 1, 3]
    shown = shown_one_by_one(tokenizer, ids)
    assert shown[-1] == Detokenizer(tokenizer).whole_text(ids) == tokenizer.decode(ids) == "unhappy cat cat uny"
    assert all(later.startswith(text) for text, later in pairwise(shown))


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


def test_as_much_is_shown_as_can_be(tokenizer):
    """All but the longest ending that begins a stop string, whatever the text and the stop strings."""
    rng = random.Random(0)
    ids = {letter: tokenizer(letter, add_special_tokens=False).input_ids for letter in "ab"}
    for _ in range(100):
        stops = ["".join(rng.choices("ab", k=rng.randrange(3, 9))) + "c" for _ in range(3)]
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=stops))
        for letter in rng.choices("ab", k=40):
            detokenizer.append(ids[letter])
            text = detokenizer.text
            endings = [text[start:] for start in range(len(text) + 1)]
            held = next(ending for ending in endings if any(stop.startswith(ending) for stop in stops))
            if rng.random() < 0.5:
                assert detokenizer.visible_text() == text.removesuffix(held)


def test_no_stop_string_before_min_tokens(tokenizer):
    ids = tokenizer("xyxyxyxy").input_ids
    assert Detokenizer(tokenizer, SamplingParams(stop="y")).append(ids) == "y"
    patient = Detokenizer(tokenizer, SamplingParams(stop="y", min_tokens=len(ids) - 1))
    assert patient.append(ids) == "y" and len(patient.text) >= 5
