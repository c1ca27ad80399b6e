"""What stands in the place of a pooling model's output head. Hidden states are turned to float32 first.

No product with the vocabulary is computed, and none of its weights are kept.
"""

import torch
from torch import Tensor, nn

from nanovllm.worker.layers import parameter


class EmbeddingHead(nn.Module):
    """The hidden states themselves: [R, hidden_size]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.float()


class ScoreHead(nn.Module):
    """[R, num_labels], in float32 whatever the model computes in."""

    def __init__(self, hidden_size: int, num_labels: int) -> None:
        super().__init__()
        self.weight = parameter(num_labels, hidden_size, dtype=torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """One row at a time: with several, PyTorch sums up in another order, and a row's bits would have company."""
        rows = [(self.weight * row).sum(-1) for row in hidden.float()]
        return torch.stack(rows) if rows else hidden.new_empty(0, len(self.weight), dtype=torch.float32)
