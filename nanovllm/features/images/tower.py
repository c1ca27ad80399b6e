"""Tower: images -> vectors that stand in for the embeddings of placeholders. transformers' own modules.

An image goes through in one forward pass of its own, so its vectors do not depend on what else a step computes. On a
CPU most of the work is done by the engine's C kernels (tower_kernels.py), with the same bits on any number of threads.
The last bits depend on the processor: PyTorch does the rest.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.checkpoint import ModelConfig
from nanovllm.features.images.image_config import ImageConfig, language_tensors, num_heads_of
from nanovllm.features.images.prompt_images import Image
from nanovllm.features.images.recent import Recent
from nanovllm.features.images.rows import BatchImages, BatchPlaceholders
from nanovllm.files.config_json import make_config
from nanovllm.files.tensor_files import UNPACKED, check_tensors, tensor_files
from nanovllm.worker.batch import Batch
from nanovllm.worker.kernels import Kernels
from nanovllm.worker.loader import read_into
from nanovllm.worker.model import ModelPart

if TYPE_CHECKING:
    from nanovllm.worker.model_runner import ModelRunner

logger = logging.getLogger("nanovllm")


def make_part(runner: "ModelRunner") -> "Tower":
    """The tower of a runner's checkpoint. Raises ValueError."""
    config = runner.config
    assert runner.model_config.images is not None
    return Tower(
        runner.directory,
        runner.model_config.images,
        model_config=runner.model_config,
        dtype=runner.dtype,
        device=runner.device,
        dummy=config.load_format == "dummy",
        quantization=config.tower_quantization,
        kernels_for=partial(runner.platform.tower_kernels, config),
        context_for=runner.platform.tower_context,
    )


class Tower(ModelPart):
    """The part of the checkpoint that looks at images.

    num_runs    forward passes so far: one for each image that was not among those kept
    """

    def __init__(
        self,
        directory: Path,
        config: ImageConfig,
        *,
        model_config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        dummy: bool,
        quantization: str | None,
        kernels_for: Callable[[ModelConfig, torch.dtype], Kernels | None],
        context_for: Callable[[Kernels | None], AbstractContextManager],
    ) -> None:
        """Read the weights. Raises ValueError for a checkpoint whose tower is not what config.json says.

        model_config: of the language model, and how others have quantized the checkpoint. quantization: None, or
        "int8", for which there must be kernels. kernels_for: Platform.tower_kernels for this engine. context_for:
        Platform.tower_context.
        """
        self.dtype = dtype
        self.device = device
        self.num_runs = 0
        self._model = _load(directory, config, model_config.published, dtype, dummy).to(device)
        kernels = kernels_for(with_heads_of(self._model.config.vision_config, model_config), dtype)
        self._context = partial(context_for, kernels)
        if kernels is not None:
            from nanovllm.features.images.tower_kernels import use_kernels

            use_kernels(self._model, kernels, quantization)
        elif quantization is not None:
            raise ValueError("tower_quantization needs the C kernels of a CPU; leave it out")
        self.num_bytes = sum(tensor.nbytes for tensor in self._model.parameters())
        self.num_bytes += sum(getattr(module, "num_bytes", 0) for module in self._model.modules())
        self._features: Recent[Tensor] = Recent()  # the same image elsewhere, or in the next chunk, needs no tower
        self.max_kept_bytes = self._features.max_bytes

    @property
    def counts(self) -> dict[str, int]:
        return {"tower_runs": self.num_runs, "tower_bytes": self.num_bytes}

    def forget(self) -> None:
        self._features = Recent()
        self.num_runs = 0

    def begin_step(self, batch: Batch) -> None:
        """Give the batch's placeholders their vectors, which are on the device."""
        placeholders = batch.parts.get("images")
        if isinstance(placeholders, BatchPlaceholders):
            found = []
            for stretch in placeholders.stretches:
                features = self.features(stretch.image)
                found.append(features[:, stretch.first : stretch.first + len(stretch.rows)])
            rows = torch.cat([stretch.rows for stretch in placeholders.stretches]).to(self.device)
            batch.parts["images"] = BatchImages(rows, torch.cat(found, dim=1))

    def features(self, image: Image) -> Tensor:
        """[1 + num_deepstack, placeholders, hidden_size] of an image."""
        features = self._features.get(image.content_hash)
        if features is None:
            features = self._run(image)
            self._features.put(image.content_hash, features, features.nbytes)
        return features

    def _run(self, image: Image) -> Tensor:
        self.num_runs += 1
        inputs = {name: tensor.to(self.device) for name, tensor in image.make_inputs().items()}
        with self._context(), transformers_defaults():
            output = self._model.get_image_features(**inputs, return_dict=True)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        features = torch.stack([torch.cat(list(level)) for level in levels]).to(self.dtype)
        assert features.shape[1] == image.num_placeholders, (
            "the processor fits the tower: ImageProcessor has checked it"
        )
        return features


def with_heads_of(vision_config: Any, model_config: ModelConfig) -> ModelConfig:
    """A configuration whose attention has the sizes of a tower's."""
    num_heads = num_heads_of(vision_config)
    head_dim = vision_config.hidden_size // num_heads
    return replace(model_config, num_attention_heads=num_heads, num_key_value_heads=num_heads, head_dim=head_dim)


@contextmanager
def transformers_defaults() -> Iterator[None]:
    """For code of transformers, whose tensors may have PyTorch's default device and dtype: as if nobody had set any.

    Other threads see the default dtype, too, so it is changed only where the caller has changed it.
    """
    before = torch.get_default_dtype()
    if before is not torch.float32:
        torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        if before is not torch.float32:
            torch.set_default_dtype(before)


def _load(directory: Path, config: ImageConfig, published: Any, dtype: torch.dtype, dummy: bool) -> Any:
    """The checkpoint's model in transformers' form, without its language model."""
    model = build_tower(config)
    for parameter in model.parameters():  # buffers keep float32, as in transformers: angles are computed from them
        parameter.data = parameter.data.to(dtype)
    places = dict(model.named_parameters(prefix="model"))
    files = {} if dummy else check_tower(directory, places, published)
    unpacked = [name for name in places if not dummy and files[name].get_slice(name).get_dtype() == UNPACKED]
    if unpacked:
        few = f"{len(unpacked)} weights of the vision tower ({unpacked[0]}, ...)"
        logger.warning("%s: %s are unpacked to %s", directory, few, str(dtype).removeprefix("torch."))
    with torch.no_grad():
        for name, place in places.items():
            if dummy:
                place.normal_(0, 0.02)
            else:
                read_into(place, files[name].get_slice(name)[(slice(None),) * place.dim()], name, directory)
    logger.info("Vision tower of %s: %.1f MB", directory, sum(place.nbytes for place in places.values()) / 1e6)
    return model.eval().requires_grad_(False)


def build_tower(config: ImageConfig) -> Any:
    """Modules of the right shapes, in CPU memory and in float32, with numbers that mean nothing yet.

    In any other dtype transformers would change PyTorch's default dtype meanwhile, which other threads see, too.
    """
    from transformers.initialization import no_init_weights
    from transformers.models.auto.modeling_auto import AutoModel

    whole: Any = make_config(config.config, Path("config.json"))
    text = whole.text_config
    text.num_hidden_layers = 1  # there must be one; it is taken off below
    text.vocab_size = 1
    text.pad_token_id = None
    if getattr(text, "layer_types", None):
        text.layer_types = ["full_attention"]
    for each in (whole, text, whole.vision_config):
        each._attn_implementation = "sdpa"
    with transformers_defaults(), no_init_weights():
        model = AutoModel.from_config(whole, dtype=torch.float32)
    for name in ("language_model", "text_model"):
        if hasattr(model, name):
            setattr(model, name, None)
    return model


def check_tower(directory: Path, places: dict[str, Tensor], published: Any) -> dict[str, Any]:
    """{name of a tensor: the file that holds it}. Raises one ValueError that lists what is missing or does not fit.

    places: what the tower needs. published: how others have quantized the checkpoint, if they have; the files then
    give unpacked weights.
    """
    unpacks = None if published is None else replace(published, unpacks=True)
    _, files = language_tensors(tensor_files(directory, unpacks))
    spare = set[str]()
    if published is not None:
        from nanovllm.features.published.tensors import tensors_beside

        spare = tensors_beside(files, places, directory)
    complaint = f"the vision tower in {directory} does not fit its configuration"
    check_tensors(files, places, model="vision tower", complaint=complaint, spare=spare)
    return files
