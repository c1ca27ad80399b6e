"""Parts of lab 1: a real model, one token at a time; attention by hand; what a token costs.

Everything runs in float32, so that the probabilities come out the same on every machine.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from chapters.patching import replaced
from chapters.slots import in_slots
from nanovllm import LLM, SamplingParams
from nanovllm.checkpoint import ModelConfig
from nanovllm.worker import attention
from nanovllm.worker.batch import Batch
from nanovllm.worker.model import Decoder

ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)

# An H100 SXM by its data sheet: bytes that it reads and additions and multiplications in bf16 that it does, a second.
H100_BYTES_PER_S, H100_FLOPS = 3.35e12, 989e12


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Numbers in each part of the engine's decoder, built on the meta device: shapes without memory."""
    with torch.device("meta"):
        model = Decoder(config)
    counts = dict.fromkeys(("embeddings", "attention", "MLP", "norms", "output"), 0)
    for name, parameter in model.named_parameters():  # a tied matrix comes once, as embed_tokens
        parts = {"embed": "embeddings", "norm": "norms", "attn": "attention", "mlp": "MLP", "lm_head": "output"}
        counts[next(part for word, part in parts.items() if word in name)] += parameter.numel()
    return counts


def weights_read(config: ModelConfig) -> int:
    """Numbers that one step reads: all, except that of an embedding matrix of its own it reads a row a token."""
    counts = count_parameters(config)
    return sum(counts.values()) - (0 if config.tie_word_embeddings else counts["embeddings"])


def rows_of(cache: Tensor, batch: Batch, b: int) -> Tensor:
    """Sequence b's keys (or values) out of one layer's cache, in order: [m, num_kv_heads, head_dim]."""
    return cache[batch.block_tables[b].long()].flatten(0, 1)[: batch.key_lens[b]]


@contextmanager
def model_watched(llm: LLM) -> Iterator[list[Tensor]]:
    """Collects what the model makes of each step: logits [R, vocab_size]."""
    found: list[Tensor] = []
    runner = llm.engine.model_runner
    sample = runner._sample

    def watched_sample(logits: Tensor, sampling: Any) -> Any:
        found.append(logits)
        return sample(logits, sampling)

    with replaced(runner, "_sample", watched_sample):
        yield found


def next_logits_of(llm: LLM) -> Callable[[list[int]], Tensor]:
    """The engine's model as a function: token ids -> logits [vocab_size] of the next one, all computed from scratch."""

    def next_logits(token_ids: list[int]) -> Tensor:
        llm.reset_prefix_cache()
        with model_watched(llm) as found:
            llm.generate([list(token_ids)], ONE_TOKEN, False)
        return found[-1][0].float().cpu().clone()

    return next_logits


@contextmanager
def attention_watched(llm: LLM) -> Iterator[list[tuple[Tensor, ...]]]:
    """Collects each layer's q, k, v, attention in plain PyTorch and by the kernel of this machine, of one sequence."""
    runner = llm.engine.model_runner
    kernels, found = runner.kernels, list[tuple[Tensor, ...]]()

    def paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, window: int = 0) -> Tensor:
        out = kernels.paged_attention(q, k_cache, v_cache, batch, window)
        k_cache, v_cache = in_slots((k_cache, v_cache), kernels)
        k, v = (rows_of(cache, batch, 0).clone() for cache in (k_cache, v_cache))
        found.append((q.clone(), k, v, attention.paged_attention(q, k_cache, v_cache, batch, window), out.clone()))
        return out

    with replaced(runner, "kernels", dataclasses.replace(kernels, paged_attention=paged_attention)):
        yield found


def attend(query: list[float], keys: list[list[float]], values: list[list[float]]) -> tuple[list[float], ...]:
    """Attention of one query in one head, as you would do it on paper. Returns dot products, weights and the mix."""
    dots = [sum(a * b for a, b in zip(query, key, strict=True)) for key in keys]
    shares = [math.exp(dot / math.sqrt(len(query))) for dot in dots]
    weights = [share / sum(shares) for share in shares]
    mix = [sum(w * value[i] for w, value in zip(weights, values, strict=True)) for i in range(len(values[0]))]
    return dots, weights, mix


def piece(llm: LLM, token_id: int) -> str:
    """The text of one token, in quotes; the name of one that is not text."""
    tokenizer = llm.get_tokenizer()
    text = tokenizer.decode([token_id], skip_special_tokens=True)
    return escape(repr(text or tokenizer.convert_ids_to_tokens(token_id)))


def table(*columns: str, left: int = 1) -> Table:
    """Its first `left` columns hold text, the others numbers."""
    made = Table(show_edge=False, header_style="bold")
    for i, name in enumerate(columns):
        made.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return made
