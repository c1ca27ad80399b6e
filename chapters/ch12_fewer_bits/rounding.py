"""What the lab of chapter 12 does to a real model: its weights or its activations rounded for a while, and the change.

Weights are rounded as in the first exercise, in groups of any size; for 32 numbers that is what the engine's own
quantizers do. Everything is computed in float32.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm import LLM
from nanovllm.core.scheduler import ScheduledChunk, SchedulerOutput
from nanovllm.core.sequence import Sequence
from nanovllm.features.quantization.formats import Format
from nanovllm.worker.batch import Batch
from nanovllm.worker.layers import Linear, plain_linear

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
MAX_TOKENS = 160
ROW = 0  # as a group size: one group for the whole row


def in_groups_of(x: Tensor, size: int) -> Tensor:
    """float32 [rows, num_groups, size] of x [rows, k], with zeros after the last number."""
    size = size or x.shape[1]
    return F.pad(x.float(), (0, -x.shape[1] % size)).unflatten(1, (-1, size))


def quantize(groups: Tensor, format: Format) -> tuple[Tensor, Tensor, Tensor | None]:
    """The first exercise for many groups [..., size] at once: uint8 codes, float16 scales and minimums (or None)."""
    if format.has_minimum:
        minimums, first, last = groups.amin(-1).half(), 0, 2**format.bits - 1
        scales = ((groups.amax(-1) - minimums.float()) / last).half()
        groups = groups - minimums.float()[..., None]
    else:
        top = 2 ** (format.bits - 1) - 1
        minimums, first, last = None, format.zero - top, format.zero + top
        scales = (groups.abs().amax(-1) / top).half()
    divisors = torch.where(scales == 0, 1, scales.float())  # 0 / 0 is nan
    codes = (groups / divisors[..., None]).round().add(format.zero).clamp(first, last)
    return codes.to(torch.uint8), scales, minimums


def rounded(x: Tensor, format: Format, size: int) -> Tensor:
    """x [rows, k], quantized in groups of `size` and restored."""
    codes, scales, minimums = quantize(in_groups_of(x, size), format)
    restored = codes.float().sub_(format.zero).mul_(scales.float()[..., None])
    if minimums is not None:
        restored += minimums.float()[..., None]
    return restored.flatten(1)[:, : x.shape[1]]


def error(x: Tensor, other: Tensor) -> float:
    """Root of the mean squared difference, as a share of the root of the mean square."""
    return float((x - other).norm() / x.norm())


class Change(NamedTuple):
    """What became of a model's predictions for a text.

    perplexity: e to the power of the mean of -log p(next token). divergence: the mean KL divergence from the original
    distribution, in nats. num_other: positions at which a different token is now the most likely one, of num_tokens.
    """

    perplexity: float
    more: float  # perplexity, as a share more than the original's
    divergence: float
    num_other: int
    num_tokens: int


class Model:
    """The engine's decoder in float32, with a matrix of its own for the output; a text; how it was predicted."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.runner = llm, llm.engine.model_runner
        self.decoder = self.runner.model
        self.decoder.requires_grad_(False)
        if self.decoder.lm_head.weight is self.decoder.embed_tokens:  # rounding the one must not round the other
            self.decoder.lm_head.weight = nn.Parameter(self.decoder.embed_tokens.clone(), requires_grad=False)
        tensors = dict(self.decoder.checkpoint_tensors()) | {"lm_head.weight": self.decoder.lm_head.weight}
        self.weights = {  # "model.layers.0.self_attn.q_proj.weight" -> a view of the merged matrix
            name: tensor for name, tensor in tensors.items() if any(f"{kind}.weight" in name for kind in KINDS)
        }
        self.text, self.is_shuffled = "", False

    def names(self, kind: str = "", layer: int | range | None = None) -> list[str]:
        """Of the matrices of this kind, in this layer or these; all of them where neither is given."""
        layers = range(layer, layer + 1) if isinstance(layer, int) else layer
        return [
            name
            for name in self.weights
            if kind in name and (layers is None or any(f".layers.{number}." in name for number in layers))
        ]

    # -- a text -----------------------------------------------------------------------------------------------------

    def read(self, text: str) -> int:
        """Predict this text with the model as it is; later changes are measured against that. Returns its tokens."""
        token_ids = self.llm.get_tokenizer()(text).input_ids[:MAX_TOKENS]
        if len(token_ids) < 3:
            raise ValueError("type a text of at least three tokens")
        self.text, self.token_ids = text, token_ids
        self.before = self._log_probs()
        self.perplexity = self._perplexity(self.before)
        return len(token_ids)

    def change(self) -> Change:
        """The text once more, with the model as it is now."""
        now = self._log_probs()
        perplexity = self._perplexity(now)
        divergence = float((self.before.exp() * (self.before - now)).sum(-1).mean())
        num_other = int((now.argmax(-1) != self.before.argmax(-1)).sum())
        return Change(perplexity, perplexity / self.perplexity - 1, divergence, num_other, len(now))

    def _perplexity(self, log_probs: Tensor) -> float:
        next_ids = torch.tensor(self.token_ids[1:])[:, None]
        return math.exp(-float(log_probs.gather(1, next_ids).mean()))

    @torch.inference_mode()
    def _log_probs(self) -> Tensor:
        """[number of tokens - 1, vocab_size]: one step of the engine's decoder, with the logits of all its rows."""
        seq, size = Sequence(self.token_ids), self.runner.block_size
        num_tokens = len(seq.tokens)
        seq.block_table = list(range(-(-num_tokens // size)))  # nobody else uses this engine's pool
        chunk = ScheduledChunk(seq, 0, num_tokens, 0)
        batch = Batch.from_scheduler_output(SchedulerOutput([chunk], [], num_tokens), size)
        batch = replace(batch, logits_rows=torch.arange(num_tokens - 1)).to(self.runner.device)
        hidden = self.decoder(batch, self.runner.rotary, self.runner.kv_cache, self.runner.kernels)
        logits = self.decoder.logits(hidden)
        return logits.float().cpu().log_softmax(-1)

    # -- rounding ---------------------------------------------------------------------------------------------------

    @contextmanager
    def rounded(self, names: Iterable[str], format: Format, size: int) -> Iterator[None]:
        """These weights are rounded for a while."""
        before: dict[str, Tensor] = {}
        try:
            for name in names:
                before[name] = self.weights[name].clone()
                self.weights[name].copy_(rounded(before[name], format, size))
            yield
        finally:
            for name, weight in before.items():
                self.weights[name].copy_(weight)

    @contextmanager
    def rounded_activations(self, format: Format, size: int) -> Iterator[None]:
        """What goes into every linear layer is rounded for a while."""
        linears = [module for module in self.decoder.modules() if isinstance(module, Linear)]
        for linear in linears:
            linear.product = lambda x, *rest: plain_linear(rounded(x, format, size), *rest)
        try:
            yield
        finally:
            for linear in linears:
                linear.product = plain_linear

    def inputs(self, suffix: str) -> dict[int, Tensor]:
        """Layer number -> what goes into its module of this name, for each token of the text."""
        found: dict[int, Tensor] = {}
        hooks = [
            layer.get_submodule(suffix).register_forward_pre_hook(
                lambda module, args, number=number: found.update({number: args[0].clone()})
            )
            for number, layer in enumerate(self.decoder.layers)
        ]
        try:
            self._log_probs()
        finally:
            for hook in hooks:
                hook.remove()
        return found

    # -- the same function from other weights -----------------------------------------------------------------------

    def shuffle(self, seed: int = 0) -> None:
        """Renumber the dimensions inside the model, or, where that was done, put them back: the same function.

        A dimension's number means nothing: permute the columns of every matrix that reads the residual stream and the
        rows of every one that adds to it, and all sums have the same terms. Likewise inside the MLP, and inside the
        heads of V. What changes is who shares a group with whom.
        """
        undo, decoder, generator = self.is_shuffled, self.decoder, torch.Generator().manual_seed(seed)
        self.is_shuffled = not undo

        def order(size: int) -> Tensor:
            permutation = torch.randperm(size, generator=generator)
            return permutation.argsort() if undo else permutation

        def permute(x: Tensor | None, order: Tensor, dim: int = 0) -> None:
            if x is not None:
                x.copy_(x.index_select(dim, order))

        hidden = order(decoder.config.hidden_size)
        for x, dim in ((decoder.embed_tokens, 1), (decoder.lm_head.weight, 1), (decoder.norm.weight, 0)):
            permute(x, hidden, dim)
        for layer in decoder.layers:
            attention, mlps = layer.self_attn, list(getattr(layer.mlp, "experts", [layer.mlp]))
            inners, in_head = [order(mlp.down_proj.weight.shape[1]) for mlp in mlps], order(attention.head_dim)
            routers = [layer.mlp.gate] if hasattr(layer.mlp, "gate") else []
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                permute(norm.weight, hidden)
            for reads in (attention.qkv_proj, *routers, *(mlp.gate_up_proj for mlp in mlps)):
                permute(reads.weight, hidden, 1)
            for adds in (attention.o_proj, *(mlp.down_proj for mlp in mlps)):
                permute(adds.weight, hidden)
                permute(adds.bias, hidden)
            for mlp, inner in zip(mlps, inners, strict=True):
                for x in (mlp.gate_up_proj.weight, mlp.gate_up_proj.bias):
                    for half in [] if x is None else x.chunk(2):
                        permute(half, inner)
                permute(mlp.down_proj.weight, inner, 1)
            for x in (attention.qkv_proj.weight, attention.qkv_proj.bias):
                for head in [] if x is None else x.split(attention.qkv_proj.out_sizes)[2].split(attention.head_dim):
                    permute(head, in_head)  # the same order in all heads: query heads share those of V
            for head in attention.o_proj.weight.split(attention.head_dim, dim=1):
                permute(head, in_head, 1)
