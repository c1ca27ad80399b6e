"""What config.json says of layers whose memory does not grow: Gated DeltaNet in Qwen3-Next and Qwen3.5 (chapter 16)."""

from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checks.values import Bounds, check_choice, numbers_of

if TYPE_CHECKING:
    from nanovllm.checkpoint import ModelConfig
    from nanovllm.config import EngineConfig
    from nanovllm.features.hybrid.state_pool import StatePool

LINEAR, FULL = "linear_attention", "full_attention"
COUNT: Bounds = (Integral, 1, 2**10)
BOUNDS: dict[str, Bounds] = {
    "linear_num_key_heads": COUNT,
    "linear_num_value_heads": COUNT,
    "linear_key_head_dim": (Integral, 1, 256),  # delta_rule.c keeps that many rows of a state on a thread's stack
    "linear_value_head_dim": COUNT,
    "linear_conv_kernel_dim": (Integral, 2, 16),
}


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

    # What the heart has made of it. These need torch, and are loaded with a model.

    def make_attention(self, config: "ModelConfig", index: int) -> Any:
        """The first half of layer `index`: attention with a gate, or a state of fixed size."""
        from nanovllm.features.hybrid.hybrid_layers import make_attention

        return make_attention(config, index)

    def make_states(self, config: "EngineConfig", model_config: "ModelConfig", **options: Any) -> "StatePool":
        """Slots for states. model_config: of this rank's share. options: of StatePool."""
        from nanovllm.features.hybrid.state_pool import StatePool

        return StatePool(config, model_config, **options)

    def tensors(self, files: dict[str, Any], config: "ModelConfig", is_gguf: bool) -> dict[str, Any]:
        """A checkpoint's tensors under the names and in the shapes that these layers have."""
        from nanovllm.features.hybrid.tensors import hybrid_tensors

        return hybrid_tensors(files, config, is_gguf)

    def share(self, num_ranks: int) -> "HybridConfig":
        """One rank's share: heads are divided."""
        return replace(
            self, num_key_heads=self.num_key_heads // num_ranks, num_value_heads=self.num_value_heads // num_ranks
        )


def read_hybrid(text: Any, path: Path) -> dict[str, Any]:
    """ModelConfig's fields of a hybrid model. text: transformers' configuration of the language model.

    Raises ValueError for what would be computed wrongly.
    """
    turned, head_dim = text.rope_parameters.get("partial_rotary_factor") or 1.0, text.head_dim
    if not (num_turned := int(turned * head_dim)) or num_turned % 2:
        part = f"partial_rotary_factor {turned} of head_dim {head_dim} is {num_turned} numbers"
        raise ValueError(f"{path}: {part}; it must be an even number of them, rotary embedding turns pairs")
    numbers = numbers_of({name: getattr(text, name) for name in BOUNDS}, BOUNDS, path)
    key_heads, value_heads = numbers["linear_num_key_heads"], numbers["linear_num_value_heads"]
    if value_heads % key_heads:
        raise ValueError(f"{path}: {value_heads} value heads cannot share {key_heads} key heads evenly")
    kinds = text.layer_types
    for i, kind in enumerate(kinds):
        check_choice(f"{path}: layer_types[{i}]", kind, (FULL, LINEAR))
    if not getattr(text, "attn_output_gate", True):
        raise ValueError(f"{path}: attn_output_gate is false, and attention without a gate is not supported here")
    for kind, kept in (FULL, "K/V"), (LINEAR, "state"):
        if kind not in kinds:
            raise ValueError(f"{path}: layer_types has no {kind}; a model without any {kept} is not supported")
    hybrid = HybridConfig(
        linear_layers=frozenset(i for i, kind in enumerate(kinds) if kind == LINEAR),
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=numbers["linear_key_head_dim"],
        value_dim=numbers["linear_value_head_dim"],
        kernel_size=numbers["linear_conv_kernel_dim"],
    )
    return {"hybrid": hybrid, "norm_offset": 1.0}
