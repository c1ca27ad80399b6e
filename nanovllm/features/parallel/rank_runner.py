"""RankRunner: the model runner of one rank (chapter 9)."""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.features.parallel.group import RankGroup, shard_config
from nanovllm.worker.batch import Batch
from nanovllm.worker.model_runner import ModelRunner, ModelRunnerOutput
from nanovllm.worker.sampler import SamplingBatch

if TYPE_CHECKING:
    from nanovllm.features.tiers.pool_data import RankData


class RankRunner(ModelRunner):
    """A ModelRunner that has a share of the model. Its layers add up what the ranks get (parallel_layers.py).

    Rank 0 samples.
    """

    group: RankGroup

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        group: RankGroup,
        receive_bits: Callable[[], Tensor] | None = None,
    ) -> None:
        """receive_bits: gets the bits of a step's grammars from the driver. None: the driver is in this process."""
        self.receive_bits = receive_bits
        super().__init__(config, model_config, local_config=shard_config(model_config, group.size), group=group)

    def allocate_kv_cache(self, free_bytes: int) -> None:
        """As large as the rank has room for that has least. On a CPU the ranks share the memory that is free."""
        if self.device.type == "cpu":
            free_bytes //= self.group.size
        super().allocate_kv_cache(self.group.smallest(free_bytes, self.device))

    def run_packed(self, batch: Batch, sampling: SamplingBatch) -> ModelRunnerOutput:
        pending = None if sampling.processors is None else sampling.processors.pending
        if pending is not None:
            pending.receive = self.receive_bits  # they come after the step
        return super().run_packed(batch, sampling)

    def get(self, name: str) -> Any:
        """An attribute of this runner, for the driver."""
        return getattr(self, name)

    @cached_property
    def rank_data(self) -> "RankData":
        from nanovllm.features.tiers.pool_data import RankData

        return RankData(self)

    def data(self, method: str, *arguments: Any) -> Any:
        """Read or write this rank's share of what is in blocks and states, for the driver."""
        return getattr(self.rank_data, method)(*arguments)

    def load_part(self, name: str) -> ValueError | None:  # pyrefly: ignore[bad-override]
        """What is wrong with a part's files is an answer: whatever a rank raises ends the engine."""
        try:
            super().load_part(name)
        except ValueError as error:
            return error
        return None

    def usage(self) -> dict[str, int]:
        return super().usage() | {"all_reduced": self.group.num_reduced_bytes}
