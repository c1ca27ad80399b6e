"""What config.json says of a model that sees images: its language model, and how images enter it. No torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_choice, shorten, typed

QWEN3_VL = "Qwen3VLForConditionalGeneration"
IDEFICS3 = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
QWEN3_5 = ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration")
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


def language_config(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The config.json of a model that sees images, as if it were of its language model alone.

    Its "images" is an ImageConfig, if there is a vision_config. Raises ValueError for what is not supported.
    """
    architecture = str((typed(config, "architectures", [], path) or ["none named"])[0])
    if architecture not in (QWEN3_VL, *IDEFICS3, *QWEN3_5):
        return config
    inner = {name: value for name, value in typed(config, "text_config", {}, path).items() if value is not None}
    outer = {
        name: value for name, value in config.items() if name not in ("text_config", "vision_config", "model_type")
    }
    if architecture not in QWEN3_5:
        kind = inner.get("model_type", "llama" if architecture in IDEFICS3 else "qwen3_vl_text")
        check_choice(f"{path}: model_type of text_config", kind, LANGUAGE_MODELS)
        outer["architectures"] = [LANGUAGE_MODELS[kind]]
    found = {"tie_word_embeddings": architecture in IDEFICS3} | inner | outer
    section = _take_mrope_section(found, architecture, path)
    if isinstance(config.get("vision_config"), dict):
        found["images"] = _image_config(config, architecture, section, path)
    return found


def _take_mrope_section(config: dict[str, Any], architecture: str, path: Path) -> tuple[int, ...]:
    """What says how positions in images turn which pairs leaves the fields of the rotary embedding."""
    if architecture in IDEFICS3:
        return ()
    name = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = dict(typed(config, name, {}, path) or {})
    section = rope.pop("mrope_section", [24, 20, 20] if architecture == QWEN3_VL else [11, 11, 10])
    if not (isinstance(section, list) and len(section) == 3 and all(type(n) is int and n >= 0 for n in section)):
        raise ValueError(f"{path}: mrope_section must be three numbers of pairs, found {shorten(section)}")
    if not rope.pop("mrope_interleaved", True):
        raise ValueError(f"{path}: mrope_interleaved is false; only interleaved sections are supported")
    if rope:
        config[name] = rope
    return tuple(section)


def _image_config(config: dict[str, Any], architecture: str, section: tuple[int, ...], path: Path) -> ImageConfig:
    default = 128257 if architecture in IDEFICS3 else 151655 if architecture == QWEN3_VL else 248056
    token_id = typed({"image_token_id": default} | config, "image_token_id", default, path)
    vision = config["vision_config"]
    deepstack = typed(vision, "deepstack_visual_indexes", [8, 16, 24] if architecture == QWEN3_VL else [], path)
    return ImageConfig(architecture, token_id, section, len(deepstack), config)


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
