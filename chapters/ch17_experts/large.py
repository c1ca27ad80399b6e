"""A large model with experts, of which nothing but the sizes is needed: what memory holds, and what a step reads.

The engine's own decoder is built on the "meta" device, where tensors have shapes and no numbers.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from chapters.ch17_experts.chance import expected_met
from chapters.story import stopwatch
from nanovllm.checkpoint import ModelConfig
from nanovllm.features.experts.layer import Experts
from nanovllm.features.experts.rows import ExpertRows, ExpertWeights, expert_linear, kernels_for, sort_by_expert
from nanovllm.worker.cpu.reorder import reorder_weight
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.layers import MLP, Linear
from nanovllm.worker.model import Decoder

# config.json of Qwen/Qwen3-30B-A3B
QWEN3_30B_A3B = """{
"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "attention_bias": false,
"hidden_act": "silu", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
"norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [], "intermediate_size": 6144,
"tie_word_embeddings": false, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
"eos_token_id": 151645
}"""


@dataclass(frozen=True)
class Sizes:
    """Weights, in numbers. expert: one of them; embedding: a token reads one row of it."""

    total: int
    embedding: int
    expert: int
    num_layers: int
    num_experts: int
    num_chosen: int

    @property
    def shared(self) -> int:
        """What every step reads, whatever its tokens."""
        return self.total - self.embedding - self.num_layers * self.num_experts * self.expert

    def met(self, num_rows: int) -> float:
        """Numbers that a step with so many rows reads, if rows choose at random."""
        num_met = expected_met(num_rows, self.num_experts, self.num_chosen)
        return self.shared + self.num_layers * num_met * self.expert


def sizes_of(config: ModelConfig) -> Sizes:
    with torch.device("meta"):
        model = Decoder(config)
    [expert] = {sum(p.numel() for p in mlp.parameters()) for mlp in model.modules() if isinstance(mlp, MLP)}
    num_layers = sum(isinstance(module, Experts) for module in model.modules())
    total = sum(p.numel() for p in model.parameters())
    embedding = model.embed_tokens.numel()
    return Sizes(total, embedding, expert, num_layers, config.num_experts, config.num_experts_per_tok)


# -- one batch, many weights: measured ---------------------------------------------------------------------------------

NUM_EXPERTS, NUM_CHOSEN, IN_SIZE, OUT_SIZE = 128, 8, 1024, 512  # 1 MiB of bf16 an expert


def make_experts(kernels: Kernels) -> ExpertWeights:
    linears = [Linear(IN_SIZE, OUT_SIZE, bias=False).bfloat16() for _ in range(NUM_EXPERTS)]
    for linear in linears:
        nn.init.uniform_(linear.weight, -0.1, 0.1)
        reorder_weight(linear, kernels)
    return ExpertWeights(linears)


def choose_at_random(num_rows: int, generator: torch.Generator) -> torch.Tensor:
    return torch.rand(num_rows, NUM_EXPERTS, generator=generator).topk(NUM_CHOSEN).indices


def in_one_pass(kernels: Kernels, x: torch.Tensor, weights: ExpertWeights, groups: ExpertRows) -> torch.Tensor:
    return kernels_for(kernels).expert_linear(x[groups.rows], weights, groups)


def one_after_another(kernels: Kernels, x: torch.Tensor, weights: ExpertWeights, groups: ExpertRows) -> torch.Tensor:
    return expert_linear(x[groups.rows], weights, groups)


def pair_by_pair(kernels: Kernels, x: torch.Tensor, weights: ExpertWeights, groups: ExpertRows) -> torch.Tensor:
    """Every row for itself, in the order of rows: an expert is read again for each of them."""
    order = groups.places.flatten()
    by_pair = torch.tensor([expert for expert, count in groups.counts for _ in range(count)])
    chosen = by_pair[order].tolist()
    rows = x.repeat_interleave(groups.places.shape[1], 0).split(1)
    linears = weights.linears
    return torch.cat([linears[e].product(row, linears[e].weight, None) for row, e in zip(rows, chosen, strict=True)])


WAYS = {"by row": pair_by_pair, "by expert": one_after_another, "one pass": in_one_pass}


@torch.inference_mode()
def time_products(kernels: Kernels, nums_rows: tuple[int, ...], repeats: int) -> list[tuple[float, dict[str, float]]]:
    """For each number of rows: experts met on average, and for each of WAYS the seconds, the best of several."""
    weights, generator, found = make_experts(kernels), torch.Generator().manual_seed(0), []
    for num_rows in nums_rows:
        best, num_met = dict.fromkeys(WAYS, float("inf")), 0.0
        for _ in range(repeats):
            x = torch.randn(num_rows, IN_SIZE, generator=generator).bfloat16()
            groups = sort_by_expert(choose_at_random(num_rows, generator), NUM_EXPERTS)
            num_met += sum(count > 0 for _, count in groups.counts) / repeats
            for name, way in WAYS.items():
                best[name] = min(best[name], stopwatch(partial(way, kernels, x, weights, groups)))
        found.append((num_met, best))
    return found
