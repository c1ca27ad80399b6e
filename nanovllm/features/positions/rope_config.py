"""Rotary embeddings that reach further than they were trained for: what config.json says of them (chapter 1)."""

from numbers import Integral, Real
from pathlib import Path
from typing import Any

from nanovllm.checks.values import MAX_POSITIVE, MIN_POSITIVE, Bounds, check_choice, numbers_of, shorten, typed
from nanovllm.files.model_fields import ROPE_THETA

FACTOR: Bounds = (Real, MIN_POSITIVE, MAX_POSITIVE)
LENGTH: Bounds = (Integral, 1, 2**24)
LLAMA3 = dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), FACTOR)
LLAMA3 |= {"original_max_position_embeddings": LENGTH}
YARN: dict[str, Bounds] = {"factor": (Real, 1.0, MAX_POSITIVE), "original_max_position_embeddings": LENGTH}
YARN |= {"rope_theta": (Real, 1.001)}  # its log is divided by
YARN_OPTIONS = dict.fromkeys(("beta_fast", "beta_slow", "attention_factor"), FACTOR)
YARN_OPTIONS |= dict.fromkeys(("mscale", "mscale_all_dim"), (Real, 0.0, MAX_POSITIVE))
ROPE_TYPES: dict[str, dict[str, Bounds]] = {"default": {}, "linear": {"factor": FACTOR}, "llama3": LLAMA3}
ROPE_TYPES |= {"yarn": YARN}


def read_rope(given: dict[str, Any], is_hybrid: bool, path: Path) -> dict[str, Any]:
    """rope_scaling, rope_theta, and perhaps max_position_embeddings of ModelConfig.

    given: rope_parameters of transformers' configuration, without what is null. is_hybrid: the model turns a part of
    each head, partial_rotary_factor. Raises ValueError for what would be computed wrongly.
    """
    kind: Any = given.get("rope_type")
    where = f"{path}: rotary scaling"
    if by_layer := [name for name, value in given.items() if isinstance(value, dict)]:
        raise ValueError(f"{where} that differs from layer to layer ({shorten(by_layer)}) is not supported")
    if kind == "dynamic":
        raise ValueError(
            f"{where} 'dynamic' is not supported: its angles change while a sequence grows, and K that is in the cache "
            f"has been rotated by the old ones; it must be one of {', '.join(ROPE_TYPES)}"
        )
    check_choice(where, kind, ROPE_TYPES)
    turned = given.get("partial_rotary_factor", 1.0)
    if turned != 1.0 and not is_hybrid:
        raise ValueError(f"{path}: partial_rotary_factor is {shorten(turned)}, only 1.0 is supported")
    if missing := [name for name in ROPE_TYPES[kind] if name not in given]:
        raise ValueError(f"{where} {kind!r} lacks {', '.join(missing)}")
    rope = {"rope_type": kind} | numbers_of(given, ROPE_THETA | ROPE_TYPES[kind], where)
    if is_hybrid:
        rope |= numbers_of({"partial_rotary_factor": turned}, {"partial_rotary_factor": (Real, 0.01, 1.0)}, path)
    if kind == "llama3" and rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise ValueError(f"{path}: low_freq_factor of the rotary scaling must be below high_freq_factor")
    found: dict[str, Any] = {"rope_scaling": rope, "rope_theta": rope.pop("rope_theta")}
    if kind == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0} | numbers_of(given, YARN_OPTIONS, where)
        if rope["beta_fast"] <= rope["beta_slow"]:
            raise ValueError(f"{path}: beta_fast of the rotary scaling must be above beta_slow")
        rope["truncate"] = typed(given, "truncate", True, path)
        longer = {"max_position_embeddings": int(rope["original_max_position_embeddings"] * rope["factor"])}
        found |= numbers_of(longer, dict.fromkeys(longer, LENGTH), path)
    return found
