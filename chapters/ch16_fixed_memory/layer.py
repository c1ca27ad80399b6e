"""One layer of Qwen3.5-0.8B with random weights: what it keeps, and where its time goes (chapter 16). Needs torch."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from chapters.story import stopwatch
from nanovllm.checkpoint import ModelConfig
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.features.hybrid.delta_rule import delta_net
from nanovllm.features.hybrid.hybrid_kernels import kernels_for
from nanovllm.features.hybrid.hybrid_layers import GatedDeltaNet
from nanovllm.features.hybrid.state_pool import StateSizes
from nanovllm.worker.batch import Batch
from nanovllm.worker.cpu.c_kernels import load_cpu_kernels
from nanovllm.worker.cpu.reorder import reorder_weight
from nanovllm.worker.kernels import TORCH_KERNELS

# The sizes of Qwen/Qwen3.5-0.8B's language model, as its config.json has them.
QWEN35_08B = """{
"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248320, "hidden_size": 1024,
"intermediate_size": 3584, "num_hidden_layers": 24, "full_attention_interval": 4, "hidden_act": "silu",
"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
"linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
"tie_word_embeddings": true, "max_position_embeddings": 262144, "rms_norm_eps": 1e-06,
"rope_parameters": {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
}"""
MAX_ROUNDS = 5  # of a measurement
NUMS_ROWS = 1, 16, 256


def config_08b() -> ModelConfig:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(QWEN35_08B, "utf-8")
        return ModelConfig.from_directory(Path(folder))


class Memory(NamedTuple):
    """Bytes in bf16. kv: of a token in the layers that attend; kv_of_all: if every layer did; state: of a sequence."""

    kv: int
    kv_of_all: int
    state: int

    def hybrid(self, num_tokens: int) -> int:
        return self.state + num_tokens * self.kv

    def attention(self, num_tokens: int) -> int:
        return num_tokens * self.kv_of_all


def memory_08b() -> Memory:
    config = config_08b()
    kv = config.kv_bytes_per_token(2)
    return Memory(kv, kv * config.num_hidden_layers // config.num_kv_layers, StateSizes.of(config, 0).num_bytes(2))


class Times(NamedTuple):
    """Seconds for so many rows: the two products; convolution, recurrence and norm; the same in PyTorch."""

    num_rows: int
    products: float
    recurrence: float
    in_torch: float


@torch.inference_mode()
def time_layer() -> list[Times]:
    """In bf16, the best of several rounds. Without a C compiler the last two are the same function."""
    config = config_08b()
    kernels = load_cpu_kernels(config, torch.bfloat16) or TORCH_KERNELS
    net = GatedDeltaNet(config)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.05)
    for product in (net.in_proj, net.out_proj):
        reorder_weight(product.bfloat16(), kernels)
    ours, found = kernels_for(kernels).delta_net, []
    for num_rows in NUMS_ROWS:
        hidden = torch.randn(num_rows, config.hidden_size).bfloat16()
        x = net.in_proj(hidden)
        seq = Sequence([0] * num_rows)
        seq.block_table = [0]
        chunk = ScheduledChunk(seq, 0, num_rows, 0)
        batch = Batch.from_scheduler_output(SchedulerOutput([chunk], [], num_rows), block_size=num_rows)

        def run(function: Any, x: torch.Tensor = x, batch: Batch = batch) -> torch.Tensor:
            return function(x, net, (None,), replace(batch))  # a copy, for which nothing has been worked out yet

        out = run(ours)

        def multiply(hidden: torch.Tensor = hidden, out: torch.Tensor = out) -> None:
            net.in_proj(hidden)
            net.out_proj(out)

        times = [(stopwatch(multiply), stopwatch(lambda: run(ours))) for _ in range(MAX_ROUNDS)]
        in_torch = stopwatch(lambda: run(delta_net))
        found.append(Times(num_rows, min(t for t, _ in times), min(t for _, t in times), in_torch))
    return found
