"""Texts of many kinds, for tokenizers to be compared on."""

import random
from collections.abc import Iterable

WORDS = """
the quick brown fox don't I'LL we've Việt Tiếng được không từ 你好 世界 中文分词 こんにちは カタカナ 東京 한국어
안녕하세요 مرحبا بالعالم שלום हिन\u094dदी क\u094dषेत\u094dर ภาษาไทย Ελληνικά Привет мир naïve Straße ǅungla ʼtis
café cafe\u0301 A\u030angström ﬁn ①② ½ ² Ⅷ ٣٤ १२३ x_y camelCase HTTPServer snake_case_name __init__ self.x != == =>
-> :: // /* */ <!-- --> @param #include https://example.com/a?b=c&d=1 foo@bar.org C:\\Users\\x $100.50 50% 3.14
1,234,567 2024-01-02 0xFF 1e-5 42 7 1234567890 007 [INST] [/INST] <<SYS>> </s> <s> <unk> <pad> (a) {b} [c] "quoted"
'single' `code` … — – “typo” ‘graphic’ « » ¿ ¡ § © ™ ♥ ∑ √ 👍 🙂 👩\u200d👩\u200d👧 🏳️\u200d🌈 🇩🇪 👋🏽 🚀🚀
z\u0336a\u0336l\u0336g\u0336o\u0336 a\u0310éö\u0332 é\u0301\u0301 \u200b\u200d\ufeff \xa0 \u3000 \u2028 \x00 \x1b[0m
\x7f \x85
""".replace("\n", " ").split(" ")
PIECES = [word for word in WORDS if word]
BLANKS = [" "] * 3 + ["", ""]
BLANKS += ["  ", "   ", "    ", "\n", "\n\n", "\n\n\n\n", "\r\n", "\t", "\t\t", " \n", "\n  ", " \t "]
WHOLE = [
    "",
    " ",
    "x =  12",
    "\t\t3.14",
    "a\n  1. b",
    "def f(x):\n    return x ** 2  # squared\n\n\nif __name__ == '__main__':\n\tprint(f(12))\n",
    "for (int i = 0; i < 100; ++i) { a[i] += b[i] * 3; }",
    '{"name": "f", "arguments": {"x": [1, 2, 3], "y": null}}',
    "SELECT * FROM t WHERE id IN (1, 22, 333, 4444, 55555);",
    "Cửa Việt là một thị trấn. Việt Nam đẹp lắm.",
    "He's said: 'RE you sure? I'M not, we'Ve a'lL been there",
    "   leading and trailing   ",
    "\n\n\n \n\n\t \t\t \t\n  \n   \n    \n     \n",
]


def varied_texts(special: Iterable[str] = (), count: int = 300, seed: int = 0) -> list[str]:
    """The same ones each time. special: a vocabulary's special tokens, which then occur as text."""
    rng = random.Random(seed)
    special = list(special)
    texts = list(WHOLE)
    while len(texts) < count:
        pieces = rng.choices(PIECES, k=rng.randrange(1, 14))
        if special and rng.random() < 0.3:
            pieces.insert(rng.randrange(len(pieces) + 1), rng.choice(special))
        if rng.random() < 0.1:
            pieces.append("".join(map(chr, rng.choices(range(0x20, 0x3000), k=6))))
        texts.append("".join(piece + rng.choice(BLANKS) for piece in pieces))
    return texts[:count]
