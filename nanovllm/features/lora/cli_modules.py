"""--lora-modules: adapters that a body of OpenAI's API chooses by naming one as its model (chapter 15)."""

import json
from collections.abc import Iterable
from dataclasses import replace

from nanovllm.checkpoint import ModelConfig
from nanovllm.checks.values import shorten
from nanovllm.config import EngineConfig
from nanovllm.features.lora.lora_request import LoRARequest
from nanovllm.features.lora.registry import KnownAdapters
from nanovllm.files.hub import resolve_checkpoint


def read_modules(
    texts: Iterable[str], config: EngineConfig, model_names: Iterable[str]
) -> tuple[EngineConfig, list[LoRARequest]]:
    """The adapters, and the configuration with which requests may choose them. No weight of the model is read.

    Raises ValueError for one that is not NAME=PATH or {"name": NAME, "path": PATH}, that has a name which is taken, or
    that does not fit the model.
    """
    names, adapters = {*model_names}, list[LoRARequest]()
    for text in texts:
        name, path = _parse(text)
        if name in names:
            raise ValueError(f"--lora-modules: {name!r} is taken already, by the model or by another adapter")
        names.add(name)
        adapters.append(LoRARequest(name, len(adapters) + 1, path))
    if not adapters:
        return config, []
    model = ModelConfig.from_directory(
        resolve_checkpoint(config.model, config.revision, config.load_format),
        overrides=config.hf_overrides,
        generation_config=config.generation_config,
        engine_config=config,
    )
    config = replace(config, enable_lora=True)
    for adapter in adapters:
        KnownAdapters(model, config).check(adapter)
    return config, adapters


def _parse(text: str) -> tuple[str, str]:
    if text.startswith("{"):  # vLLM's other form, for names with an equals sign; it ignores base_model_name, too
        try:
            module = json.loads(text)
            name, path = module["name"], module["path"]
        except (ValueError, KeyError, RecursionError):
            name = path = None
    else:
        name, _, path = text.partition("=")
    if not name or not path or not isinstance(name, str) or not isinstance(path, str):
        raise ValueError(f'--lora-modules takes NAME=PATH, or {{"name": NAME, "path": PATH}}, found {shorten(text)}')
    return name, path
