"""Options of an LLM that say which images it takes. No torch."""

import os
from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import check_number, list_of, shorten

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # of a checkpoint, the newer one first
MOST_IMAGES = 16  # of a prompt, where nothing else is said
FIELDS_OF_LIMIT = ("count", "width", "height", "num_frames", "length")


def checked_option(name: str, value: Any) -> Any:
    """An EngineConfig's option in its one form. Raises ValueError or FileNotFoundError."""
    if name == "allowed_media_domains":
        return tuple(domain.lower() for domain in list_of(value, str, "hosts", name))
    if name == "allowed_local_media_path":
        folder = os.path.expanduser(str(value))
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{name}: there is no folder {shorten(folder)}")
        return folder
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be a dict, found {shorten(value)}")
    if name == "limit_mm_per_prompt":
        counts = {kind: _count_of(kind, most) for kind, most in value.items()}
        if other := [kind for kind, most in counts.items() if kind != "image" and most]:
            raise ValueError(f"limit_mm_per_prompt: prompts have images, and no {shorten(other)}")
        return {"image": check_number(f"{name}: image", counts.get("image", MOST_IMAGES), Integral, 0, 1000)}
    return value


def _count_of(kind: str, most: Any) -> Any:
    """A number, or vLLM's dict: the sizes beside its count say how large an input to measure memory with."""
    if not isinstance(most, dict):
        return most
    if other := [name for name in most if name not in FIELDS_OF_LIMIT]:
        known = ", ".join(FIELDS_OF_LIMIT)
        raise ValueError(f"limit_mm_per_prompt: {shorten(kind)} may have {known}, found {shorten(other)}")
    return most.get("count", MOST_IMAGES)
