"""Rotary embeddings that reach further than they were trained for: what config.json says of them (chapter 1)."""

from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.checks.values import MAX_POSITIVE, MIN_POSITIVE, Bounds, check_choice, numbers_of, shorten, typed
from nanovllm.files.config_json import ROPE_THETA

ROPE_FIELDS = {"rope_theta", "rope_scaling", "rope_parameters"}
FACTOR: Bounds = (Real, MIN_POSITIVE, MAX_POSITIVE)
LLAMA3 = dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), FACTOR)
LLAMA3 |= {"original_max_position_embeddings": (Integral, 1, 2**24)}
YARN: dict[str, Bounds] = {"factor": (Real, 1.0, MAX_POSITIVE)}
YARN |= {"original_max_position_embeddings": (Integral, 1, 2**24), "rope_theta": (Real, 1.001)}  # its log is divided by
YARN_OPTIONS = dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), FACTOR)
YARN_OPTIONS |= dict.fromkeys(("mscale", "mscale_all_dim"), (Real, 0.0, MAX_POSITIVE))
ROPE_SCALINGS: dict[str, dict[str, Bounds]] = {"default": {}, "linear": {"factor": FACTOR}, "llama3": LLAMA3}
ROPE_SCALINGS |= {"yarn": YARN}
KNOWN = {"rope_type", "type", "partial_rotary_factor", "truncate", *ROPE_THETA, *LLAMA3, *YARN_OPTIONS}
# How positions in images turn which pairs; a text's three positions are one.
OF_IMAGES = {"mrope_section", "mrope_interleaved"}


def read_rope(config: dict[str, Any], path: Path, is_hybrid: bool = False) -> dict[str, Any]:
    """The rotary embedding: rope_type, what that type needs, and perhaps rope_theta and max_position_embeddings.

    is_hybrid: the model turns a part of each head, partial_rotary_factor.
    """
    given = typed(config, "rope_parameters", {}, path) or typed(config, "rope_scaling", {}, path)
    given = {name: value for name, value in given.items() if value is not None}
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "dynamic":
        raise ValueError(
            f"{path}: rotary scaling 'dynamic' is not supported: its angles change while a sequence grows, and K that "
            f"is in the cache has been rotated by the old ones; it must be one of {', '.join(ROPE_SCALINGS)}"
        )
    check_choice(f"{path}: rotary scaling", kind, ROPE_SCALINGS)
    if unknown := given.keys() - KNOWN - (OF_IMAGES if is_hybrid else set()):
        raise ValueError(f"{path}: {shorten(sorted(unknown))} of the rotary scaling is not supported")
    turned = {**config, **given}.get("partial_rotary_factor", 0.25 if is_hybrid else 1.0)
    if turned != 1.0 and not is_hybrid:
        raise ValueError(f"{path}: partial_rotary_factor is {shorten(turned)}, only 1.0 is supported")
    part = {"partial_rotary_factor": (Real, 0.01, 1.0)} if is_hybrid else {}
    if kind in ("llama3", "yarn"):  # some files say beside the scaling how long sequences were before it, some nowhere
        length = "original_max_position_embeddings"
        given = {length: config.get("max_position_embeddings"), **given}
        given |= {length: config[length]} if length in config else {}
    if kind == "yarn":
        given = {"rope_theta": config.get("rope_theta", 10000.0), **given}
    if missing := [name for name in ROPE_SCALINGS[kind] if given.get(name) is None]:
        raise ValueError(f"{path}: rotary scaling {kind!r} lacks {', '.join(missing)}")
    rope = numbers_of(given, ROPE_THETA | ROPE_SCALINGS[kind], f"{path}: rotary scaling")
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(f"{path}: low_freq_factor of the rotary scaling must be below high_freq_factor")
    if kind == "yarn":
        betas = {"beta_fast": 32.0, "beta_slow": 1.0}
        rope |= betas | numbers_of(given, YARN_OPTIONS, f"{path}: rotary scaling")
        if rope["beta_fast"] <= rope["beta_slow"]:
            raise ValueError(f"{path}: beta_fast of the rotary scaling must be above beta_slow")
        rope["truncate"] = typed(given, "truncate", True, path)
        rope["max_position_embeddings"] = int(rope["original_max_position_embeddings"] * rope["factor"])
    return {"rope_type": kind} | rope | numbers_of({"partial_rotary_factor": turned}, part, path)


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
