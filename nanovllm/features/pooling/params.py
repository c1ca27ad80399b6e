"""PoolingParams and PoolerConfig: what a person may ask of embeddings and scores. Names and meanings are vLLM's."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from nanovllm.checks.names import check_options, names_checked, option
from nanovllm.checks.values import check_choice

TASKS = ("embed", "classify")
OF_EACH_TOKEN = {"token_embed": "a vector of each token", "token_classify": "a score of each token"}  # vLLM's tasks


def check_task(name: str, task: Any) -> None:
    """Raises ValueError for a task that this engine does not do."""
    if isinstance(task, str) and task in OF_EACH_TOKEN:
        raise ValueError(f"{name}={task!r} asks for {OF_EACH_TOKEN[task]}; here the tasks are {' and '.join(TASKS)}")
    if task is not None:
        check_choice(name, task, TASKS)


@names_checked("PoolingParams")
@dataclass
class PoolingParams:
    """Parameters of one request for an embedding or for scores. None is the LLM's own.

    Raises ValueError for an unknown name, a wrong type or a value out of range.
    """

    use_activation: bool | None = option(None, "an embedding of length 1; of scores, probabilities instead of logits")
    dimensions: int | None = option(
        None, "the embedding's first numbers only, of a model that was trained for it", low=1
    )
    task: str | None = option(None, '"embed" or "classify"')

    def __post_init__(self) -> None:
        check_task("task", self.task)
        check_options(self)

    def clone(self) -> "PoolingParams":
        return deepcopy(self)


@names_checked("PoolerConfig")
@dataclass
class PoolerConfig:
    """What an LLM with runner="pooling" does for a request that does not say it. None is the checkpoint's own."""

    task: str | None = option(None, '"embed" or "classify"')
    pooling_type: str | None = option(None, '"LAST": the last token\'s state; the only one there is here')
    seq_pooling_type: str | None = option(None, "the same under its longer name")
    use_activation: bool | None = option(None, "as in PoolingParams")
    dimensions: int | None = option(None, "as in PoolingParams")

    def __post_init__(self) -> None:
        PoolingParams(self.use_activation, self.dimensions, self.task)
        if self.pooling_type is not None and self.seq_pooling_type is not None:
            raise ValueError("pooling_type and seq_pooling_type are two names for one thing: give one of them")
        if (kind := self.pooling_type or self.seq_pooling_type) is not None:
            check_pooling_type("pooler_config: pooling_type", kind)


def check_pooling_type(name: str, kind: Any) -> None:
    """Raises ValueError for another state than the last token's."""
    if str(kind).upper() != "LAST":
        raise ValueError(
            f"{name} is {kind!r:.80}, and only LAST is computed here: of tokens that are found in the prefix cache "
            "there are keys and values, and no states to take the mean of or the first from"
        )
