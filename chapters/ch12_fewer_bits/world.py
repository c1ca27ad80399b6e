"""The object that the lab of chapter 12 plays with: a matrix of a real model, a format, a group, an outlier."""

from typing import NamedTuple

import torch
from torch import Tensor

from chapters.ch12_fewer_bits.rounding import KINDS, ROW, Change, Model, error, in_groups_of, quantize, rounded
from nanovllm.features.quantization.formats import Q4_0, Q4_1, Q8_0, Format

FORMATS = (Q4_1, Q4_0, Q8_0)
SIZES = (32, 128, ROW)
OUTLIERS = (0, 1, 4, 16)  # how many times as large as the largest of its row; 0: none
TEXT = (
    "The night train from the coast was late again, and the waiting room smelled of wet wool. An old man unfolded a "
    "newspaper that somebody had left on the bench. Its first page reported that the bridge would be closed until "
    "spring, because the river had washed away two of its pillars. He read the article twice, shook his head, and "
    "asked the woman behind the counter whether a bus would run instead."
)


def size_name(size: int) -> str:
    return f"{size} numbers" if size else "a whole row"


class Shown(NamedTuple):
    """A group as it is drawn. codes, and what comes back of numbers; errors of the others: without the outlier."""

    numbers: Tensor
    codes: Tensor
    scale: float
    minimum: float
    restored: Tensor
    group_error: float
    row_error: float


class World:
    """What is chosen, and what was measured with it. All of it acts on one Model."""

    kind: str
    layer: int
    format: Format
    size: int
    outlier: int
    row: int
    group: int

    def __init__(self, model: Model) -> None:
        self.model = model
        self.reset()

    # -- actions --------------------------------------------------------------------------------------------------

    def reset(self) -> str:
        self.measured: list[tuple[str, Change]] = []
        if self.model.is_shuffled:
            self.model.shuffle()
        self.choose("gate_proj", 5, Q4_1)
        if self.model.text != TEXT:
            self.model.read(TEXT)
        return "Choose a matrix (k, l), a format (f), a group size (s); o adds an outlier; m measures."

    def next_kind(self) -> str:
        self.kind = KINDS[(KINDS.index(self.kind) + 1) % len(KINDS)]
        return self._choose()

    def next_layer(self, by: int = 1) -> str:
        if self.kind == "lm_head":
            raise ValueError("there is only one lm_head, after all the layers: press k for another matrix")
        self.layer = (self.layer + by) % len(self.model.decoder.layers)
        return self._choose()

    def previous_layer(self) -> str:
        return self.next_layer(-1)

    def next_format(self) -> str:
        self.format = FORMATS[(FORMATS.index(self.format) + 1) % len(FORMATS)]
        zero = "" if self.format.has_minimum else f", code {self.format.zero} stands for 0"
        minimum = "and a minimum" if self.format.has_minimum else "and no minimum"
        return f"{self.format.name}: {self.format.bits} bits, a scale for each group {minimum}{zero}."

    def next_size(self) -> str:
        self.size, self.group = SIZES[(SIZES.index(self.size) + 1) % len(SIZES)], 0
        return f"A group is now {size_name(self.size)}. (The engine's is 32 numbers.)"

    def next_group(self) -> str:
        """The next group, after the last one of a row the first one of the next row."""
        num_groups = in_groups_of(self.weight[:1], self.size).shape[1]
        self.group += 1
        if self.group == num_groups:
            self.group, self.row = 0, (self.row + 1) % len(self.weight)
        return f"Row {self.row}, group {self.group} of {num_groups}."

    def next_outlier(self) -> str:
        self.outlier = OUTLIERS[(OUTLIERS.index(self.outlier) + 1) % len(OUTLIERS)]
        if not self.outlier:
            return "No outlier: the weights are the model's."
        return f"The first number of the group is now {self.outlier} times the largest magnitude of its row."

    def measure(self) -> str:
        """This matrix is rounded, and the model reads the text. (Without the outlier: it would make another model.)"""
        return self._measure(self.names, f"{self.kind}{f' of layer {self.layer}' * (self.kind != 'lm_head')}")

    def measure_kind(self) -> str:
        return self._measure(self.model.names(self.kind), f"every {self.kind}")

    def shuffle(self) -> str:
        self.model.shuffle()
        self._choose()
        if self.model.is_shuffled:
            return "The dimensions are renumbered: the function is the same, but different numbers share a group."
        return "The dimensions have their old numbers again."

    def typed(self, text: str) -> str:
        num_tokens = self.model.read(text)
        self.measured = []
        return f"{num_tokens} tokens; the model's perplexity on them is {self.model.perplexity:.2f}."

    def choose(self, kind: str, layer: int, format: Format = Q4_1, size: int = 32) -> None:
        self.layer = min(layer, len(self.model.decoder.layers) - 1)
        self.kind, self.format, self.size, self.outlier = kind, format, size, 0
        self._choose()

    # -- what there is --------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        return self.model.names(self.kind, None if self.kind == "lm_head" else self.layer)

    def shown(self) -> Shown:
        """The chosen group, in its row, both with the outlier if there is one."""
        row = self.weight[self.row : self.row + 1].clone()
        size = self.size or row.shape[1]
        first = self.group * size
        if self.outlier:
            row[0, first] = self.outlier * row.abs().max()
        groups = in_groups_of(row, size)
        codes, scales, minimums = quantize(groups, self.format)
        others = torch.arange(row.shape[1]) != (first if self.outlier else -1)
        back = rounded(row, self.format, size)
        mates = others.clone()
        mates[:first] = mates[first + size :] = False
        minimum = 0.0 if minimums is None else float(minimums[0, self.group])
        numbers, restored = row[0, first : first + size], back[0, first : first + size]
        errors = [error(row[0, some], back[0, some]) for some in (mates, others)]
        return Shown(numbers, codes[0, self.group], float(scales[0, self.group]), minimum, restored, *errors)

    def rounding_errors(self) -> Tensor:
        """Of every number of the matrix, in steps (scales) of its group: between -0.5 and 0.5."""
        groups = in_groups_of(self.weight, self.size)
        codes, scales, minimums = quantize(groups, self.format)
        offset = 0 if minimums is None else minimums.float()[..., None]
        steps = scales.float().clamp_min(2**-24)[..., None]
        return ((groups - offset) / steps + self.format.zero - codes.float()).flatten()

    def _choose(self) -> str:
        [name] = self.names
        self.weight = self.model.weights[name]
        self.row = self.group = 0
        return f"{name}, {list(self.weight.shape)}."

    def _measure(self, names: list[str], what: str) -> str:
        with self.model.rounded(names, self.format, self.size):
            change = self.model.change()
        shuffled = ", shuffled" if self.model.is_shuffled else ""
        self.measured = [(f"{what}, {self.format.name}, {size_name(self.size)}{shuffled}", change), *self.measured][:8]
        return f"Perplexity {self.model.perplexity:.2f} -> {change.perplexity:.2f}."
