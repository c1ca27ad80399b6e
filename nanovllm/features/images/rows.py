"""What a step's rows have to do with images: where embeddings stand in for those of tokens, and at which positions."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.features.images.prompt_images import Image, Position
from nanovllm.worker.batch import Batch


@dataclass(frozen=True)
class ImageRows:
    """A stretch of one image's placeholders in a batch. first: the number of its first one in the image."""

    image: Image
    first: int
    rows: Tensor  # [N], of the batch


@dataclass(frozen=True)
class BatchImages:
    """A step's placeholders, each with what the tower gives for it.

    rows        [N], of the batch
    features    [1 + num_deepstack, N, hidden_size]: instead of the tokens' embeddings, then what is added after each of
                the first layers
    """

    rows: Tensor
    features: Tensor

    def put_into(self, hidden: Tensor) -> Tensor:
        """The embeddings, with those of images. hidden: [T, hidden_size]."""
        return hidden.index_copy(0, self.rows, self.features[0])

    def add_after(self, layer: int, hidden: Tensor) -> Tensor:
        """A layer's output, with what is added for images. hidden: [T, hidden_size]."""
        if layer + 1 >= len(self.features):
            return hidden
        return hidden.index_add(0, self.rows, self.features[layer + 1])


def with_images(batch: Batch, output: SchedulerOutput) -> Batch:
    """The batch, with the placeholders of its chunks and their positions."""
    found: list[ImageRows] = []
    positions: list[Position] = []
    row = 0
    for chunk in output.chunks:
        images = chunk.seq.parts.get("images")
        if images is None:
            positions += [(at, at, at) for at in range(chunk.start, chunk.end)]
        else:
            positions += images.positions(chunk.start, chunk.end)
            for image, first, places in images.placeholders(chunk.start, chunk.end):
                rows = torch.tensor([row + at - chunk.start for at in places], dtype=torch.int64, device="cpu")
                found.append(ImageRows(image, first, rows))
        row += chunk.end - chunk.start
    columns = torch.tensor(list(zip(*positions, strict=True)), dtype=torch.int64, device="cpu")  # [3, T]
    is_text = bool((columns == columns[0]).all())
    return replace(batch, positions=columns[0] if is_text else columns, image_rows=found)
