"""Which checkpoints give embeddings or scores, and how: config.json, sentence-transformers' files, what is asked.

Last-token pooling: in a decoder only the last token has seen the whole text. So its hidden state stands for the text
(Qwen3-Embedding, arXiv:2506.05176), or goes through a head with a number for each label (a sequence classifier, a
reranker). A classifier's last token is the last one that is not padding, as in transformers.
"""

import json
import logging
import re
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.checks.values import check_number, list_of, typed
from nanovllm.features.pooling.params import PoolerConfig, check_pooling_type
from nanovllm.files.config_json import read_json

logger = logging.getLogger("nanovllm")

ENCODERS = re.compile(r"bert|electra|mpnet|xlm|^t5|^mt5|^gte|^new|nomic|jina|^clip|siglip|luke|funnel", re.IGNORECASE)
TWO_WAY, EACH_TOKEN = "from_2_way_softmax", "no_post_processing"  # vLLM's names for what `token_ids` are used for
ST_MODULES = ("Transformer", "Pooling", "Normalize")  # of sentence-transformers, those that are understood
IDENTITY, SIGMOID, SOFTMAX = "identity", "sigmoid", "softmax"
RERANKER_ADVICE = (
    'a Qwen3-Reranker needs hf_overrides={"architectures": ["Qwen3ForSequenceClassification"], '
    '"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": true}'
)


@dataclass(frozen=True)
class PoolingConfig:
    """What stands in the place of a model's output head (head.py), and what is made of its numbers (requests.py).

    task             "embed": the hidden state itself; "classify": num_labels numbers
    use_activation   where the request does not say it
    activation       of classify's numbers: sigmoid, softmax or identity
    dimensions       of an embedding, where the request does not say it; None: all
    allowed          the dimensions that may be asked for; (): any; None: none
    token_ids        the head is made of these rows of the language model's: yes minus no (two_way), or as they are
    is_reranker      an original Qwen3-Reranker, which expects its own template (scoring.py)
    pad_token_id     tokens at the end of a text that a classifier does not look at; None: it looks at all
    joins_texts      the two texts of a pair are tokenized as one; otherwise each alone
    max_model_len    of a text, where the caller does not say it; None: as many as the model has positions
    """

    task: str
    use_activation: bool = True
    activation: str = IDENTITY
    num_labels: int = 0
    dimensions: int | None = None
    allowed: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] = ()
    two_way: bool = False
    is_reranker: bool = False
    joins_texts: bool = True
    pad_token_id: int | None = None
    max_model_len: int | None = None

    def without_padding(self, token_ids: list[int]) -> list[int]:
        """Up to the token that is pooled: the first one, if all are padding."""
        end = len(token_ids)
        while end > 1 and token_ids[end - 1] == self.pad_token_id:
            end -= 1
        return token_ids[:end]

    def make_head(self, hidden_size: int, vocab_size: int, bias: bool) -> Any:
        """A module in the place of Linear(hidden_size, vocab_size, bias)."""
        from nanovllm.features.pooling.head import EmbeddingHead, ScoreHead

        return EmbeddingHead() if self.task == "embed" else ScoreHead(hidden_size, self.num_labels)

    def tensors(self, files: dict[str, Any]) -> dict[str, Any]:
        """A checkpoint's tensors under the names that a decoder and this head have."""
        from nanovllm.features.pooling.tensors import pooling_tensors

        return pooling_tensors(files, self)


def reject_encoder(architecture: Any, path: Path) -> None:
    """Raises ValueError for one, which says what can be used instead."""
    if isinstance(architecture, str) and ENCODERS.search(architecture):
        raise ValueError(
            f"{path}: {architecture} is an encoder: its tokens see later ones, so nothing of a text could be kept in a "
            "KV cache. Embeddings come from decoders here, as Qwen3-Embedding is one"
        )


def read_pooling(text: Any, architecture: str, kind: str, engine_config: Any, path: Path) -> PoolingConfig | None:
    """None for a checkpoint that shall generate.

    text: transformers' configuration of the language model. kind: what the architecture is made for, "generate",
    "embed" or "classify". engine_config: an EngineConfig, or None: it shall generate. Raises ValueError for
    what cannot be done with the checkpoint.
    """
    config = _fields_of(text)
    modules = _sentence_transformers(path.parent) if path.name == "config.json" else None
    made_for = "embed" if kind == "generate" and modules is not None and modules.pools else kind
    runner, convert = ("generate", "auto") if engine_config is None else (engine_config.runner, engine_config.convert)
    is_converted = convert in ("embed", "classify")
    if runner == "auto":
        runner = "pooling" if is_converted or made_for != "generate" else "generate"
    if runner == "generate" and is_converted:
        raise ValueError(f"convert={convert!r} needs runner='pooling', and runner='generate' asks for text")
    if runner == "generate" and kind != "generate":
        found = f"its architecture, {architecture}, has no output head"
        raise ValueError(f"{path}: {found}, so it cannot generate; runner='pooling' gives embeddings or scores of it")
    if runner == "generate" and engine_config is not None and engine_config.pooler_config is not None:
        raise ValueError("pooler_config is of embeddings and scores, and this LLM generates; add runner='pooling'")
    if runner == "generate":
        return None
    if engine_config.speculative_config is not None:
        raise ValueError("speculative_config proposes tokens that are sampled; with runner='pooling' none are")
    if config.get("use_bidirectional_attention"):
        raise ValueError(f"{path}: its tokens see later ones (use_bidirectional_attention)")
    pooler = engine_config.pooler_config or PoolerConfig()
    task = convert if is_converted else pooler.task or ("classify" if made_for == "classify" else "embed")
    if task == "classify":
        return _classifier(text, architecture, kind, pooler, engine_config, path)
    if modules is None:
        pooling_type, normalizes = config.get("gguf_pooling_type", "LAST"), True
    else:
        pooling_type, normalizes = modules.pooling_type, modules.normalizes
        if modules.unknown:
            found, known = modules.unknown[0], ", ".join(ST_MODULES)
            advice = f"; {RERANKER_ADVICE}" if found == "LogitScore" else ""
            has = f"has a module {found!r:.80}; this engine knows {known}{advice}"
            raise ValueError(f"{path.parent / 'modules.json'} {has}")
    if pooler.pooling_type is None and pooler.seq_pooling_type is None:
        source = f"{path}: the pooling_type" if modules is None else f"{path.parent}: the pooling of modules.json"
        check_pooling_type(source, pooling_type)
    allowed = typed(config, "matryoshka_dimensions", [], path)
    list_of(allowed, Integral, "numbers", f"{path}: matryoshka_dimensions")
    any_dimension = typed(config, "is_matryoshka", False, path)
    dimensions = tuple(allowed) if allowed or any_dimension else None
    check_dimensions(pooler.dimensions, dimensions, text.hidden_size)
    use_activation = normalizes if pooler.use_activation is None else pooler.use_activation
    return PoolingConfig(
        "embed",
        use_activation,
        dimensions=pooler.dimensions,
        allowed=dimensions,
        max_model_len=_max_model_len(text, engine_config, path),
    )


def _fields_of(text: Any) -> dict[str, Any]:
    """Those that are not null, which means absent."""
    return {name: value for name, value in vars(text).items() if value is not None}


def check_dimensions(dimensions: int | None, allowed: tuple[int, ...] | None, hidden_size: int) -> None:
    """Raises ValueError. allowed: see PoolingConfig. All of them may always be asked for: that cuts nothing."""
    if dimensions is None or dimensions == hidden_size:
        return
    if allowed is None:
        raise ValueError(
            f"dimensions={dimensions} cuts embeddings, and the checkpoint does not say that it was trained for that; "
            'if it was, as Qwen3-Embedding: hf_overrides={"is_matryoshka": true}'
        )
    check_number("dimensions", dimensions, Integral, 1, hidden_size)
    if allowed and dimensions not in allowed:
        raise ValueError(f"dimensions must be one of {list(allowed)}, found {dimensions}")


class Modules(NamedTuple):
    """What modules.json says.

    pooling_type    how it pools
    pools           is there a module that says so? Not in a reranker
    normalizes      vectors have the length 1
    unknown         modules that this engine does not know
    """

    pooling_type: str
    pools: bool
    normalizes: bool
    unknown: list[str]


def _sentence_transformers(directory: Path) -> Modules | None:
    """Of a directory with modules.json. Raises ValueError for one that cannot be read."""
    path = directory / "modules.json"
    if not path.is_file():
        return None
    pooling_type, names = "LAST", []
    try:
        for module in json.loads(path.read_text("utf-8")):
            names.append(str(module["type"]).rpartition(".")[2])
            if names[-1] == "Pooling":
                found = json.loads((directory / module["path"] / "config.json").read_text("utf-8"))
                modes = [name for name, value in found.items() if value is True and name.startswith("pooling_mode_")]
                modes = [str(found["pooling_mode"])] if "pooling_mode" in found else modes or ["pooling_mode_lasttoken"]
                kinds = [mode.removeprefix("pooling_mode_").partition("_")[0] for mode in modes]
                pooling_type = " and ".join("LAST" if kind.startswith("last") else kind for kind in kinds)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}, or the pooling that it names, cannot be read: {error!r:.200}") from error
    return Modules(
        pooling_type,
        pools="Pooling" in names,
        normalizes="Normalize" in names,
        unknown=[name for name in names if name not in ST_MODULES],
    )


def _max_model_len(text: Any, engine_config: Any, path: Path) -> int | None:
    """That of sentence-transformers. None: all of the model's positions."""
    beside = path.with_name("sentence_bert_config.json")
    if path.name != "config.json" or not beside.is_file():
        return None
    found, positions = read_json(beside).get("max_seq_length"), text.max_position_embeddings
    if found is None or check_number(f"{beside}: max_seq_length", found, Integral, 2) >= positions:
        return None
    if engine_config.max_model_len is None:
        logger.info("max_model_len %d -> %d: max_seq_length of %s", positions, found, beside)
    return int(found)


def _classifier(
    text: Any, architecture: str, kind: str, pooler: PoolerConfig, engine_config: Any, path: Path
) -> PoolingConfig:
    config = _fields_of(text)
    is_reranker = typed(config, "is_original_qwen3_reranker", False, path)
    names = list_of(config.get("classifier_from_token"), str, "tokens", f"{path}: classifier_from_token")
    method = TWO_WAY if is_reranker else config.get("method")
    if kind != "classify" and not names:
        raise ValueError(f"{path}: a {architecture} has no score head to classify by; {RERANKER_ADVICE}")
    if names and method not in (TWO_WAY, EACH_TOKEN):
        raise ValueError(f"{path}: classifier_from_token needs method {TWO_WAY!r} or {EACH_TOKEN!r}, found {method!r}")
    if method == TWO_WAY and len(names) != 2:
        raise ValueError(f"{path}: {TWO_WAY} needs two tokens, as classifier_from_token=['no', 'yes'], found {names}")
    if names:
        num_labels = 1 if method == TWO_WAY else len(names)
    else:
        num_labels = check_number(f"{path}: num_labels", text.num_labels, Integral, 1, 2**16)
    return PoolingConfig(
        "classify",
        pooler.use_activation is not False,
        _activation_of(config, num_labels, path),
        num_labels,
        token_ids=_ids_of(names, engine_config, path),
        two_way=method == TWO_WAY,
        is_reranker=is_reranker,
        joins_texts=not typed(config, "use_sep_token", method is None, path),
        pad_token_id=None if names else text.pad_token_id,
        max_model_len=_max_model_len(text, engine_config, path),
    )


def _activation_of(config: dict[str, Any], num_labels: int, path: Path) -> str:
    """By transformers' problem_type, by what sentence-transformers wrote, by the number of labels."""
    kinds = {"regression": IDENTITY, "single_label_classification": SOFTMAX, "multi_label_classification": SIGMOID}
    by_number = SOFTMAX if num_labels > 1 else SIGMOID
    if (problem := config.get("problem_type")) in kinds:
        return by_number if kinds[problem] == SOFTMAX else kinds[problem]
    sentence_transformers = config.get("sentence_transformers")
    written = sentence_transformers.get("activation_fn") if isinstance(sentence_transformers, dict) else None
    written = written or config.get("sbert_ce_default_activation_function")
    beside = path.with_name("config_sentence_transformers.json")  # from version 5.4 on
    if written is None and path.name == "config.json" and not config.get("classifier_from_token") and beside.is_file():
        written = read_json(beside).get("activation_fn")
        path = beside
    known = {"Identity": IDENTITY, "Sigmoid": by_number, "Softmax": by_number, "None": by_number}
    if (name := str(written).rpartition(".")[2]) not in known:
        raise ValueError(
            f"{path}: the activation {written!r:.80} is not known; it must be Identity, Sigmoid or Softmax"
        )
    return known[name]


def _ids_of(names: list[str], engine_config: Any, path: Path) -> tuple[int, ...]:
    """The tokens' ids. Raises ValueError for a text that is not one token."""
    if not names:
        return ()
    from nanovllm.files.hub import resolve_tokenizer
    from nanovllm.files.tokenizer import load_tokenizer

    place = (
        resolve_tokenizer(engine_config.tokenizer)
        if engine_config.tokenizer
        else path.parent
        if path.suffix == ".json"
        else path
    )
    tokenizer = load_tokenizer(place)
    vocabulary = tokenizer.get_vocab()
    if missing := [name for name in names if name not in vocabulary]:
        raise ValueError(f"{path}: classifier_from_token: {missing[0]!r:.80} is no token of this tokenizer")
    return tuple(vocabulary[name] for name in names)
