"""bad_words: no tokenization of a word comes, and other words do."""

import gc
import random
import weakref

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizer, PreTrainedTokenizerFast

from nanovllm import SamplingParams
from nanovllm.features.logits_processors.bad_words import BadWords
from nanovllm.files.token_bytes import byte_of_sign, token_bytes
from tests.checkpoints import make_tokenizer

PIECES = ["a", "b", "(a", " a", "ab", "b,", "abc", "c", "cab", "\n", "\n\n", " \n", ".\n"]
PIECES += ["é", " é", "你", "你好", "(你"]


def byte_level(pieces):
    """A tokenizer with these tokens, and one for each byte."""
    letters = {byte: letter for letter, byte in byte_of_sign().items()}
    names = ["".join(letters[byte] for byte in piece.encode()) for piece in pieces]
    vocab = {name: i for i, name in enumerate(dict.fromkeys([*letters.values(), *names]))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level(PIECES)


def ids_of(tokenizer, *texts):
    known = token_bytes(tokenizer).all
    return [known.index(text if isinstance(text, bytes) else text.encode()) for text in texts]


def is_banned(tokenizer, word, *texts):
    *before, last = ids_of(tokenizer, *texts)
    return last in BadWords(tokenizer, [word], len(tokenizer)).banned(before)


@pytest.mark.parametrize(
    ("word", "texts"),
    [
        ("ab", ["ab"]),
        ("ab", ["a", "b"]),
        ("ab", [" a", "b"]),
        ("ab", ["(a", "b"]),
        ("ab", [" ", "a", "b"]),
        ("ab", ["c", "\n", "a", "b,"]),
        (" ab", ["a", "b"]),
        ("abc", ["ab", "c"]),
        ("a b", ["a", " ", "b"]),
        ("\n", ["\n\n"]),
        ("\n", [".\n"]),
        ("\n\n", [" \n", "\n"]),
        ("é", [b"\xc3", b"\xa9"]),
        ("é", [" é"]),
        ("你", ["你好"]),
        ("好", ["你好"]),
        ("你好", ["(你", b"\xe5", b"\xa5", b"\xbd"]),
    ],
)
def test_every_way_is_banned(tokenizer, word, texts):
    assert is_banned(tokenizer, word, *texts)
    *before, last = ids_of(tokenizer, *texts)
    both = BadWords(tokenizer, ["xyz", word], len(tokenizer))
    assert last in both.banned(ids_of(tokenizer, "c", "a", "你") + before), "whatever comes first"


@pytest.mark.parametrize(
    ("word", "texts"),
    [("ab", ["abc"]), ("ab", ["cab"]), ("ab", ["a"]), ("ab", ["a", " ", "b"]), ("abc", ["a", "b"]), ("a", ["cab"])],
)
def test_other_words_are_not(tokenizer, word, texts):
    assert not is_banned(tokenizer, word, *texts)


def test_a_long_word_is_tried_where_a_token_can_end_it(tokenizer):
    word = "ab" * 2000 + "ca"
    bad = BadWords(tokenizer, [word], len(tokenizer))
    *before, last = ids_of(tokenizer, *["ab"] * 2000, "c", "a")
    assert last in bad.banned(before) and last not in bad.banned(before[1:])
    assert [*bad._words[0].rests] == [4001]


def test_pieces_of_sentencepiece():
    vocab = {
        name: i for i, name in enumerate(["<unk>", "▁so", "rry", "▁", "so", "<0x73>", "<0x6F>", "▁sorry", "▁(", "x"])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_bytes(tokenizer).all[1:9] == [b" so", b"rry", b" ", b"so", b"s", b"o", b" sorry", b" ("]
    bad = BadWords(tokenizer, ["sorry"], len(tokenizer))
    for before, last in (([], 7), ([1], 2), ([9, 4], 2), ([8, 5, 6], 2), ([3, 5, 6], 2)):
        assert last in bad.banned(before)
    assert 2 not in bad.banned([1, 9]) and 2 not in bad.banned([6])


def test_words_that_were_added():
    """Gemma's tokenizer has its line breaks and runs of spaces among them; only special tokens are no text."""
    tokenizer = byte_level(PIECES)
    tokenizer.add_tokens(["\n\n\n", "<call>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|end|>"]})
    breaks, call, end = tokenizer.convert_tokens_to_ids(["\n\n\n", "<call>", "<|end|>"])
    assert breaks in BadWords(tokenizer, ["\n"], len(tokenizer)).banned([])
    assert call in BadWords(tokenizer, ["call"], len(tokenizer)).banned([])
    assert end not in BadWords(tokenizer, ["end"], len(tokenizer)).banned([])
    assert end in token_bytes(tokenizer).special_ids
    assert BadWords(tokenizer, ["<|end|>"], len(tokenizer)).banned([]).tolist() == [end], "as the whole word"


def test_bytes_are_the_tokens_own():
    """All of them together are the text, whatever it is."""
    tokenizer, rng = make_tokenizer(), random.Random(0)
    known = token_bytes(tokenizer)
    for _ in range(50):
        text = "".join(rng.choice("aé😀 \n你the quick\u2581<|eos|>") for _ in range(20))
        assert b"".join(map(known.of, tokenizer(text).input_ids)).decode() == text
    assert known.of(10**9) == b"" and known is token_bytes(tokenizer)


class Letters(PreTrainedTokenizer):
    """A tokenizer of transformers' own code."""

    vocab_size = 26

    def get_vocab(self):
        return {chr(97 + i): i for i in range(26)}

    def _convert_token_to_id(self, token):
        return ord(token[0]) - 97

    def _convert_id_to_token(self, index):
        return chr(97 + index)


@pytest.mark.parametrize("make", [make_tokenizer, Letters])
def test_bytes_go_with_their_tokenizer(make):
    tokenizer = make()
    assert len(token_bytes(tokenizer).all) == len(tokenizer)
    left = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("word", ["the", "e", "\n", "gulls", "q"])
def test_an_answer_has_none_of_them(llm, word):
    """Greedy, and pushed: each token that has a part of the word is made likely."""
    tokenizer = llm.get_tokenizer()
    known = token_bytes(tokenizer)
    bias = {t: 20.0 for t in range(4, 320) if (text := known.of(t)) and text.strip(b" ") in word.encode()}
    given = dict(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, logit_bias=bias, n=4)
    [free], [held] = (llm.generate([[5, 6]], SamplingParams(**given, bad_words=bad)) for bad in (None, [word]))
    assert all(word in sample.text for sample in free.outputs)
    bad = BadWords(tokenizer, [word], 320)
    for sample in held.outputs:
        assert len(sample.token_ids) == 40
        assert not any(token in bad.banned(sample.token_ids[:at]) for at, token in enumerate(sample.token_ids))
        assert word not in sample.text or word in ("the", "e", "q"), "these are parts of other words"
    assert len(set(free.outputs[0].token_ids)) > 1


WORDS = """sorry hello world python apologize unfortunately cannot please error certainly however language model
never""".split()


def test_common_words_of_a_real_tokenizer(demo_checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(demo_checkpoint)
    num_ways = 0
    for word in WORDS:
        bad = BadWords(tokenizer, [word], len(tokenizer))
        for text in (word, f" {word}", f"({word}", f"\n{word}", f'"{word}', f" {word[:3]}", f" {word[:2]}", word[0]):
            token_ids = tokenizer(text).input_ids
            rest = word[len(text.strip()) :] if len(text.strip()) < len(word) else ""
            token_ids += tokenizer(rest).input_ids if rest else []
            num_ways += token_ids[-1] in bad.banned(token_ids[:-1])
            assert token_ids[-1] in bad.banned(token_ids[:-1]), (word, text)
    assert num_ways == 8 * len(WORDS)
