"""--lora-modules NAME=PATH: adapters that a body of OpenAI's API chooses by naming one as its model (chapter 15)."""

from collections.abc import Iterable
from dataclasses import replace

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.hub import resolve_checkpoint
from nanovllm.lora.known import KnownAdapters
from nanovllm.lora.request import LoRARequest
from nanovllm.validation import shorten


def read_modules(
    texts: Iterable[str], config: EngineConfig, model_names: Iterable[str]
) -> tuple[EngineConfig, list[LoRARequest]]:
    """The adapters, and the configuration with which requests may choose them. No weight of the model is read.

    Raises ValueError for one that is not NAME=PATH, has a name that is taken, or does not fit the model.
    """
    names, adapters = {*model_names}, list[LoRARequest]()
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or not name or not path:
            raise ValueError(f"--lora-modules takes NAME=PATH, found {shorten(text)}")
        if name in names:
            raise ValueError(f"--lora-modules: {name!r} is taken already, by the model or by another adapter")
        names.add(name)
        adapters.append(LoRARequest(name, len(adapters) + 1, path))
    if not adapters:
        return config, []
    model = ModelConfig.from_directory(
        resolve_checkpoint(config.model, config.revision, config.load_format), config.hf_overrides
    )
    config = replace(config, enable_lora=True)
    for adapter in adapters:
        KnownAdapters(model, config).check(adapter)
    return config, adapters
