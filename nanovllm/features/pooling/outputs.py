"""What a request for an embedding or for scores gives back. Shaped like vLLM's classes of the same names."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PoolingOutput:
    """data: a tensor of float32 in the CPU's memory, [dimensions] or [num_labels]; empty if the request failed."""

    data: Any

    def __eq__(self, other: object) -> bool:
        import torch  # not at the top: `import nanovllm` stays light

        return isinstance(other, PoolingOutput) and torch.equal(self.data, other.data)

    def __hash__(self) -> int:
        return hash(tuple(self.data.flatten().tolist()))


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class ClassificationOutput:
    """probs: one number a label; without use_activation they are logits."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class ScoringOutput:
    score: float


@dataclass(frozen=True)
class PoolingRequestOutput:
    """A request that has ended. outputs: PoolingOutput, or what the classes below say.

    num_cached_tokens: prompt tokens found in the prefix cache. error: why there is no result; None if there is one.
    """

    request_id: str
    outputs: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    error: str | None = None


@dataclass(frozen=True)
class EmbeddingRequestOutput(PoolingRequestOutput):
    """outputs: an EmbeddingOutput."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> "EmbeddingRequestOutput":
        return cls(**vars(base) | {"outputs": EmbeddingOutput(base.outputs.data.tolist())})


@dataclass(frozen=True)
class ClassificationRequestOutput(PoolingRequestOutput):
    """outputs: a ClassificationOutput."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> "ClassificationRequestOutput":
        return cls(**vars(base) | {"outputs": ClassificationOutput(base.outputs.data.tolist())})


@dataclass(frozen=True)
class ScoringRequestOutput(PoolingRequestOutput):
    """outputs: a ScoringOutput. A pair of embeddings has the tokens of both, and what was cached of both."""

    @classmethod
    def from_base(cls, base: PoolingRequestOutput) -> "ScoringRequestOutput":
        """The one number of a result; 0 if the request failed."""
        return cls(**vars(base) | {"outputs": ScoringOutput(float(base.outputs.data.sum()))})
