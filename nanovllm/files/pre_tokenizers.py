"""How a text is cut into pieces before they become tokens: the rules behind each name that a GGUF file may give.

The file has no rules, only a name (tokenizer.ggml.pre), and llama.cpp's src/llama-vocab.cpp says what the names mean.
Where that approximates the tokenizer.json of the models in question, the patterns here are tokenizer.json's. Their
syntax is that of Oniguruma, which the `tokenizers` library uses.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class PreTokenizer:
    """The rules behind one name."""

    patterns: tuple[str, ...]  # each cuts the pieces that the ones before it have left; what does not match stays, too
    ignore_merges: bool = False  # a piece that is a token becomes that token, even if no merges lead to it
    add_bos: bool = False  # where the file does not say (tokenizer.ggml.add_bos_token)
    nfc: bool = False  # the text is normalized to composed characters first
    byte_level: bool = True  # False: tokens are plain text with ▁ for a space, and bytes are tokens such as <0x0A>


CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BLANKS = r"\s+(?!\S)|\s+"
LINES = rf"\s*[\r\n]+|{BLANKS}"
SIGNS = r" ?[^\s\p{L}\p{N}]+"
GPT_2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{SIGNS}|{BLANKS}"
DIGIT = r"\p{N}"
THREE_DIGITS = r"\p{N}{1,3}"
# Groups of three digits from the right, as in 1,234,567.
THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"


def _words(digits: str, letters: str = r"\p{L}", signs: str = rf"{SIGNS}[\r\n]*", lines: str = LINES) -> str:
    """The pattern of GPT-4's tokenizer, of which many models have a variant."""
    return rf"{CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?{letters}+|{digits}|{signs}|{lines}"


def _cased_words(digits: str, contraction: str, not_letter: str = "") -> str:
    """The pattern of GPT-4o's tokenizer: a capital within a word begins a piece."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_letter}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{not_letter}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{before}{upper}*{lower}+{contraction}|{before}{upper}+{lower}*{contraction}"
    return rf"{words}|{digits}|{SIGNS}[\r\n/]*|{LINES}"


ASCII_SIGNS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
CHINESE_JAPANESE = "[一-龥\u3040-ゟ゠-ヿ]+"
CHINESE_KOREAN = "[一-龥ࠀ-一가-\ud7ff]+"


def _marked_words(lines: str) -> str:
    """The pattern of DeepSeek V3's tokenizer: a sign belongs to the Latin word after it, marks belong to letters."""
    return rf"{ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+{lines}|{BLANKS}"


# Letters of scripts that have upper and lower case, as DeepSeek LLM's tokenizer lists them.
CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌ"
    "ῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
WIDE_SIGNS = "!-/:-~！-／：-～‘-‟\u3000-。"
SCRIPTS_WITHOUT_SPACES = (
    "一-鿿㐀-䶿豈-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ"
)
HALVED_BLANKS = (
    "".join(rf"\s{{{length}}}(?!\S)|" for length in (512, 256, 128, 64, 32, 16, 8, 4)) + r"\s{1,2}(?!\S)|\s{1}"
)

LLAMA_3 = PreTokenizer((_words(THREE_DIGITS),))
LLAMA_3_BOS = replace(LLAMA_3, ignore_merges=True, add_bos=True)
QWEN_2 = PreTokenizer((_words(DIGIT),))
QWEN_2_NFC = replace(QWEN_2, nfc=True)
SINGLE_DIGITS = PreTokenizer((DIGIT, GPT_2))
PLAIN_GPT_2 = PreTokenizer((GPT_2,))
GPT_4O = PreTokenizer((_cased_words(THREE_DIGITS, f"{CONTRACTION}?"),))
DEEPSEEK_V3 = PreTokenizer((THREE_DIGITS, CHINESE_JAPANESE, _marked_words(r"[\r\n]*|\s*[\r\n]+")))
BLOOM = PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",))
COHERE_2 = PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", *GPT_4O.patterns), nfc=True)
BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
        rf"| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]|{BLANKS}",
    )
)
SPACES_AS_SIGNS = PreTokenizer((r"[^\n]+|\n+",), byte_level=False)
DEFAULT = PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"))

PRE_TOKENIZERS = {
    **dict.fromkeys(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano".split(), LLAMA_3_BOS
    ),
    **dict.fromkeys("dbrx smaug-bpe chatglm-bpe".split(), LLAMA_3),
    **dict.fromkeys("glm4 glm5".split(), replace(LLAMA_3, ignore_merges=True)),
    **dict.fromkeys("qwen2 deepseek-r1-qwen f2llmv2 stablelm2 hunyuan".split(), QWEN_2_NFC),
    **dict.fromkeys("kormo megrez solar-open grok-2".split(), QWEN_2),
    **dict.fromkeys("smollm starcoder refact codeshell exaone minerva-7b mellum2".split(), SINGLE_DIGITS),
    "command-r": replace(SINGLE_DIGITS, nfc=True),
    **dict.fromkeys(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
        "exaone4 jais trillion granite-docling".split(),
        PLAIN_GPT_2,
    ),
    **dict.fromkeys("mpt olmo modern-bert".split(), replace(PLAIN_GPT_2, nfc=True)),
    **dict.fromkeys("gpt-4o llama4 kanana2 talkie minimax-m2".split(), GPT_4O),
    "granite-embed-multi-97m": replace(GPT_4O, ignore_merges=True),
    "tekken": PreTokenizer((_cased_words(DIGIT, ""),), ignore_merges=True, add_bos=True),
    **dict.fromkeys("deepseek-v3 hunyuan-dense joyai-llm hy_v4".split(), DEEPSEEK_V3),
    "spark2_5": PreTokenizer((THREE_DIGITS, CHINESE_JAPANESE, _marked_words(r"|[\r\n]"), DIGIT)),
    "deepseek-llm": PreTokenizer(
        (r"[\r\n]", rf"\s?[{CASED_LETTERS}]+", rf"\s?[{WIDE_SIGNS}]+", r"\s+$", CHINESE_KOREAN, r"\p{N}+")
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CHINESE_KOREAN, DIGIT)),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT_2, "[0-9][0-9][0-9]")),
    "qwen35": PreTokenizer((_words(DIGIT, r"[\p{L}\p{M}]", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),), nfc=True),
    **dict.fromkeys("bloom gpt3-finnish poro-chat".split(), BLOOM),
    "viking": PreTokenizer((*BLOOM.patterns, DIGIT)),
    "jais-2": PreTokenizer((_words(THREE_DIGITS, lines=rf"\s*[\r\n]+|{HALVED_BLANKS}"),)),
    "youtu": PreTokenizer(
        (
            "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-\u303f︰-﹏]+|[ㄅ-ㄯ]+|" + CHINESE_JAPANESE,
            _cased_words(DIGIT, f"{CONTRACTION}?"),
        ),
        ignore_merges=True,
    ),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            DIGIT,
            r"[\p{P}!-/:-@\[-`{-~]",
            GPT_2,
        ),
        add_bos=True,
    ),
    **dict.fromkeys("tiny_aya cohere2moe".split(), COHERE_2),
    "kimi-k2": PreTokenizer((r"\p{Han}+", _cased_words(THREE_DIGITS, f"{CONTRACTION}?", r"&&[^\p{Han}]"))),
    "superbpe": PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    **dict.fromkeys("bailingmoe bailingmoe2 llada-moe".split(), BAILING),
    "seed-coder": PreTokenizer((_words(DIGIT, signs=r" ?[^\s\p{L}\p{N}\r\n]+"),)),
    "ufakzeka": PreTokenizer((_words(DIGIT).removeprefix(f"{CONTRACTION}|"),)),
    "afmoe": PreTokenizer((THOUSANDS, f"[{SCRIPTS_WITHOUT_SPACES}]+", _marked_words(r"[\r\n]*|\s*[\r\n]+"))),
    "laguna": PreTokenizer((r"[^\n]+|\n+", *QWEN_2.patterns)),
    "exaone-moe": PreTokenizer(
        (_words(DIGIT, r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)", rf"{SIGNS}[\r\n/]?", rf"\s*[\r\n]|{BLANKS}"),)
    ),
    "minicpm5": PreTokenizer((THREE_DIGITS, _words(r"\p{N}+")), ignore_merges=True),
    "gemma4": replace(SPACES_AS_SIGNS, add_bos=True),
    "granite-embed-multi-311m": replace(SPACES_AS_SIGNS, add_bos=True),
    "sarvam-moe": SPACES_AS_SIGNS,
}
