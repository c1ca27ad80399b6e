"""PromptImages: the images of one prompt, where their placeholders are, and which positions the tokens have."""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanovllm.core.block_hash import MMSpan
from nanovllm.core.sequence import SequencePart

if TYPE_CHECKING:
    from nanovllm.core.scheduler import SchedulerOutput
    from nanovllm.worker.batch import Batch

Position = tuple[int, int, int]  # time, height, width


@dataclass(frozen=True)
class Image:
    """One image and how its placeholders stand.

    content_hash   of its decoded pixels and the processor's options
    make_inputs    gives what the tower takes, by transformers' names: numbers that need ten times the image's
                   memory and more, so an image that waits for the tower does not hold them
    num_bytes      of the image, which make_inputs holds
    num_placeholders   one for each vector of the tower
    grid           rows and columns of its placeholders, if they have positions of their own (Qwen); None: they do not
    split          rows and columns of the parts that it was cut into (Idefics3); (0, 0): it was not
    """

    content_hash: str
    make_inputs: Callable[[], dict[str, Tensor]] = field(repr=False, compare=False)
    num_placeholders: int
    num_bytes: int = 0
    grid: tuple[int, int] | None = None
    split: tuple[int, int] = (0, 0)

    def __getstate__(self) -> dict[str, Any]:
        """For ranks, which are other processes: with what the tower takes in place of the image."""
        return vars(self) | {"make_inputs": partial(dict, self.make_inputs())}


@dataclass(frozen=True)
class PromptImages(SequencePart):
    """places: of each image, the indices of its placeholders in the prompt, ascending."""

    images: tuple[Image, ...]
    places: tuple[tuple[int, ...], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the images."""
        return sum(image.num_bytes for image in self.images)

    @property
    def spans(self) -> tuple[MMSpan, ...]:
        """For the prefix cache: from each image's first placeholder to its last."""
        return tuple(
            MMSpan(places[0], places[-1] + 1 - places[0], image.content_hash)
            for image, places in zip(self.images, self.places, strict=True)
        )

    @staticmethod
    def add_to_batch(batch: "Batch", output: "SchedulerOutput") -> "Batch":
        from nanovllm.features.images.rows import with_images  # what a request needs loads no batch

        return with_images(batch, output)

    def placeholders(self, start: int, end: int) -> list[tuple[Image, int, list[int]]]:
        """(image, number of the first placeholder, their indices) of each image with placeholders in [start, end)."""
        found = []
        for image, places in zip(self.images, self.places, strict=True):
            first = bisect_left(places, start)
            within = list(places[first : bisect_left(places, end)])
            if within:
                found.append((image, first, within))
        return found

    def positions(self, start: int, end: int) -> list[Position]:
        """The positions of the tokens [start, end), which may lie beyond the prompt.

        A text's token has one number three times. An image's placeholders stand in a plane (Qwen2-VL,
        arXiv:2409.12191): all at the same time, each in its row and column, and the text goes on after the longer side.
        """
        found: list[Position] = []
        index = 0  # of the token that comes next
        position = 0  # its own
        for image, places in zip(self.images, self.places, strict=True):
            if image.grid is None:
                continue
            found += _text(index, places[0], position, start, end)
            position += places[0] - index
            height, width = image.grid
            for at in range(max(start, places[0]), min(end, places[-1] + 1)):
                row, column = divmod(at - places[0], width)
                found.append((position, position + row, position + column))
            position += max(height, width)
            index = places[-1] + 1
        return found + _text(index, end, position, start, end)


def _text(first: int, stop: int, position: int, start: int, end: int) -> list[Position]:
    """Positions of those of the text's tokens [first, stop) that are in [start, end). position: of token `first`."""
    return [(position + at - first,) * 3 for at in range(max(first, start), min(stop, end))]
