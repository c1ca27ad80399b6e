"""What config.json says of a model that sees images: its language model, and how images enter it. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.checks.values import check_choice, shorten, typed

QWEN3_VL = "Qwen3VLForConditionalGeneration"
IDEFICS3 = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")


class Defaults(NamedTuple):
    """transformers' values of fields that a config.json may leave out. mrope_section: None where there is none."""

    text_model_type: str
    image_token_id: int
    mrope_section: list[int] | None
    deepstack_visual_indexes: list[int]


DEFAULTS = {QWEN3_VL: Defaults("qwen3_vl_text", 151655, [24, 20, 20], [8, 16, 24])}
DEFAULTS |= dict.fromkeys(IDEFICS3, Defaults("llama", 128257, None, []))
DEFAULTS |= dict.fromkeys(QWEN3_5, Defaults("qwen3_5_text", 248056, [11, 11, 10], []))
OF_IMAGES = ("image_token_id", "scale_factor")  # fields beside vision_config
# model_type of text_config -> the architecture of the language model alone
LANGUAGE_MODELS = {"llama": "LlamaForCausalLM", "qwen3_vl_text": "Qwen3ForCausalLM"}
# How tensors of the language model are called in such a checkpoint, beside "model." and "lm_head.".
LANGUAGE_PREFIXES = ("model.language_model.", "model.text_model.")
VISION_PREFIXES = ("model.visual.", "model.vision_model.", "model.connector.")


@dataclass(frozen=True)
class ImageConfig:
    """How images enter the language model.

    architecture     the whole checkpoint's
    image_token_id   the placeholder; an image takes as many as its tower gives vectors
    mrope_section    pairs of a head that turn by time, height and width; (): positions are one number
    num_deepstack    layers, the first ones, after which the tower's inner vectors are added (arXiv:2406.04334)
    config           config.json: the tower is built from it
    """

    architecture: str
    image_token_id: int
    mrope_section: tuple[int, ...]
    num_deepstack: int
    config: dict[str, Any]

    def axes(self, num_pairs: int) -> list[int]:
        """Of each pair: does it turn by time (0), height (1) or width (2)? They alternate, as far as each has pairs."""
        found = [0] * num_pairs
        for axis in (1, 2):
            for pair in range(axis, min(3 * self.mrope_section[axis], num_pairs), 3):
                found[pair] = axis
        return found


def language_config(config: dict[str, Any], path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model that sees images, as if it were of its language model alone.

    Its "images" is an ImageConfig, if there is a vision_config. overrides: hf_overrides, of which those about images
    are applied here. Raises ValueError for what is not supported.
    """
    architecture = str((typed(config, "architectures", [], path) or ["none named"])[0])
    if architecture not in DEFAULTS:
        return config
    defaults = DEFAULTS[architecture]
    config = config | {name: overrides[name] for name in OF_IMAGES if name in overrides}
    if "vision_config" in overrides:
        given = typed(overrides, "vision_config", {}, "hf_overrides")
        config["vision_config"] = typed(config, "vision_config", {}, path) | given
    of_both = ("text_config", "vision_config", "model_type")
    inner = {name: value for name, value in typed(config, "text_config", {}, path).items() if value is not None}
    outer = {name: value for name, value in config.items() if name not in of_both}
    if architecture not in QWEN3_5:
        kind = inner.get("model_type", defaults.text_model_type)
        check_choice(f"{path}: model_type of text_config", kind, LANGUAGE_MODELS)
        outer["architectures"] = [LANGUAGE_MODELS[kind]]
    found = {"tie_word_embeddings": architecture in IDEFICS3} | inner | outer
    section: tuple[int, ...] = ()
    if defaults.mrope_section is not None:
        section = _take_mrope_section(found, defaults.mrope_section, path)
    vision = config.get("vision_config")
    if isinstance(vision, dict):
        indexes = typed(vision, "deepstack_visual_indexes", defaults.deepstack_visual_indexes, path)
        found["images"] = ImageConfig(
            architecture=architecture,
            image_token_id=typed(config, "image_token_id", defaults.image_token_id, path),
            mrope_section=section,
            num_deepstack=len(indexes),
            config=config,
        )
    return found


def _take_mrope_section(config: dict[str, Any], default: list[int], path: Path) -> tuple[int, ...]:
    """What says how positions in images turn which pairs; it leaves the fields of the rotary embedding."""
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(typed(config, name, {}, path))
    section = rope.pop("mrope_section", default)
    if not (isinstance(section, list) and len(section) == 3 and all(type(n) is int and n >= 0 for n in section)):
        raise ValueError(f"{path}: mrope_section must be three numbers of pairs, found {shorten(section)}")
    if not rope.pop("mrope_interleaved", True):
        raise ValueError(f"{path}: mrope_interleaved is false; only interleaved sections are supported")
    if rope:
        config[name] = rope
    return tuple(section)


def language_tensors(files: dict[str, Any]) -> tuple[dict[str, tuple[str, Any]], dict[str, Any]]:
    """({name in the language model: (name in the file, file)}, {name of the tower's tensor: file})."""
    language: dict[str, tuple[str, Any]] = {}
    vision: dict[str, Any] = {}
    for name, file in files.items():
        if name.startswith(VISION_PREFIXES):
            vision[name] = file
            continue
        prefix = next((prefix for prefix in LANGUAGE_PREFIXES if name.startswith(prefix)), "")
        language["model." + name[len(prefix) :] if prefix else name] = (name, file)
    return language, vision
