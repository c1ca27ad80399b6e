"""The decoder of one rank: which layers hold which part, and where the ranks meet (chapter 9; arXiv:1909.08053).

Of an MLP and of an attention's heads, a rank holds the rows of the first weights (column-parallel, named after W^T: it
computes those columns of y) and the matching columns of the last (row-parallel). So the ranks meet once in each half of
a layer, to add up what they got.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.worker.layers import Linear, building
from nanovllm.worker.model import Decoder, DecoderLayer

if TYPE_CHECKING:
    from nanovllm.features.parallel.group import RankGroup

ROW_PARALLEL = ("o_proj", "out_proj", "down_proj")


class RowParallelLinear(Linear):
    """A rank holds some columns of the weight, for the columns of x that it has. The ranks add up what they get."""

    def __init__(self, in_size: int, out_size: int, bias: bool, group: "RankGroup") -> None:
        super().__init__(in_size, out_size, bias)
        self.group = group

    @classmethod
    def of(cls, linear: Linear, group: "RankGroup") -> "RowParallelLinear":
        """With the weight and the bias of a layer that has the sizes of this rank's share."""
        out_size, in_size = linear.weight.shape
        with building(linear.weight.dtype, torch.device("meta")):
            layer = cls(in_size, out_size, bias=linear.bias is not None, group=group)
        layer.weight = linear.weight
        layer.bias = linear.bias
        return layer

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.group.rank == 0 else None  # once, not once a rank
        return self.group.all_reduce(self.product(x, self.weight, bias))


class ParallelDecoder(Decoder):
    """config has the sizes of this rank's share: of heads, of the MLP's columns, of the vocabulary (shard_config)."""

    def __init__(self, config: ModelConfig, group: "RankGroup") -> None:
        self.group = group
        super().__init__(config)

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        layer = super().make_layer(config, index)
        for path, module in list(layer.named_modules()):
            if path.split(".")[-1] in ROW_PARALLEL and ".shared_expert." not in path:
                layer.set_submodule(path, RowParallelLinear.of(module, self.group))
        # A rank has a slice of every expert, of a shared one, too. What it gets of all of them is added up once.
        if index in config.expert_layers:
            experts: Any = layer.mlp
            experts.collect_weights()
            experts.register_forward_hook(lambda experts, inputs, y: self.group.all_reduce(y))
        return layer

    def embed(self, input_ids: Tensor) -> Tensor:
        """Each rank looks up the words it holds; the others' rows are 0 until the sum."""
        rows = input_ids - self.group.rank * self.config.vocab_size
        elsewhere = (rows < 0) | (rows >= self.config.vocab_size)
        hidden = self.lookup(rows.masked_fill(elsewhere, 0), self.embed_tokens)
        return self.group.all_reduce(hidden.masked_fill(elsewhere[:, None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the whole vocabulary on rank 0; the others get none, [0, vocab_size]."""
        if self.config.pooling is not None:  # its head is small, and every rank has all of it
            return super().logits(hidden if self.group.rank == 0 else hidden[:0])
        return self.group.gather(super().logits(hidden))
