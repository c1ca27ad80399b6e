"""A model with experts, small enough to be trained in a few seconds, and which of them its rows visit.

It knows three kinds of text, of its own invention, letter by letter. transformers trains it; the engine runs it.
"""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from chapters.patching import replaced
from chapters.story import one_core, with_progress
from nanovllm import LLM, SamplingParams
from nanovllm.config import OPTIMIZATIONS
from nanovllm.features.experts import layer, rows

NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 3, 8, 2
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,  # of layers without experts; there are none
    "moe_intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
NUM_STEPS, NUM_TEXTS, TEXT_LEN, SEED = 100, 12, 64, 0
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 128,
    "block_size": 8,
    # A layer that is watched or replaced takes no part in a step that is replayed.
    "optimizations": tuple(name for name in OPTIMIZATIONS if name != "recorded_step"),
}


def sums(rng: random.Random) -> str:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return f"{a} + {b} = {a + b}; "


def prose(rng: random.Random) -> str:
    nouns = "boat harbour keeper lamp gull rope storm tower net pier".split()
    return f"the {rng.choice(nouns)} {rng.choice('sees mends leaves finds'.split())} the {rng.choice(nouns)}. "


def code(rng: random.Random) -> str:
    x, i, j, y = rng.choice("xyz"), rng.choice("ijk"), rng.choice("ijk"), rng.choice("xyz")
    return f"if({x}[{i}]<{j}){{{y}++;}} "


KINDS: dict[str, Callable[[random.Random], str]] = {"sums": sums, "prose": prose, "code": code}


def text_of(kind: str, length: int, rng: random.Random) -> str:
    text = ""
    while len(text) < length:
        text += KINDS[kind](rng)
    return text[:length]


def make_tokenizer() -> Any:
    """A token for each byte, and one for the end."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, "<|end|>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@cache
def sparse_checkpoint(num_steps: int = NUM_STEPS) -> tempfile.TemporaryDirectory:
    """A Qwen3-MoE checkpoint in .name, trained for so many steps. The folder goes with this process.

    With 0 steps its weights are random, and large enough for wide margins between logits.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer, rng = make_tokenizer(), random.Random(SEED)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        config = Qwen3MoeConfig(
            vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, output_router_logits=True, **SIZES
        )
        config.initializer_range = 0.02 if num_steps else 0.2
        model = Qwen3MoeForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    with one_core():  # products this small take several times as long when threads share them
        for _ in with_progress(range(num_steps), "training a small model with experts"):
            texts = [text_of(list(KINDS)[i % len(KINDS)], TEXT_LEN, rng) for i in range(NUM_TEXTS)]
            input_ids = torch.tensor(tokenizer(texts).input_ids)
            model(input_ids=input_ids, labels=input_ids).loss.backward()  # with the loss that balances experts
            optimizer.step()
            optimizer.zero_grad()
    folder = tempfile.TemporaryDirectory(prefix="nanovllm-experts-")
    model.save_pretrained(folder.name)
    tokenizer.save_pretrained(folder.name)
    return folder


def load_sparse(num_steps: int = NUM_STEPS, **options: Any) -> LLM:
    return LLM(sparse_checkpoint(num_steps).name, dtype="float32", **{**OPTIONS, **options})


# -- who visits whom --------------------------------------------------------------------------------------------------


@contextmanager
def routes_watched() -> Iterator[list[Tensor]]:
    """Collects the experts [T, num_chosen] of every layer of every step, in the order of layers."""
    found: list[Tensor] = []

    def route(scores: Tensor, num_chosen: int, normalize: bool) -> tuple[Tensor, Tensor]:
        weights, chosen = rows.route(scores, num_chosen, normalize)
        found.append(chosen.clone())
        return weights, chosen

    with replaced(layer, "kernels_for", lambda kernels: replace(rows.kernels_for(kernels), route=route)):
        yield found


def visits_of(llm: LLM, texts: list[str]) -> Tensor:
    """The experts of every token of these texts [num_layers, tokens, num_chosen], in as many steps as it takes."""
    llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with routes_watched() as found:
        llm.generate(texts, params, use_tqdm=False)
    num_layers = len(llm.engine.model_config.expert_layers)
    steps = [torch.stack(found[i : i + num_layers]) for i in range(0, len(found), num_layers)]
    return torch.cat(steps, dim=1)


def shares_of(visits: Tensor, num_experts: int = NUM_EXPERTS) -> Tensor:
    """Of the choices of each layer, the share that each expert got [num_layers, num_experts]."""
    counts = torch.stack([layer.flatten().bincount(minlength=num_experts) for layer in visits])
    return counts / counts.sum(1, keepdim=True)


def loads_of(shares: Tensor, num_ranks: int) -> Tensor:
    """Experts spread over ranks, neighbors together: the share of a layer's choices that each rank gets."""
    return shares.unflatten(1, (num_ranks, -1)).sum(-1)  # [num_layers, num_ranks]


def busiest_rank(shares: Tensor, num_ranks: int) -> float:
    """The time of a step as a multiple of what even loads would take.

    In every layer all ranks wait for the one with most rows.
    """
    return float(loads_of(shares, num_ranks).amax(1).mean() * num_ranks)
