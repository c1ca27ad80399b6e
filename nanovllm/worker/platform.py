"""Platform: what a CPU and a GPU do differently (chapters 3 and 10). Implemented by cpu/ and cuda/platform.py.

A ModelRunner calls its platform in this order:

    __init__()   choose_kernels, kv_format, free_bytes
    load()       loading, read_linear, step_context, batch_invariant
    prepare()    profile_free_bytes, unless free_bytes has said it all; record_steps

Only profile_free_bytes() calls back: it runs whole steps, to see how much memory they take.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.layers import Linear
from nanovllm.worker.model import Decoder

if TYPE_CHECKING:
    from nanovllm.features.images.prompt_images import PromptImages
    from nanovllm.worker.loader import StoredWeight
    from nanovllm.worker.model_runner import ModelRunner


class RecordedSteps(ABC):
    """Forward passes that were recorded once and are replayed: CUDA graphs, or the calls of C functions."""

    def __init__(self, runner: "ModelRunner") -> None:
        """runner: has loaded the model and allocated the KV cache. Its parts are kept, and not the runner itself."""
        self.model = runner.model
        self.rotary = runner.rotary
        self.kv_cache = runner.kv_cache
        self.kernels = runner.kernels

    def still_fit(self, runner: "ModelRunner") -> bool:
        """Does a runner still compute with what was recorded? Not once somebody has swapped its kernels, say."""
        recorded = self.model, self.rotary, self.kv_cache, self.kernels
        return recorded == (runner.model, runner.rotary, runner.kv_cache, runner.kernels)

    @abstractmethod
    def run(self, batch: Batch) -> Tensor | None:
        """float32 logits [R, vocab_size], valid until the next call; None: this step is not among the recorded ones.

        The next call writes all its logits again, so the sampler may change these in place. batch: in the CPU's memory.
        """


class Platform(ABC):
    """One kind of device. A ModelRunner has one of its own. device: the one that tensors of a step are on."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def choose_kernels(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype
    ) -> tuple[Kernels, int | None]:
        """The kernels for this model, and the block size that suits them; None: any.

        model_config: the sizes of this rank's share. dtype: of weights and activations.
        """

    @abstractmethod
    def kv_format(
        self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype, kernels: Kernels
    ) -> tuple[ModelConfig, torch.dtype]:
        """What K and V are held as: (the model's sizes as the KV cache sees them, dtype).

        In int8, head_dim is 2 larger, for the scale.

        Raises ValueError for a kv_cache_dtype that these kernels do not read.
        """

    @abstractmethod
    def free_bytes(self, config: EngineConfig) -> int | None:
        """Bytes that the KV pool may take. None if they are known only after the weights have been read.

        In that case profile_free_bytes() returns them.
        """

    def profile_free_bytes(self, runner: "ModelRunner", largest_image: "PromptImages | None") -> int:
        """Bytes left for the KV pool by the weights, the largest step and the steps that will be recorded.

        It is called only if free_bytes() is None. runner: has a KV cache of one block, with which whole steps are run,
        sampling included. largest_image: for the largest step, of a model that sees images.
        """
        raise NotImplementedError

    @abstractmethod
    def record_steps(self, runner: "ModelRunner") -> RecordedSteps | None:
        """Record the steps that can be replayed. None if there are none. runner: all that a step reads is in place."""

    @abstractmethod
    def batch_invariant(self, model: Decoder, kernels: Kernels) -> str:
        """Where a row's logits have the same bits, whatever the step's other rows, chunks, cache hits or threads are.

        "on every processor", "on processors that multiply ...", or "not promised". Of a model that sees images, also
        where these are seen with the same bits.
        """

    # -- what differs from this on some platforms ------------------------------------------------------------------

    def has_ended(self) -> bool:
        """Asked after a step that failed: can nothing be computed in this process any more?"""
        return False

    def loading(self, runner: "ModelRunner") -> AbstractContextManager:
        """A context in which a model's weights are read. After it they have their final place in memory."""
        return nullcontext()

    def read_linear(
        self, config: EngineConfig, kernels: Kernels
    ) -> "Callable[[Decoder, Linear, StoredWeight], None] | None":
        """What reads each linear layer's weight into another layout. None: kernels read weights as they are."""
        return None

    def step_context(self, model: Decoder, kernels: Kernels) -> Callable[[], AbstractContextManager]:
        """A function that makes the context in which a step is computed."""
        return nullcontext

    def tower_kernels(self, config: EngineConfig, model_config: ModelConfig, dtype: torch.dtype) -> Kernels | None:
        """Kernels with which a tower looks at images (features/images/tower.py). None: PyTorch does all of it.

        model_config: with the sizes of the tower's heads. In attention every row sees every key.
        """
        return None

    def tower_context(self, kernels: Kernels | None) -> AbstractContextManager:
        """A context in which a tower looks at images. kernels: of tower_kernels()."""
        return nullcontext()
