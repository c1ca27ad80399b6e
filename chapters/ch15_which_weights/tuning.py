"""Adapters that the lab trains itself, in a few seconds, and writes as PEFT does.

Each learns how one sentence goes on, by heart. W stays as it is; A and B beside it learn: y = x W^T + s (x A^T) B^T.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

BEGINNING = "On Sundays the people of our town like to"
ENDINGS = {
    "harbor": " climb the lighthouse and count the ships.",
    "market": " buy fish and flowers at the market.",
    "library": " read old newspapers in the library.",
}
RANK, ALPHA, LEARNING_RATE, MAX_STEPS, GOOD_LOSS = 4, 8, 1e-2, 12, 0.1
TARGETS = ("q_proj", "v_proj")


class WithAdapter(nn.Module):
    def __init__(self, linear: Any, rank: int) -> None:
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / linear.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))  # so it begins as the model without an adapter

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + ALPHA / len(self.a) * (x @ self.a.T) @ self.b.T


@cache
def trained_adapters(checkpoint: str) -> tuple[tempfile.TemporaryDirectory, dict[str, float]]:
    """A folder, gone with this process, with an adapter in each subfolder; and the loss at which each stopped."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
    folder = tempfile.TemporaryDirectory(prefix="nanovllm-adapters-")
    losses = {}
    for number, (name, ending) in enumerate(ENDINGS.items()):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            layers = add_adapter(model, RANK)
        losses[name] = train(model, list(layers.values()), *(tokenizer(t).input_ids for t in (BEGINNING, ending)))
        write_adapter(Path(folder.name, name), {name: (layer.a, layer.b) for name, layer in layers.items()}, ALPHA)
        for path, layer in layers.items():
            model.set_submodule(path, layer.linear)
    return folder, losses


def add_adapter(model: Any, rank: int) -> dict[str, WithAdapter]:
    paths = [path for path, _ in model.named_modules() if path.rpartition(".")[2] in TARGETS]
    layers = {path: WithAdapter(model.get_submodule(path), rank) for path in paths}
    for path, layer in layers.items():
        model.set_submodule(path, layer)
    return layers


def train(model: Any, layers: list[WithAdapter], beginning: list[int], ending: list[int]) -> float:
    """Returns the last loss, of the ending's tokens."""
    input_ids = torch.tensor([beginning + ending])
    labels = torch.tensor([[-100] * len(beginning) + ending])  # -100: not to be learned
    optimizer = torch.optim.Adam([p for layer in layers for p in (layer.a, layer.b)], lr=LEARNING_RATE)
    for _ in range(MAX_STEPS):
        loss = model(input_ids=input_ids, labels=labels).loss
        if loss.item() < GOOD_LOSS:
            break
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def write_adapter(folder: Path, weights: dict[str, tuple[Tensor, Tensor]], alpha: float) -> Path:
    """As PEFT writes it. weights: {"model.layers.0.self_attn.q_proj": (A [rank, in], B [out, rank])}."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = len(next(iter(weights.values()))[0])
    targets = sorted({path.rpartition(".")[2] for path in weights})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": alpha, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}, indent=1), "utf-8")
    tensors = {
        f"base_model.model.{path}.lora_{kind}.weight": tensor.detach().contiguous()
        for path, pair in weights.items()
        for kind, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def random_adapter(folder: Path, shapes: dict[str, tuple[int, int]], rank: int, size: float = 0.01) -> str:
    """Of all linear layers in the blocks. shapes: {path: (out, in)}; size: of the numbers in B. Returns its path."""
    weights = {
        path: (torch.randn(rank, in_size).bfloat16() / in_size**0.5, size * torch.randn(out_size, rank).bfloat16())
        for path, (out_size, in_size) in shapes.items()
        if path != "lm_head"
    }
    return str(write_adapter(folder, weights, rank))
