"""A GGUF file's tokenizer, built from its metadata with the `tokenizers` library.

The file has the tokens, merges or scores, what kind each token is, a few flags, and the name of the rules by which a
text is cut before merges (pre_tokenizers.py). What it leaves out is decided as llama.cpp does (src/llama-vocab.cpp), so
that the same file gives the same token ids.
"""

import logging
import re
from enum import IntEnum
from pathlib import Path
from typing import Any

from nanovllm.checks.values import shorten
from nanovllm.files.gguf_file import GGUFFile
from nanovllm.files.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from nanovllm.files.token_bytes import WORD_BEGIN

logger = logging.getLogger("nanovllm")

KEY = "tokenizer.ggml."
TEMPLATE = "tokenizer.chat_template"
SENTENCEPIECE, BYTE_LEVEL, PLAIN_BPE = "llama", "gpt2", "gemma4"  # what tokenizer.ggml.model may be
LONGEST_MERGED = 1000  # characters; training splits longer ones off, and all halves of it would be looked at
REPEATED = "\ufdd0"  # no text has this character
NAMED_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where the file does not say
NOT_HONOURED = ("add_sep_token", "remove_extra_whitespaces", "normalizer.lowercase", "normalizer.strip_accents")
LOOKS_SPECIAL = re.compile(r"<[|｜]\S+[|｜]>")
LOOKS_SPECIAL_IF_NAMED = re.compile(r"<\S+>|\[\S+\]")  # if the file names it as its EOS or the like


class Kind(IntEnum):
    """Kinds of tokens: tokenizer.ggml.token_type."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3  # part of no text: a chat template writes it
    USER_DEFINED = 4  # a piece of text that is always this one token
    UNUSED = 5
    BYTE = 6


FOUND_FIRST = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER_DEFINED)  # a text is searched for these before it is cut


def gguf_tokenizer(path: Path) -> Any:
    """A transformers.PreTrainedTokenizerFast. Raises ValueError for a file without one, or with broken metadata."""
    from transformers import PreTrainedTokenizerFast

    vocabulary = GGUFVocabulary(GGUFFile(path))
    named = vocabulary.named_tokens()
    add_bos = vocabulary.adds_bos and "bos_token" in named
    if vocabulary.adds_bos and not add_bos:
        logger.warning("%s: texts should begin with a BOS, but the file does not name one: none is added", path)
    return PreTrainedTokenizerFast(
        tokenizer_object=vocabulary.backend(named.get("unk_token")),
        add_bos_token=add_bos,
        add_eos_token=vocabulary.get("add_eos_token", bool, False) and "eos_token" in named,
        chat_template=vocabulary.chat_template(),
        clean_up_tokenization_spaces=False,
        **named,
    )


class GGUFVocabulary:
    """What a file's metadata says of its tokens.

    texts, kinds, scores: of each id; ids: {text: id}; rules: how a text is cut. model: SENTENCEPIECE, ...
    """

    def __init__(self, file: GGUFFile) -> None:
        """Raises ValueError."""
        self.path, self.metadata = file.path, file.metadata
        self.model = self.get("model", str, None)
        if self.model not in (SENTENCEPIECE, BYTE_LEVEL, PLAIN_BPE):
            known = f"{KEY}model must be {SENTENCEPIECE}, {BYTE_LEVEL} or {PLAIN_BPE}"
            raise ValueError(f"{known}, found {shorten(self.model)}; name another tokenizer (the option `tokenizer`)")
        self.texts = list(self._list("tokens", str))
        if not self.texts:
            raise ValueError(f"there is no {KEY}tokens; name another tokenizer (the option `tokenizer`)")
        self.scores = self._list("scores", (int, float), len(self.texts)) or [0.0] * len(self.texts)
        self.named_ids = self._named_ids()
        self.kinds = self._kinds()
        self.ids = {text: token_id for token_id, text in enumerate(self.texts)}
        # A text leads to one id: of tokens with the same text, all but the last get a mark, which decoding drops.
        self.repeated = [i for i, text in enumerate(self.texts) if self.ids[text] != i]
        for token_id in self.repeated:
            self.texts[token_id] += f"{REPEATED}{token_id}"
            self.ids[self.texts[token_id]] = token_id
        self.rules = self._rules()
        self.adds_bos = self.get("add_bos_token", bool, self.rules.add_bos)
        for name in NOT_HONOURED:
            if self.get(name, bool, False):
                logger.warning("%s: %s%s is set, and is not done here: token ids may be wrong", self.path, KEY, name)
        self.adds_space = self.model == SENTENCEPIECE and self.get("add_space_prefix", bool, True)

    def get(self, name: str, kind: Any, default: Any) -> Any:
        """Raises ValueError for a value of another type."""
        value = self.metadata.get(KEY + name, default)
        if value is not default and type(value) is not kind:
            raise ValueError(f"{KEY}{name} must be of type {kind.__name__}, found {shorten(value)}")
        return value

    def named_tokens(self) -> dict[str, str]:
        """{transformers' name, as bos_token: the text}, of those that the file names by their ids.

        Files name BOS and EOS that are ordinary words, too, where a model's config.json has the defaults of some other
        model. A word stays a word, unless each text begins with it.
        """
        named = {}
        for name, key in NAMED_IDS.items():
            token_id = self.named_ids.get(key)
            if token_id is None or (self.kinds[token_id] not in FOUND_FIRST and not (key == "bos" and self.adds_bos)):
                continue
            named[name] = self.texts[token_id]
        return named

    def chat_template(self) -> str | dict[str, str] | None:
        """One text, or several by name ("default", "tool_use")."""
        named = {
            key.removeprefix(TEMPLATE).removeprefix(".") or "default": text
            for key, text in self.metadata.items()
            if key == TEMPLATE or key.startswith(f"{TEMPLATE}.")
        }
        if wrong := [text for text in named.values() if not isinstance(text, str)]:
            raise ValueError(f"{TEMPLATE} must be a text, found {shorten(wrong[0])}")
        return named["default"] if named.keys() == {"default"} else named or None

    def backend(self, unk_token: str | None) -> Any:
        """The tokenizer without what transformers adds: a BOS or EOS, and a template."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
        from tokenizers import Regex as Pattern

        cuts: list[Any] = [pre_tokenizers.Split(Pattern(pattern), "isolated") for pattern in self.rules.patterns]
        if self.rules.byte_level:
            model = models.BPE(self.ids, self._merges(), ignore_merges=self.rules.ignore_merges)
            cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
            changes: list[Any] = [normalizers.NFC()] if self.rules.nfc else []
            steps: list[Any] = [decoders.ByteLevel()]
        else:
            model = models.BPE(self.ids, self._merges(), unk_token=unk_token, fuse_unk=True, byte_fallback=True)
            changes = [normalizers.Prepend(WORD_BEGIN)] if self.adds_space else []
            changes.append(normalizers.Replace(" ", WORD_BEGIN))
            steps = [decoders.Replace(WORD_BEGIN, " "), decoders.ByteFallback(), decoders.Fuse()]
            steps += [decoders.Strip(" ", 1, 0)] if self.adds_space else []
        if self.repeated:
            steps.insert(0, decoders.Replace(Pattern(REPEATED + r"\d+"), ""))
        backend = Tokenizer(model)
        if changes:
            backend.normalizer = normalizers.Sequence(changes)
        if cuts:
            backend.pre_tokenizer = pre_tokenizers.Sequence(cuts)
        backend.decoder = decoders.Sequence(steps) if len(steps) > 1 else steps[0]
        backend.add_tokens(
            [
                AddedToken(text, normalized=False, special=kind != Kind.USER_DEFINED)
                for text, kind in zip(self.texts, self.kinds, strict=False)
                if kind in FOUND_FIRST and text and REPEATED not in text
            ]
        )
        return backend

    def _named_ids(self) -> dict[str, int]:
        """{the file's name, as bos: id}, of tokens that are there."""
        defaults = SENTENCEPIECE_IDS if self.model == SENTENCEPIECE else {}
        named = {}
        for key in (*NAMED_IDS.values(), "eot", "eom"):
            token_id = self.get(f"{key}_token_id", int, defaults.get(key))
            if token_id is not None and not 0 <= token_id < len(self.texts):
                logger.warning("%s: %s%s_token_id is %d, and there is no such token", self.path, KEY, key, token_id)
            elif token_id is not None:
                named[key] = token_id
        return named

    def _kinds(self) -> list[int]:
        """Special tokens are control tokens: some converters have it wrong, and old ones have no kinds at all."""
        kinds = self._list("token_type", int, len(self.texts)) or [Kind.NORMAL] * len(self.texts)
        named = set(self.named_ids.values())
        found = []
        for token_id, (text, kind) in enumerate(zip(self.texts, kinds, strict=False)):
            looks_special = LOOKS_SPECIAL_IF_NAMED if token_id in named else LOOKS_SPECIAL
            is_wrong = kind in (Kind.NORMAL, Kind.UNUSED) and looks_special.fullmatch(text)
            found.append(Kind.CONTROL if is_wrong else kind)
        return found

    def _rules(self) -> PreTokenizer:
        """Those that the file names. A warning says so if it names none, or none that are known."""
        if self.model == SENTENCEPIECE:
            return PreTokenizer((), add_bos=True, byte_level=False)
        name = self.get("pre", str, "gemma4" if self.model == PLAIN_BPE else "")
        if name in PRE_TOKENIZERS:
            return PRE_TOKENIZERS[name]
        if name == "default":
            found = f"{KEY}pre is 'default', the name of no rules"
        elif name:
            found = f"{KEY}pre is {shorten(name)}, which nobody here knows"
        else:
            found = f"there is no {KEY}pre"
        logger.warning(
            "%s: %s. So the file does not say how a text is cut into pieces before they become tokens; what llama.cpp "
            "does by default is assumed, and the model may have learned something else. If answers are bad, name the "
            "original checkpoint's tokenizer (the option `tokenizer`), or convert the file again",
            self.path,
            found,
        )
        return DEFAULT

    def _merges(self) -> list[tuple[str, str]]:
        if self.model == SENTENCEPIECE:
            return self._merges_by_score()
        merges = self._list("merges", str)
        if not merges:
            raise ValueError(f"there is no {KEY}merges, so this tokenizer cannot make tokens of a text")
        pairs = []
        for merge in merges:
            at = merge.find(" ", 1)
            left, right = merge[:at], merge[at + 1 :]
            if {left, right, left + right} <= self.ids.keys():  # the others lead to no token
                pairs.append((left, right))
        return pairs

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """SentencePiece merges the pair whose token has the best score. Where all are equal, ids are in that order."""
        merges = []
        for token_id, text in enumerate(self.texts):
            if len(text) > LONGEST_MERGED:
                raise ValueError(f"{KEY}tokens: token {token_id} has {len(text):,} characters, more than any word")
            halves = [(text[:at], text[at:]) for at in range(1, len(text))]
            known = [(left, right) for left, right in halves if left in self.ids and right in self.ids]
            known.sort(key=lambda pair: (self.ids[pair[0]], self.ids[pair[1]]))
            merges += [(-self.scores[token_id], token_id, pair) for pair in known]
        merges.sort(key=lambda merge: merge[:2])
        return [pair for _, _, pair in merges]

    def _list(self, name: str, kinds: Any, num_tokens: int = 0) -> list[Any]:
        """Empty if the file has none. Raises ValueError if an entry has another type, or entries are missing."""
        values = self.get(name, list, [])
        if not all(isinstance(value, kinds) for value in values):
            raise ValueError(f"{KEY}{name} has entries of a wrong type")
        if values and len(values) < num_tokens:
            raise ValueError(f"{KEY}{name} has {len(values)} entries for {num_tokens} tokens")
        return values
