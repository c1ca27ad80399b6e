"""The tensors of a pooling checkpoint under this engine's names, its head among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.features.pooling.pooling_config import PoolingConfig
from nanovllm.files.tensor_files import OtherName

HEADS = ("lm_head.weight", "score.weight")


def pooling_tensors(files: Mapping[str, Any], pooling: PoolingConfig) -> dict[str, Any]:
    """{name of a parameter of Decoder: the open file that holds it}: with a prefix that some files leave out.

    Raises ValueError for a classifier without a head.
    """
    has_prefix = any(name.startswith("model.") for name in files)
    heads = {name: file for name, file in files.items() if name in HEADS}
    found: dict[str, Any] = {name: file for name, file in files.items() if name not in HEADS}
    if not has_prefix:
        found = {f"model.{name}": OtherName(file, name) for name, file in found.items()}
    if pooling.task == "embed":
        return found
    if pooling.token_ids:
        table = "lm_head.weight" if "lm_head.weight" in heads else "model.embed_tokens.weight"
        found["lm_head.weight"] = TokenRows((heads | found)[table], table, pooling)
    elif "score.weight" in heads:
        found["lm_head.weight"] = OtherName(heads["score.weight"], "score.weight")
    else:
        raise ValueError(
            "the checkpoint has no score.weight: it is no converted classifier. An original Qwen3-Reranker needs "
            'hf_overrides with "classifier_from_token" and "is_original_qwen3_reranker", too'
        )
    return found


@dataclass(frozen=True)
class TokenRows:
    """Looks like an open file that holds one tensor: a head made of the rows that some tokens have in a table.

    Of two tokens, no and yes: softmax over both logits is a sigmoid of their difference, so one row will do.
    """

    file: Any
    name: str
    pooling: PoolingConfig

    def get_slice(self, name: str) -> "TokenRows":
        return self

    def get_dtype(self) -> str:
        return "F32"

    def get_shape(self) -> list[int]:
        return [self.pooling.num_labels, self.file.get_slice(self.name).get_shape()[1]]

    def __getitem__(self, share: tuple[slice, slice]) -> Tensor:
        stored, width = self.file.get_slice(self.name), self.get_shape()[1]
        rows = [stored[slice(i, i + 1), slice(0, width)] for i in self.pooling.token_ids]
        weight = torch.cat([(row if isinstance(row, Tensor) else row.dequantize()).float() for row in rows])
        return (weight[1:] - weight[:1] if self.pooling.two_way else weight)[share]
