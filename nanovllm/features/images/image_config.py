"""What config.json says of a model that sees images: its language model, and how images enter it. No torch."""

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_number, numbers_of, shorten

QWEN3_VL = "Qwen3VLForConditionalGeneration"
IDEFICS3 = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
# Of each model with several positions a token: what transformers' code takes where a file has no mrope_section.
MROPE_SECTIONS = {
    QWEN3_VL: [24, 20, 20],
    "Qwen3_5ForConditionalGeneration": [11, 11, 10],
    "Qwen3_5MoeForConditionalGeneration": [11, 11, 10],
}
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
        """Does each pair turn by time (0), height (1) or width (2)? They alternate, as far as each has pairs."""
        found = [0] * num_pairs
        for axis in (1, 2):
            for pair in range(axis, min(3 * self.mrope_section[axis], num_pairs), 3):
                found[pair] = axis
        return found


def read_images(whole: Any, fields: dict[str, Any], architecture: str, path: Path) -> ImageConfig:
    """How a model sees images. whole: what transformers makes of config.json's fields.

    Raises ValueError for what is not supported.
    """
    check_number(f"{path}: image_token_id", whole.image_token_id, Integral, 0, whole.text_config.vocab_size - 1)
    _check_tower_fields(whole, architecture in IDEFICS3, path)
    section: list[int] = []
    if architecture in MROPE_SECTIONS:
        rope = whole.text_config.rope_parameters
        section = rope.get("mrope_section", MROPE_SECTIONS[architecture])
        if not (isinstance(section, list) and len(section) == 3 and all(type(n) is int and n >= 0 for n in section)):
            raise ValueError(f"{path}: mrope_section must be three numbers of pairs, found {shorten(section)}")
        if not rope.get("mrope_interleaved", True):
            raise ValueError(f"{path}: mrope_interleaved is false; only interleaved sections are supported")
    return ImageConfig(
        architecture=architecture,
        image_token_id=whole.image_token_id,
        mrope_section=tuple(section),
        num_deepstack=len(whole.vision_config.deepstack_visual_indexes) if architecture == QWEN3_VL else 0,
        config=fields,
    )


def _check_tower_fields(whole: Any, is_idefics3: bool, path: Path) -> None:
    """Raise ValueError for sizes that do not go together, where the tensors would have the same shapes."""
    vision = whole.vision_config
    num_heads = num_heads_of(vision)
    patch_size = side_of(vision.patch_size)
    numbers = {"hidden_size": vision.hidden_size, "number of heads": num_heads, "patch_size": patch_size}
    if is_idefics3:
        numbers |= {"image_size": side_of(vision.image_size), "scale_factor": whole.scale_factor}
    numbers_of(numbers, dict.fromkeys(numbers, (Integral, 1, 2**24)), f"{path}: the vision tower")
    multiple = num_heads if is_idefics3 else 4 * num_heads  # Qwen's heads turn by height and by width, in pairs
    if vision.hidden_size % multiple:
        raise ValueError(
            f"{path}: hidden_size of vision_config must be a multiple of {multiple} for {num_heads} heads, "
            f"found {vision.hidden_size}"
        )
    if is_idefics3 and (num_patches := numbers["image_size"] // patch_size) % whole.scale_factor:
        raise ValueError(f"{path}: scale_factor {whole.scale_factor} must divide the {num_patches} patches of a side")


def num_heads_of(vision: Any) -> int:
    """Of a tower. vision: whole.vision_config."""
    return vision.num_heads if hasattr(vision, "num_heads") else vision.num_attention_heads


def side_of(size: Any) -> int:
    """A side, of a field that may be a pair of equal ones."""
    return int(size[0] if isinstance(size, list | tuple) else size)


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
