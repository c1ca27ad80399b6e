"""Images of a request: checked, opened, and put where the prompt's image tokens are."""

import logging
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.checks.values import shorten
from nanovllm.features.images.options import MOST_IMAGES
from nanovllm.features.images.processor import ImageProcessor, ImagePrompt
from nanovllm.features.images.prompt_images import PromptImages
from nanovllm.features.images.sources import ClientImages, Sources
from nanovllm.prompts import IMAGE_KEYS, Asked, check_token_ids, most_prompt_tokens
from nanovllm.wings import Wing

if TYPE_CHECKING:
    from nanovllm.engine import LLMEngine


logger = logging.getLogger("nanovllm")
READING = Lock()  # the first images may come at once, and a tower is read once


@dataclass(frozen=True)
class RequestImages:
    """The images of one prompt, not opened yet. options: its mm_processor_kwargs."""

    processor: ImageProcessor
    sources: Any
    options: dict[str, Any] | None

    def expand(self, token_ids: list[int], max_tokens: int | None = None) -> ImagePrompt:
        """See ImageProcessor.expand."""
        return self.processor.expand(token_ids, self.sources, self.options, max_tokens)


@dataclass(frozen=True)
class ExpandedImages:
    """The images of a request that was made before, whose token ids go on here, its placeholders among them."""

    images: PromptImages
    image_token_id: int

    def expand(self, token_ids: list[int], max_tokens: int | None = None) -> ImagePrompt:
        """Raises ValueError for token ids of another prompt."""
        places = [place for image_places in self.images.places for place in image_places]
        if any(token_ids[place : place + 1] != [self.image_token_id] for place in places):
            raise ValueError("these images belong to another prompt: its token ids do not have their placeholders")
        return ImagePrompt(token_ids, self.images)


def split_prompt(
    engine: "LLMEngine", prompt: dict[str, Any]
) -> tuple[dict[str, Any], RequestImages | ExpandedImages | None]:
    """A prompt's dict as if it were of a text alone, and its images. Raises ValueError."""
    text = {name: value for name, value in prompt.items() if name not in IMAGE_KEYS}
    data = prompt.get("multi_modal_data")
    options = prompt.get("mm_processor_kwargs")
    if options and engine.model_config.images is None:
        raise ValueError("mm_processor_kwargs are options of images, and this model sees none; leave them out")
    if data is None:
        return text, None
    if not isinstance(data, dict) or data.keys() - {"image"}:
        raise ValueError(f"multi_modal_data must be {{'image': an image or a list of them}}, found {shorten(data)}")
    if data.get("image") is None:
        return text, None
    if engine.model_config.images is not None:
        _check_number(engine, data["image"])
    processor = processor_for(engine, is_trusted=not isinstance(data["image"], ClientImages))
    if isinstance(data["image"], PromptImages):
        return text, ExpandedImages(data["image"], processor.config.image_token_id)
    return text, RequestImages(processor, data["image"], options)


def with_placeholders(engine: "LLMEngine", prompt: dict[str, Any], token_ids: list[int]) -> list[int]:
    """The tokens that a prompt with images has. token_ids: with one image token for each image."""
    _, images = split_prompt(engine, prompt)
    return token_ids if images is None else images.expand(token_ids).token_ids


def processor_for(engine: "LLMEngine", is_trusted: bool) -> ImageProcessor:
    """The engine's. Raises ValueError.

    is_trusted: the caller may be told where the checkpoint is that cannot be read. Others are sent to the log.
    """
    try:
        return engine.image_processor
    except (ValueError, OSError) as error:
        if is_trusted:
            raise
        logger.error("Images are refused: %s", error)
        raise ValueError("no images can be looked at here; the log says why") from None


def prepare(engine: "LLMEngine") -> None:
    """See wings.BESIDE_AN_ENGINE."""
    if engine.model_config.images is None:
        raise ValueError(f"{engine.config.model} sees no images; leave out tower_quantization and mm_processor_kwargs")
    if engine.config.tower_quantization is not None and torch.cuda.is_available():  # no weights have been read yet
        raise ValueError("tower_quantization needs the C kernels of a CPU; leave it out here")


def attach(engine: "LLMEngine", prepared: None) -> Wing:
    """Read processor and tower now, not when the first image comes: an option that cannot work is its caller's."""
    if most_images(engine) > 0:
        _ = engine.image_processor
    return Wing()


def most_images(engine: "LLMEngine") -> int:
    """That a prompt may have."""
    return (engine.config.limit_mm_per_prompt or {}).get("image", MOST_IMAGES)


def _check_number(engine: "LLMEngine", images: Any) -> None:
    """Raises ValueError for too many. Asked before the processor is: its tower's weights would be read."""
    found = len(images) if isinstance(images, list | tuple) else 1
    if found > (most := most_images(engine)):
        raise ValueError(f"a prompt may have {most} images, found {found}; see limit_mm_per_prompt")


def largest_image(engine: "LLMEngine") -> PromptImages | None:
    """The largest image of a model whose memory is measured before its KV pool has a size. None: it takes no images.

    The tower's weights are read: they count, too.
    """
    if most_images(engine) == 0:
        return None
    max_tokens = engine.config.max_model_len or engine.model_config.max_position_embeddings
    try:
        return engine.image_processor.largest(max_tokens)
    except (ValueError, OSError) as error:  # texts are answered without a processor and without Pillow
        logger.warning("No memory is kept free for images, which will be refused: %s", error)
        return None


def read(engine: "LLMEngine", asked: "Asked") -> None:
    """See wings.READERS."""
    _, prompt_images = split_prompt(engine, asked.prompt)
    if prompt_images is None:
        return
    asked.token_ids, images = prompt_images.expand(asked.token_ids, most_prompt_tokens(engine, asked))
    check_token_ids(engine, asked)
    asked.mm_spans, asked.parts["images"] = images.spans, images


def make(engine: "LLMEngine") -> ImageProcessor:
    """See wings.ON_DEMAND. The tower's weights are read. Raises ValueError for a model that sees no images."""
    images = engine.model_config.images
    if images is None:
        is_gguf = engine.directory.is_file()
        more = " (the tower of a GGUF file, mmproj, is not read: images need the safetensors files)" if is_gguf else ""
        raise ValueError(f"{engine.config.model}: this model sees no images{more}")
    config = engine.config
    folder = config.allowed_local_media_path
    with READING:
        processor = ImageProcessor(
            engine.directory,
            images,
            engine.tokenizer,
            options=config.mm_processor_kwargs or {},
            sources=Sources(folder=Path(folder) if folder else None, domains=config.allowed_media_domains),
        )
        engine.model_runner.load_part("tower")
    return processor
