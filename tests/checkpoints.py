"""Tiny random checkpoints of every supported architecture, and transformers' answers for them."""

import json
import os
from functools import cache
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SmolLM3Config,
)
from transformers.utils.logging import disable_progress_bar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
disable_progress_bar()  # it would be part of what a test finds in stderr

SMALL = dict(block_size=4, num_gpu_blocks_override=160, max_model_len=256)  # an engine with a small pool
SPECIAL_TOKENS = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 0, 1
CORPUS = ["the quick brown fox jumps over the lazy dog", "two gulls circled above a red boat in the fog"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{% if loop.index > 9 %}{{ raise_exception('at most 9 messages') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SIZES = dict(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,  # wide margins between logits
    bos_token_id=BOS,
    eos_token_id=EOS,
    pad_token_id=EOS,
)
LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
EXPERTS = dict(head_dim=24, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, norm_topk_prob=True)
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
LINEAR = "linear_attention"
# Heads of sizes that are no multiples of a vector's, two value heads for each key head, a quarter of a head rotated.
HYBRID = dict(
    num_hidden_layers=4,
    head_dim=24,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=10,
    linear_value_head_dim=20,
    rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 1]),
)
SHARED_EXPERT = dict(EXPERTS, shared_expert_intermediate_size=40)
VARIANTS = {
    "llama": (LlamaConfig, dict(tie_word_embeddings=False)),
    "llama-mha-tied": (LlamaConfig, dict(num_key_value_heads=4, tie_word_embeddings=True)),
    "llama-biases": (LlamaConfig, dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)),
    "llama-llama3-rope": (LlamaConfig, dict(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=False)),
    "llama-linear-rope": (
        LlamaConfig,
        dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0), head_dim=32),
    ),
    "qwen2": (Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3Config, dict(head_dim=24, tie_word_embeddings=False)),
    "qwen3-moe": (Qwen3MoeConfig, dict(EXPERTS, num_hidden_layers=3, mlp_only_layers=[1])),
    "qwen3-moe-not-normalized": (Qwen3MoeConfig, dict(EXPERTS, norm_topk_prob=False, decoder_sparse_step=2)),
    "qwen3-yarn": (Qwen3Config, dict(head_dim=24, rope_parameters=YARN_ROPE, max_position_embeddings=128)),
    "mistral": (MistralConfig, dict(sliding_window=None)),
    "mistral-window": (MistralConfig, dict(sliding_window=7)),
    "qwen2-window": (Qwen2Config, dict(sliding_window=21, use_sliding_window=True, max_window_layers=1)),
    "smollm3": (SmolLM3Config, dict(num_hidden_layers=4)),
    "qwen3.5": (Qwen3_5TextConfig, HYBRID),
    "qwen3.5-tied": (
        Qwen3_5TextConfig,
        HYBRID | dict(linear_num_value_heads=2, tie_word_embeddings=True, layer_types=["full_attention", LINEAR] * 2),
    ),
    "qwen3.5-moe": (Qwen3_5MoeTextConfig, HYBRID | SHARED_EXPERT),
    "qwen3-next": (Qwen3NextConfig, HYBRID | SHARED_EXPERT | dict(mlp_only_layers=[1])),
}


HYBRIDS = [name for name, (_, options) in VARIANTS.items() if "linear_num_key_heads" in options]


def make_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", chat_template=CHAT_TEMPLATE
    )


def make_checkpoint(folder: Path, variant: str, *, shards: bool = False, **changes) -> Path:
    """Write a checkpoint directory. Biases and norms are random, too, so that leaving one out shows."""
    config_class, options = VARIANTS[variant]
    config = config_class(**{**SIZES, **options, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "norm" in name:
                is_offset = "linear_num_key_heads" in options and "linear_attn" not in name  # 1 is added to these
                parameter.uniform_(0.6, 1.4).sub_(int(is_offset))
            elif "conv1d" in name:
                parameter.uniform_(-0.7, 0.7)
    model.generation_config.eos_token_id = [EOS, 3]  # a list, as chat checkpoints have it
    model.save_pretrained(folder, max_shard_size="60KB" if shards else "5GB")
    make_tokenizer().save_pretrained(folder)
    return folder


@cache
def reference_model(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """transformers' logits at every position: [len(token_ids), vocab_size]."""
    return reference_model(folder)(torch.tensor([token_ids])).logits[0]


@cache
def reference_choices(folder: Path, token_ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """After each of these tokens: transformers' greedy choice, and how far it is ahead of the second."""
    best = reference_logits(folder, list(token_ids)).topk(2)
    return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def assert_greedy(folder: Path, prompt: list[int], answer: list[int]) -> None:
    """Each token is the reference's choice after those before it, or the reference itself has a tie there.

    Then the reference would have generated just these; one pass shows it.
    """
    choices, margins = reference_choices(folder, (*prompt, *answer))
    for position, token in enumerate(answer, start=len(prompt)):
        expected, margin = choices[position - 1], margins[position - 1]
        assert token == expected or margin < 1e-4, f"{position}: {token}, expected {expected} (margin {margin:.4f})"


NULL = object()


def edit(path: Path, **changes) -> None:
    """Change fields of a JSON file; None takes one out, NULL writes null."""
    fields = (json.loads(path.read_text()) | changes).items()
    kept = {name: value for name, value in fields if value is not None or name not in changes}
    path.write_text(json.dumps({name: None if value is NULL else value for name, value in kept.items()}))
