"""Adapters with random numbers, saved by peft."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

SHARED = list(range(20, 45))
# Three ranks can share it: 6 heads over 3 KV heads.
IN_THREES = dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3, vocab_size=321)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def make_adapter(folder: Path, base: Path, seed: int = 0, made_for: Any = AutoModelForCausalLM, **options) -> Path:
    """An adapter with random numbers, large enough to change answers, as peft saves it."""
    import peft  # takes a second

    model = made_for.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"init_lora_weights": False, "lora_alpha": 8} | options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.2, generator=generator)
    model.save_pretrained(folder)
    return folder
