"""What config.json and generation_config.json say.

Of config.json, transformers' configuration class has the last word: defaults of fields that are left out, old
spellings, what belongs to the language model of a model that sees images. Here it is read, `hf_overrides` are put in,
and what no model comes near is refused before anything of that size is built.
"""

import copy
import dataclasses
import json
import logging
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checks.names import bounds_of
from nanovllm.checks.values import Bounds, numbers_of, shorten, typed
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

logger = logging.getLogger("nanovllm")

SAMPLING = SamplingParams.__dataclass_fields__
GENERATION = {
    name: bounds_of(SAMPLING[name]) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
}
GENERATION |= {"max_new_tokens": (Integral, 1, None)}

# What else of generation_config.json changes which tokens are chosen -> its usual value. vLLM does not read it, either.
CHANGES_TOKENS: dict[str, Any] = {"no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0}
CHANGES_TOKENS |= {"num_beams": 1, "encoder_repetition_penalty": 1, "exponential_decay_length_penalty": None}
CHANGES_TOKENS |= {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None, "guidance_scale": 1}
CHANGES_TOKENS |= dict.fromkeys(("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"))
CHANGES_TOKENS |= dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "stop_strings", "watermarking_config"))

MAX_FILE_BYTES = 64 << 20  # the largest known: an index of a hundred thousand tensors, 10 MB
# What a configuration class makes as many entries of.
LENGTHS: dict[str, Bounds] = {"num_hidden_layers": (Integral, 1, 2**10), "num_labels": (Integral, 1, 2**16)}
ROPE_FIELDS = ("rope_parameters", "rope_scaling")  # two spellings of one field


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file, without what is null. Raises ValueError, for code to be run, too."""
    return {name: found for name, found in read_object(path).items() if found is not None}


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a checkpoint's file. Raises ValueError, for code to be run, too."""
    try:
        if (num_bytes := path.stat().st_size) > MAX_FILE_BYTES:
            raise ValueError(f"it has {num_bytes:,} bytes, which is no file of this kind")
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, found {type(value).__name__}")
    if value.get("auto_map"):
        raise ValueError(f"{path}: auto_map asks to run the checkpoint's own code, which is never done")
    return value


def sampling_of(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    """generation_config.json in the names of SamplingParams."""
    found = numbers_of(generation, GENERATION, path)
    if unread := [name for name, usual in CHANGES_TOKENS.items() if generation.get(name) not in (usual, None, [], {})]:
        logger.warning("%s: not used, though transformers' generate() does: %s", path, ", ".join(unread))
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    return found if typed(generation, "do_sample", True, path) else found | {"temperature": 0.0}


def make_config(fields: dict[str, Any], path: Path) -> "PreTrainedConfig":
    """The object that transformers makes of a config.json. Raises ValueError for what its class refuses."""
    for part in (fields, fields.get("text_config")):
        if isinstance(part, dict):
            numbers_of({name: value for name, value in part.items() if value is not None}, LENGTHS, path)
    config_class = config_class_of(fields, path)
    try:
        return config_class(**copy.deepcopy(fields))
    except Exception as error:  # whatever transformers says of a field
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: transformers' {config_class.__name__} does not take it: {reason}") from error


def config_class_of(fields: dict[str, Any], path: Path) -> type["PreTrainedConfig"]:
    """The class that AutoConfig takes. Raises ValueError for a model_type that it does not know."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type: Any = fields.get("model_type")
    if model_type == "mistral" and "layer_types" in fields:
        model_type = "ministral"
    if model_type not in CONFIG_MAPPING:
        found = f"transformers {transformers.__version__} does not know the model_type {shorten(model_type)}"
        raise ValueError(f"{path}: {found}; a later version may")
    return CONFIG_MAPPING[model_type]


def with_overrides(fields: dict[str, Any], overrides: dict[str, Any], path: Path) -> dict[str, Any]:
    """config.json with other values (`hf_overrides`), in any spelling that transformers takes.

    An object that belongs to one part of the model, such as text_config, is changed field by field. What is given
    beside these belongs to the language model, and to the whole where its class has such a field. Raises ValueError.
    """
    overrides = {"dtype" if name == "torch_dtype" else name: value for name, value in overrides.items()}
    names = [name for name, value in overrides.items() if name.endswith("_config") and value is not None]
    parts = {name: typed(overrides, name, {}, "hf_overrides") for name in names}
    rest = {name: value for name, value in overrides.items() if name not in parts}
    if not fields.get("text_config"):  # the language model is all there is
        rest |= parts.pop("text_config", {})
    elif rest:
        shared = {name: value for name, value in rest.items() if name not in ("architectures", "model_type")}
        parts["text_config"] = shared | parts.get("text_config", {})
        known = {field.name for field in dataclasses.fields(config_class_of(fields | rest, path))}
        rest = {name: value for name, value in rest.items() if name in known or name == "model_type"}
    changed = _replaced(fields, rest, path)
    for name, given in parts.items():
        part = {} if changed.get(name) is None else typed(changed, name, {}, path)
        changed[name] = _replaced(part, given, path)
    return changed


def _replaced(fields: dict[str, Any], overrides: dict[str, Any], path: Path) -> dict[str, Any]:
    """Other values in one object. A rotary embedding, in whichever spelling, takes the place of the one in the object;
    without a rope_theta of its own it keeps that one's."""
    changed = fields | overrides
    if overrides.keys().isdisjoint((*ROPE_FIELDS, "rope_theta")):
        return changed
    before = _rope_of(fields, path)
    rope = before | {"rope_theta": overrides["rope_theta"]} if "rope_theta" in overrides else before
    if not overrides.keys().isdisjoint(ROPE_FIELDS):
        kept = {name: value for name, value in rope.items() if name == "rope_theta"}
        rope = kept | _rope_of(overrides, Path("hf_overrides"))
    return {name: value for name, value in changed.items() if name not in ROPE_FIELDS} | {"rope_parameters": rope}


def _rope_of(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """What says how positions turn keys and queries. Of both spellings rope_scaling comes first, as in transformers."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    return {} if fields.get(name) is None else typed(fields, name, {}, path)
