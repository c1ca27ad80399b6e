"""Experts: an MLP for each kind of token instead of one for all (chapter 17; arXiv:1701.06538, arXiv:2401.06066).

A router scores the experts for each token, and the token meets the best few of them. So a step computes with a small
part of the weights, and which part depends on its tokens. Rows that have chosen the same expert are multiplied
together: its weights are read once a step, however many rows meet them.
"""

from typing import Any

from torch import Tensor, nn

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.experts.rows import ExpertWeights, kernels_for
from nanovllm.worker.layers import MLP, ForwardContext, Linear


class Router(Linear):
    """Scores of all experts [T, num_experts]. Its weight is never rounded to fewer bits: rows would change experts."""

    stays_exact = True


class Experts(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.gate = Router(config.hidden_size, config.num_experts, bias=False)
        self.experts: Any = nn.ModuleList(MLP(config, config.moe_intermediate_size) for _ in range(config.num_experts))
        self.collect_weights()
        self.shared_expert = None
        if config.shared_expert_intermediate_size:
            self.shared_expert = MLP(config, config.shared_expert_intermediate_size)
            self.shared_expert_gate = Router(config.hidden_size, 1, bias=False)

    def collect_weights(self) -> None:
        """The weights of all experts, as their products take them. Again after a layer of theirs has been replaced."""
        self.gate_up = ExpertWeights(mlp.gate_up_proj for mlp in self.experts)
        self.down = ExpertWeights(mlp.down_proj for mlp in self.experts)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        """hidden: [T, hidden_size]. Returns what the chosen experts of each row make of it, weighed and added up.

        Some models have an expert beside them that every row meets, weighed by a gate of its own.
        """
        kernels = kernels_for(context.kernels)
        weights, chosen = kernels.route(self.gate(hidden), self.num_chosen, self.normalize)
        by_expert = kernels.sort_by_expert(chosen, len(self.experts))
        x = kernels.gather(hidden, by_expert.rows)
        x = kernels.expert_linear(x, self.gate_up, by_expert)  # [T * num_chosen, 2 * size]
        x = kernels.expert_linear(context.kernels.silu_and_mul(x), self.down, by_expert)
        out = kernels.weighted_sum(x, by_expert.places, weights)
        if self.shared_expert is None:
            return out
        from nanovllm.features.hybrid import hybrid_kernels

        shared, gate = self.shared_expert(hidden, context), self.shared_expert_gate(hidden)
        return hybrid_kernels.kernels_for(context.kernels).add_gated(out, shared, gate)
