"""Rotary embeddings that reach further than they were trained for: what config.json says of them (chapter 1)."""

from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.validation import MAX_POSITIVE, MIN_POSITIVE, Bounds, check_choice, numbers_of, shorten, typed

ROPE_THETA: dict[str, Bounds] = {"rope_theta": (Real, MIN_POSITIVE)}
ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters"}
FACTOR: Bounds = (Real, MIN_POSITIVE, MAX_POSITIVE)
LLAMA3 = dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), FACTOR)
LLAMA3 |= {"original_max_position_embeddings": (Integral, 1, 2**24)}
ROPE_SCALINGS: dict[str, dict[str, Bounds]] = {"default": {}, "linear": {"factor": FACTOR}, "llama3": LLAMA3}


def read_rope(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """The rotary embedding: rope_type, what that type needs, and perhaps rope_theta."""
    given = typed(config, "rope_parameters", {}, path) or typed(config, "rope_scaling", {}, path)
    given = {name: value for name, value in given.items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    check_choice(f"{path}: rotary scaling", kind, ROPE_SCALINGS)
    if unknown := given.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *LLAMA3}:
        raise ValueError(f"{path}: {shorten(sorted(unknown))} of the rotary scaling is not supported")
    if (turned := {**config, **given}.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError(f"{path}: partial_rotary_factor is {shorten(turned)}, only 1.0 is supported")
    if missing := [name for name in ROPE_SCALINGS[kind] if name not in given]:
        raise ValueError(f"{path}: rotary scaling {kind!r} lacks {', '.join(missing)}")
    rope = numbers_of(given, ROPE_THETA | ROPE_SCALINGS[kind], f"{path}: rotary scaling")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(f"{path}: low_freq_factor of the rotary scaling must be below high_freq_factor")
    return {"rope_type": kind} | rope


def with_overrides(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """config.json with other values (`hf_overrides`); None takes a field away.

    Some fields have two spellings, and one of them wins: what is overridden takes the place of both.
    """
    config, overrides = dict(config), dict(overrides)
    if "torch_dtype" in overrides:
        config.pop("dtype", None)
    old = config.get("rope_parameters") or config.get("rope_scaling") or {}
    new = overrides.get("rope_parameters") or overrides.get("rope_scaling") or {}
    if not isinstance(new, dict):
        raise ValueError(f"hf_overrides: what scales the rotary embedding must be a dict, found {shorten(new)}")
    if overrides.keys() & ROPE_FIELDS and isinstance(old, dict):
        theta = overrides.get("rope_theta") or old.get("rope_theta") or config.get("rope_theta")
        is_scaled_anew = bool(overrides.keys() & {"rope_scaling", "rope_parameters"})
        rope = {"rope_theta": theta, **new} if is_scaled_anew else {**old, "rope_theta": theta}
        config = {name: value for name, value in config.items() if name not in ROPE_FIELDS}
        overrides = {name: value for name, value in overrides.items() if name not in ROPE_FIELDS}
        overrides["rope_parameters"] = rope
    return {name: value for name, value in (config | overrides).items() if value is not None}
