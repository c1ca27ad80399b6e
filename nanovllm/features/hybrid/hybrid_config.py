"""What config.json says of layers whose memory does not grow: Gated DeltaNet in Qwen3-Next and Qwen3.5 (chapter 16)."""

from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from nanovllm.checks.values import Bounds, check_choice, check_number, numbers_of, typed

LINEAR, FULL = "linear_attention", "full_attention"
# transformers' defaults of fields that a checkpoint may leave out.
SIZES = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
SIZES |= {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
BOUNDS: dict[str, Bounds] = dict.fromkeys(SIZES, (Integral, 1, 2**10)) | {"linear_conv_kernel_dim": (Integral, 2, 16)}
MAX_KEY_DIM = 256  # cpu/delta_rule.c keeps that many rows of a state on a thread's stack


@dataclass(frozen=True)
class HybridConfig:
    """The layers that have a state.

    linear_layers         their numbers; the others have attention
    num_key_heads         of queries and keys; each serves num_value_heads / num_key_heads neighbouring value heads
    key_dim, value_dim    numbers of a key, and of a value: a head's state is a matrix of so many rows and columns
    kernel_size           tokens that the convolution sees, the newest one included
    """

    linear_layers: frozenset[int]
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    kernel_size: int

    @property
    def key_size(self) -> int:
        """Numbers of all keys of a token, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    def share(self, num_ranks: int) -> "HybridConfig":
        """Of one rank: heads are divided."""
        heads = self.num_key_heads // num_ranks, self.num_value_heads // num_ranks
        return replace(self, num_key_heads=heads[0], num_value_heads=heads[1])


def text_overrides(overrides: dict[str, Any]) -> dict[str, Any]:
    """hf_overrides whose fields for the language model stand in an object of their own, as in such a config.json."""
    given = typed(overrides, "text_config", {}, "hf_overrides")
    return {name: value for name, value in overrides.items() if name != "text_config"} | given


def read_hybrid(config: dict[str, Any], num_layers: int, path: Path) -> dict[str, Any]:
    """ModelConfig's fields of a hybrid model. Raises ValueError for what would be computed wrongly.

    config: with read_rope()'s fields.
    """
    turned, head_dim = config["partial_rotary_factor"], config["head_dim"]
    if not (num_turned := int(turned * head_dim)) or num_turned % 2:
        part = f"partial_rotary_factor {turned} of head_dim {head_dim} is {num_turned} numbers"
        raise ValueError(f"{path}: {part}; it must be an even number of them, rotary embedding turns pairs")
    numbers = numbers_of(SIZES | config, BOUNDS, path)
    key_heads, value_heads = numbers["linear_num_key_heads"], numbers["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(f"{path}: {value_heads} value heads cannot share {key_heads} key heads evenly")
    check_number(f"{path}: linear_key_head_dim", numbers["linear_key_head_dim"], Integral, 1, MAX_KEY_DIM)
    interval = check_number(f"{path}: full_attention_interval", config.get("full_attention_interval", 4), Integral, 1)
    kinds = typed(config, "layer_types", [FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)], path)
    if len(kinds) != num_layers:
        raise ValueError(f"{path}: layer_types must name the attention of {num_layers} layers, found {len(kinds)}")
    for i, kind in enumerate(kinds):
        check_choice(f"{path}: layer_types[{i}]", kind, (FULL, LINEAR))
    if not typed(config, "attn_output_gate", True, path):
        raise ValueError(f"{path}: attn_output_gate is false, and attention without a gate is not supported here")
    for kind, kept in (FULL, "K/V"), (LINEAR, "state"):
        if kind not in kinds:
            raise ValueError(f"{path}: layer_types has no {kind}; a model without any {kept} is not supported")
    linear_layers = frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR)
    return {"hybrid": HybridConfig(linear_layers, *numbers.values()), "norm_offset": 1.0}
