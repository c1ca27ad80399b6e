"""From images to what a prompt and a tower need: placeholders, pixels, and a hash of the content.

The processors are transformers' own, those that need Pillow and no torchvision.
"""

import copy
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.checks.values import check_choice, check_number, check_switch, shorten
from nanovllm.features.images.image_config import IDEFICS3, ImageConfig, side_of
from nanovllm.features.images.options import PROCESSOR_FILES
from nanovllm.features.images.prompt_images import Image, PromptImages
from nanovllm.features.images.recent import Recent
from nanovllm.features.images.sources import DECODING_LARGE, MAX_PIXELS, ClientImages, Sources, pil
from nanovllm.features.images.tower import transformers_defaults
from nanovllm.files.config_json import make_config, read_json
from nanovllm.prompts import tokenize

# architecture -> where transformers has its processor. The others have Qwen2-VL's.
PROCESSORS = {
    IDEFICS3[0]: ("idefics3.image_processing_pil_idefics3", "Idefics3ImageProcessorPil"),
    IDEFICS3[1]: ("smolvlm.image_processing_pil_smolvlm", "SmolVLMImageProcessorPil"),
}
QWENS = ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil")
# What each reads. transformers takes more options, those of all its processors; here they would change nothing.
OPTIONS = {"do_resize", "size", "resample", "do_rescale", "rescale_factor", "do_normalize", "image_mean", "image_std"}
IDEFICS3_OPTIONS = OPTIONS | {"do_image_splitting", "max_image_size", "do_pad"}
QWEN_OPTIONS = OPTIONS | {"min_pixels", "max_pixels", "patch_size", "temporal_patch_size", "merge_size"}
OLD_SIZES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}  # as Qwen's older files have it
TRIAL_SIDE = 448  # pixels; a multiple of what one placeholder covers (28 or 32): it works with do_resize=False, too


class ImagePrompt(NamedTuple):
    """A prompt whose images are placeholders."""

    token_ids: list[int]
    images: PromptImages


class Prepared(NamedTuple):
    """What a tower takes of an image, and how its placeholders stand: see Image."""

    inputs: dict[str, Tensor]
    num_placeholders: int
    grid: tuple[int, int] | None = None
    split: tuple[int, int] = (0, 0)


class ImageProcessor:
    """Those of one checkpoint. Any thread may call it.

    options: take the place of the checkpoint's, for all images; a request may name others.
    """

    def __init__(
        self, directory: Path, config: ImageConfig, tokenizer: Any, *, options: dict[str, Any], sources: Sources
    ) -> None:
        """Raises ValueError without Pillow, and for a checkpoint without a processor that works with these options."""
        pil()
        self.config = config
        self.tokenizer = tokenizer
        self.sources = sources
        self._is_idefics3 = config.architecture in IDEFICS3
        module, name = PROCESSORS.get(config.architecture, QWENS)
        processor_class = getattr(import_module(f"transformers.models.{module}"), name)
        whole = make_config(config.config, directory)
        self._vision = whole.vision_config
        if self._is_idefics3:
            tile_side = side_of(self._vision.image_size) // side_of(self._vision.patch_size)
            self._placeholders_of_tile = (tile_side // whole.scale_factor) ** 2
        self._prepared: Recent[Prepared] = Recent()  # the next question about an image needs no resizing
        fields = _processor_fields(directory)
        self._processor = _make_processor(processor_class, fields, directory)
        self._options = self._process_options(options)
        fields = {name: value for name, value in fields.items() if name not in OLD_SIZES}
        fields |= {"size": dict(self._processor.size)} | self._options
        self._processor = _make_processor(processor_class, fields, directory)
        try:
            self._process(pil().new("RGB", (TRIAL_SIDE, TRIAL_SIDE), (200, 30, 10)), self._options)
        except ValueError as error:
            said = "its image processor, or mm_processor_kwargs, cannot be used"
            raise ValueError(f"{directory}: {said}: {error}") from None

    def client_options(self, options: Any) -> dict[str, Any]:
        """A client's mm_processor_kwargs. Raises ValueError for those that could ask for any amount of work."""
        if not isinstance(options, dict) or options.keys() - {"do_image_splitting", "size"}:
            known = "do_image_splitting and size, and no other option"
            raise ValueError(f"mm_processor_kwargs of a client may be {known}; found {shorten(options)}")
        splits = check_switch("do_image_splitting", options.get("do_image_splitting", False))
        if splits and not getattr(self._processor, "do_image_splitting", True):
            raise ValueError("do_image_splitting of mm_processor_kwargs must be false: images are not split here")
        if "size" in options:
            own, size = dict(self._processor.size), self._whole_size(options["size"])
            if size.keys() != own.keys():
                named = shorten(options["size"])
                raise ValueError(f"size of mm_processor_kwargs must be a dict of {', '.join(own)}, found {named}")
            for name, most in own.items():
                check_number(f"{name} of mm_processor_kwargs", size[name], Integral, 1, most)
        return options

    def expand(
        self, token_ids: list[int], sources: Any, options: dict[str, Any] | None, max_tokens: int | None = None
    ) -> ImagePrompt:
        """Put what stands for each image in the place of each image token. Raises ValueError.

        token_ids: with one image token for each image. sources: of one image, or a list of them. options:
        mm_processor_kwargs of this request. max_tokens: that the prompt may have; images for which it has no room may
        be refused before they are processed.
        """
        several = sources if isinstance(sources, list | tuple) else [sources]
        found = token_ids.count(self.config.image_token_id)
        if found != len(several):
            token = self.tokenizer.convert_ids_to_tokens(self.config.image_token_id)
            raise ValueError(
                f"a prompt needs one image token ({token}) for each image: found {found} for {len(several)} images"
            )
        given = self._process_options(options or {})
        opened = self._open(several)
        num_tokens = len(token_ids) + sum(self._least_placeholders(rgb, given) - 1 for rgb in opened)
        if max_tokens is not None and num_tokens > max_tokens:
            fit = f"at most {max_tokens} fit (max_model_len); make the images smaller"
            raise ValueError(f"the prompt has {num_tokens} tokens with its images, and {fit}")
        images = [self.prepare(rgb, given) for rgb in opened]
        coming = iter(images)
        expanded: list[int] = []
        places: list[list[int]] = []
        for token_id in token_ids:
            if token_id != self.config.image_token_id:
                expanded.append(token_id)
                continue
            stands_for = self._placeholders(next(coming))
            first = len(expanded)
            places.append([first + i for i, t in enumerate(stands_for) if t == self.config.image_token_id])
            expanded += stands_for
        return ImagePrompt(expanded, PromptImages(tuple(images), tuple(map(tuple, places))))

    def _open(self, sources: Sequence[Any]) -> list[Any]:
        """RGB images. Raises ValueError."""
        opener = Sources(any_file=True, domains=self.sources.domains)
        if isinstance(sources, ClientImages):
            opener = replace(self.sources, sandbox=DECODING_LARGE) if sources.are_large else self.sources
        opened: list[Any] = []
        pixels_left = MAX_PIXELS
        for source in sources:
            rgb = opener.open(source, pixels_left)
            pixels_left -= rgb.width * rgb.height
            opened.append(rgb)
        return opened

    def _least_placeholders(self, rgb: Any, options: dict[str, Any]) -> int:
        """How many an image has at least. Qwen's may have thousands; if only its size was asked for, that says it."""
        if self._is_idefics3 or options.keys() - {"size"} or not self._processor.do_resize:
            return 1
        size = options.get("size", self._processor.size)
        limits = {"min_pixels": size.get("shortest_edge"), "max_pixels": size.get("longest_edge")}
        if None in limits.values():
            return 1
        num_patches = self._processor.get_number_of_image_patches(rgb.height, rgb.width, limits)
        return int(num_patches) // int(self._processor.merge_size) ** 2

    def _process_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Those that are given (None: not given), size as a whole one. Raises ValueError for those it does not read.

        do_convert_rgb may be true, since all images are RGB here.
        """
        if not isinstance(options, dict):
            raise ValueError(f"mm_processor_kwargs must be a dict, found {shorten(options)}")
        known = sorted(IDEFICS3_OPTIONS if self._is_idefics3 else QWEN_OPTIONS)
        options = {name: value for name, value in options.items() if (name, value) != ("do_convert_rgb", True)}
        for name in options:
            check_choice("an option in mm_processor_kwargs", name, known)
        given = {name: value for name, value in options.items() if value is not None}
        if "size" in given:
            given["size"] = self._whole_size(given["size"])
        if sizes := {OLD_SIZES[name]: given.pop(name) for name in OLD_SIZES if name in given}:
            given["size"] = self._whole_size(given.get("size", {}) | sizes)
        return given

    def _whole_size(self, size: Any) -> dict[str, int]:
        """With what it leaves out as the processor has it; one of other names (height, width) as it is. ValueError."""
        own = dict(self._processor.size)
        if not isinstance(size, dict):
            raise ValueError(f"size of mm_processor_kwargs must be a dict of {', '.join(own)}, found {shorten(size)}")
        given = {n: check_number(f"{n} of mm_processor_kwargs", value, Integral, 1) for n, value in size.items()}
        return own | given if given.keys() <= own.keys() else given

    def prepare(self, rgb: Any, options: dict[str, Any]) -> Image:
        """An RGB image as part of a prompt. Raises ValueError for one that the tower could not take."""
        from nanovllm.features.images.sandboxed_images import strips

        given = json.dumps(self._options | options, sort_keys=True, default=str)
        content = hashlib.sha256(f"{rgb.width}x{rgb.height} {given} ".encode())
        for top, bottom in strips(rgb.size):
            content.update(rgb.crop((0, top, rgb.width, bottom)).tobytes())
        key = content.hexdigest()

        def make() -> Prepared:
            """Once more if it is wanted after others have taken its place among those kept."""
            prepared = self._prepared.get(key)
            if prepared is None:
                prepared = self._process(rgb, options)
                num_bytes = sum(tensor.nbytes for tensor in prepared.inputs.values())
                self._prepared.put(key, prepared, num_bytes)
            return prepared

        made = make()
        return Image(
            content_hash=key,
            make_inputs=lambda: make().inputs,
            num_placeholders=made.num_placeholders,
            num_bytes=rgb.width * rgb.height * 3,
            grid=made.grid,
            split=made.split,
        )

    def largest(self, max_tokens: int) -> PromptImages:
        """An image that takes as much memory as any that a prompt of so many tokens may have."""
        side = math.isqrt(MAX_PIXELS)
        if not self._is_idefics3:  # a placeholder is a square of pixels; Idefics3's tiles are bounded by the processor
            side = min(side, math.isqrt(max_tokens) * side_of(self._vision.patch_size) * self._processor.merge_size)
        made = self._process(pil().new("RGB", (side, side), (200, 30, 10)), {})
        image = Image(
            content_hash="largest",
            make_inputs=lambda: made.inputs,
            num_placeholders=made.num_placeholders,
            grid=made.grid,
            split=made.split,
        )
        return PromptImages((image,), (tuple(range(made.num_placeholders)),))

    def _process(self, rgb: Any, options: dict[str, Any]) -> Prepared:
        more = {"return_row_col_info": True} if self._is_idefics3 else {}
        try:
            # Each image alone, so that what becomes of it does not depend on the others.
            with transformers_defaults():
                features = self._processor(images=[rgb], return_tensors="pt", **options, **more)
        except Exception as error:  # whatever transformers or NumPy say of an option or a size
            raise ValueError(f"the image processor fails: {shorten(str(error), 200)}") from None
        inputs: dict[str, Tensor] = {name: features[name] for name in features if torch.is_tensor(features[name])}
        if not inputs["pixel_values"].sum().isfinite():  # one NaN or infinity is enough
            raise ValueError("the image processor makes numbers that are not finite: see image_std and rescale_factor")
        if not self._is_idefics3:
            return self._of_patches(inputs, options.get("merge_size", self._processor.merge_size))
        [[rows]] = features["rows"]
        [[columns]] = features["cols"]
        return self._of_tiles(inputs, rows, columns)

    def _of_tiles(self, inputs: dict[str, Tensor], rows: int, columns: int) -> Prepared:
        """Idefics3's: tiles of one size, each with as many placeholders."""
        tiles = inputs["pixel_values"][0]  # [tiles, channels, height, width]
        side = side_of(self._vision.image_size)
        if tuple(tiles.shape[2:]) != (side, side):
            raise ValueError(
                f"the image processor makes tiles of {tiles.shape[3]} x {tiles.shape[2]} pixels, and the tower takes "
                f"{side} x {side}: max_image_size does not fit the checkpoint"
            )
        if (tiles == 0).flatten(1).all(1).any():  # transformers' tower takes such a tile for padding
            raise ValueError("a part of this image is exactly as bright as the processor's mean: it cannot be seen")
        return Prepared(inputs, num_placeholders=len(tiles) * self._placeholders_of_tile, split=(rows, columns))

    def _of_patches(self, inputs: dict[str, Tensor], merge_size: int) -> Prepared:
        """Qwen's: patches in rows and columns, several of which are one placeholder. merge_size: the processor's."""
        vision = self._vision
        numbers = vision.in_channels * vision.temporal_patch_size * side_of(vision.patch_size) ** 2  # of a patch
        merge = vision.spatial_merge_size
        if inputs["pixel_values"].shape[1] != numbers or merge_size != merge:
            raise ValueError(
                "the image processor's patches do not fit the tower: patch_size, temporal_patch_size and merge_size "
                "must be the checkpoint's"
            )
        _, height, width = inputs["image_grid_thw"][0].tolist()
        grid = height // merge, width // merge
        return Prepared(inputs, num_placeholders=grid[0] * grid[1], grid=grid)

    def _placeholders(self, image: Image) -> list[int]:
        """The token ids that stand for an image."""
        if image.grid is not None:
            return [self.config.image_token_id] * image.num_placeholders
        each = "<image>" * self._placeholders_of_tile
        rows, columns = image.split
        text = ""
        for row in range(1, rows + 1):
            tiles = (f"<fake_token_around_image><row_{row}_col_{column}>{each}" for column in range(1, columns + 1))
            text += "".join(tiles) + "\n"
        text += "\n" if rows else ""
        text += f"<fake_token_around_image><global-img>{each}<fake_token_around_image>"
        return tokenize(self.tokenizer, text, add_special_tokens=False)


def _make_processor(processor_class: Any, fields: dict[str, Any], directory: Path) -> Any:
    try:
        return processor_class(**copy.deepcopy(fields))  # some of them write into the dict of a size
    except Exception as error:  # whatever transformers says of a field
        said = shorten(str(error), 200)
        raise ValueError(f"{directory}: the image processor's fields cannot be read: {said}") from None


def _processor_fields(directory: Path) -> dict[str, Any]:
    """What the checkpoint says of its image processor."""
    for name in PROCESSOR_FILES:
        path = directory / name
        if path.is_file():
            fields = read_json(path)
            inner = fields.get("image_processor")
            if isinstance(inner, dict):
                fields = inner
            if name == PROCESSOR_FILES[1] or inner is not None:
                left_out = ("image_processor_type", "processor_class", "auto_map", "feature_extractor_type")
                return {key: value for key, value in fields.items() if key not in left_out}
    raise ValueError(f"{directory} has no {PROCESSOR_FILES[1]}, so nothing says how its images are prepared")
