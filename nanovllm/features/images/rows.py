"""What a step's rows have to do with images: where embeddings stand in for those of tokens, and at which positions."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanovllm.core.scheduler import SchedulerOutput
from nanovllm.features.images.prompt_images import Image, Position
from nanovllm.worker.batch import Batch, BatchPart


@dataclass(frozen=True)
class ImageRows:
    """A stretch of one image's placeholders in a batch. first: the number of its first one in the image."""

    image: Image
    first: int
    rows: Tensor  # [N], of the batch


@dataclass(frozen=True)
class BatchPlaceholders(BatchPart):
    """A step's placeholders, before the tower has looked at their images."""

    stretches: list[ImageRows]


@dataclass(frozen=True)
class BatchImages(BatchPart):
    """A step's placeholders, each with what the tower gives for it.

    rows        [N], of the batch
    features    [1 + num_deepstack, N, hidden_size]: instead of the tokens' embeddings, then what is added after each of
                the first layers
    """

    rows: Tensor
    features: Tensor

    def after_embedding(self, hidden: Tensor) -> Tensor:
        return hidden.index_copy(0, self.rows, self.features[0])

    def after_layer(self, index: int, hidden: Tensor) -> Tensor:
        if index + 1 >= len(self.features):
            return hidden
        return hidden.index_add(0, self.rows, self.features[index + 1])


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
    parts = batch.parts | {"images": BatchPlaceholders(found)} if found else batch.parts
    return replace(batch, positions=columns[0] if is_text else columns, parts=parts)
