"""Hybrid models in GGUF files: what their metadata and tensors are called there (chapter 16). No torch."""

from typing import Any

FIELDS = {
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
LINEAR = {"attn_qkv.weight": "in_proj_qkv.weight", "attn_gate.weight": "in_proj_z.weight"}
LINEAR |= {"ssm_beta.weight": "in_proj_b.weight", "ssm_alpha.weight": "in_proj_a.weight"}
LINEAR |= {"ssm_ba.weight": "in_proj_ba.weight", "ssm_out.weight": "out_proj.weight"}
LINEAR |= {"ssm_in.weight": "in_proj_qkvz.weight"}  # in older files of Qwen3-Next, as Hugging Face has it
LINEAR |= {"ssm_conv1d.weight": "conv1d.weight", "ssm_norm.weight": "norm.weight"}
LINEAR |= {"ssm_a": "A_log", "ssm_dt.bias": "dt_bias"}
EXPERTS = {"ffn_gate_inp.weight": "gate.weight", "ffn_gate_inp_shexp.weight": "shared_expert_gate.weight"}
EXPERTS |= {f"ffn_{x}_exps.weight": f"experts.{x}_proj" for x in ("gate", "up", "down", "gate_up")}
EXPERTS |= {f"ffn_{x}_shexp.weight": f"shared_expert.{x}_proj.weight" for x in ("gate", "up", "down")}
NAMES = {name: f"linear_attn.{ours}" for name, ours in LINEAR.items()}
NAMES |= {name: f"mlp.{ours}" for name, ours in EXPERTS.items()}
NAMES |= {"post_attention_norm.weight": "post_attention_layernorm.weight"}


def hybrid_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json. given: a file's metadata, without the prefix of its architecture."""
    found = {ours: given[theirs] for theirs, ours in FIELDS.items() if theirs in given}
    num_heads, head_dim = found.get("linear_num_value_heads"), given.get("attention.key_length")
    if num_heads and "ssm.inner_size" in given:
        found["linear_value_head_dim"] = given["ssm.inner_size"] // num_heads
    if head_dim and "rope.dimension_count" in given:
        found["partial_rotary_factor"] = given["rope.dimension_count"] / head_dim
    # Layers after the model's own predict several tokens at once.
    if "block_count" in given:
        found["num_hidden_layers"] = given["block_count"] - given.get("nextn_predict_layers", 0)
    return found | {"norm_topk_prob": True, "attention_bias": False}
