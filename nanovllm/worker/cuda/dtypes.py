"""The dtype that a GPU computes in: float16 where it has no instructions for bfloat16 (chapter 10).

That is every GPU before Ampere (compute capability 8.0), such as the T4 of free notebooks. What PyTorch does there in
bfloat16 is emulated, or missing.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch

from nanovllm.checkpoint import ModelConfig
from nanovllm.config import EngineConfig
from nanovllm.files.tensor_files import FLOAT_BYTES, model_files

logger = logging.getLogger("nanovllm")

AMPERE = (8, 0)
LARGEST = 65504  # in float16
ROWS = 4096  # of a matrix that are looked at together


def with_dtype(model_config: ModelConfig, config: EngineConfig, directory: Path) -> ModelConfig:
    """The configuration with a dtype that this GPU has. Raises ValueError if the caller asks for another.

    A checkpoint in bfloat16 is computed in float16, or, if it has weights that float16 does not hold, in float32.
    Hidden states may be beyond float16, too, which no file says: a request then ends with an error about NaN.
    """
    capability, name = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    asked = model_config.dtype if config.dtype == "auto" else config.dtype
    if capability >= AMPERE or asked != "bfloat16":
        return model_config
    lacks = f"{name} (compute capability {capability[0]}.{capability[1]}) does not compute in bfloat16"
    if config.dtype != "auto":
        raise ValueError(f"{lacks}; choose dtype='float16' or 'float32'")
    too_large = None if config.load_format == "dummy" else overflows(directory, model_config)
    if too_large is not None:
        logger.warning("%s, and %s has numbers that float16 does not hold: the dtype is float32", lacks, too_large)
        return replace(model_config, dtype="float32")
    logger.info("%s: the dtype is float16", lacks)
    return replace(model_config, dtype="float16")


def overflows(directory: Path, model_config: ModelConfig) -> str | None:
    """The name of a tensor with a number beyond float16. It takes a pass over the files, which are read next anyway."""
    for name, file in model_files(directory, model_config).items():
        stored = file.get_slice(name)
        shape = stored.get_shape()
        if stored.get_dtype() not in FLOAT_BYTES.keys() - {"F16"} or not shape:
            continue
        others = (slice(None),) * (len(shape) - 1)
        parts = (stored[(slice(i, i + ROWS), *others)] for i in range(0, shape[0], ROWS))
        if any(part.abs().max() > LARGEST for part in parts):
            return name
    return None
