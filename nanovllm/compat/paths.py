"""Where vLLM's scripts import from: these module paths lead to the same objects here, wherever they live.

nano-vllm's are here, too. finder.py asks this file, for a path where this package has no module and for a name that a
module of ours does not have. What is not here either gets Python's own error.
"""

from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HELPERS = "nanovllm.compat.helpers"
PATHS = {  # vLLM's module, under our package's name -> ours
    **dict.fromkeys(("nanovllm.inputs", "nanovllm.inputs.data"), "nanovllm.compat.inputs"),
    "nanovllm.engine.arg_utils": "nanovllm.compat.command_line",
    "nanovllm.engine.llm_engine": "nanovllm.engine",
    "nanovllm.engine.async_llm_engine": "nanovllm.serving.async_llm",
    "nanovllm.engine.protocol": "nanovllm.serving.async_llm",
    "nanovllm.entrypoints.chat_utils": HELPERS,
    "nanovllm.entrypoints.llm": "nanovllm.llm",
    "nanovllm.exceptions": HELPERS,
    "nanovllm.logger": HELPERS,
    "nanovllm.logprobs": "nanovllm.outputs",
    "nanovllm.lora": "nanovllm.features.lora",
    "nanovllm.lora.request": "nanovllm.features.lora.lora_request",
    "nanovllm.distributed.kv_events": "nanovllm.features.cache_reports.events",
    **dict.fromkeys(("nanovllm.distributed", "nanovllm.distributed.parallel_state", "nanovllm.platforms"), HELPERS),
    **dict.fromkeys(("nanovllm.tokenizers", "nanovllm.transformers_utils.tokenizer"), HELPERS),
    "nanovllm.pooling_params": "nanovllm.features.pooling.params",
    "nanovllm.utils": HELPERS,
    "nanovllm.utils.argparse_utils": "nanovllm.compat.command_line",
    "nanovllm.utils.network_utils": HELPERS,
    "nanovllm.v1.engine.async_llm": "nanovllm.serving.async_llm",
    "nanovllm.v1.engine.exceptions": "nanovllm.serving.async_llm",
    "nanovllm.v1.engine.llm_engine": "nanovllm.engine",
    "nanovllm.v1.metrics.reader": "nanovllm.features.callers.metrics",
    **dict.fromkeys(
        (f"nanovllm.v1.sample.logits_processor{rest}" for rest in ("", ".interface", ".builtin")),
        "nanovllm.features.logits_processors.classes",
    ),
    # nano-vllm's
    "nanovllm.engine.block_manager": "nanovllm.core.block_manager",
    "nanovllm.engine.model_runner": "nanovllm.worker.model_runner",
    "nanovllm.engine.scheduler": "nanovllm.core.scheduler",
    "nanovllm.engine.sequence": "nanovllm.core.sequence",
    "nanovllm.utils.loader": "nanovllm.worker.loader",
}
NANO_CLASSES = {  # a module of nano-vllm -> its classes that have a counterpart here -> where that is
    "nanovllm.layers.layernorm": {"RMSNorm": ("nanovllm.worker.layers", "RMSNorm")},
    "nanovllm.layers.linear": {
        "LinearBase": ("nanovllm.worker.layers", "Linear"),
        "ReplicatedLinear": ("nanovllm.worker.layers", "Linear"),
        "RowParallelLinear": ("nanovllm.features.parallel.parallel_layers", "RowParallelLinear"),
    },
    "nanovllm.layers.rotary_embedding": {"RotaryEmbedding": ("nanovllm.worker.layers", "RotaryEmbedding")},
    "nanovllm.models.qwen3": {
        "Qwen3Attention": ("nanovllm.worker.model", "Attention"),
        "Qwen3DecoderLayer": ("nanovllm.worker.model", "DecoderLayer"),
        "Qwen3ForCausalLM": ("nanovllm.worker.model", "Decoder"),
        "Qwen3MLP": ("nanovllm.worker.layers", "MLP"),
        "Qwen3Model": ("nanovllm.worker.model", "Decoder"),
    },
}
POOLING_OUTPUTS = """PoolingOutput EmbeddingOutput ClassificationOutput ScoringOutput
PoolingRequestOutput EmbeddingRequestOutput ClassificationRequestOutput ScoringRequestOutput""".split()
CLASSES = {  # classes that vLLM has in a module of ours -> where they live here
    "nanovllm.config": {
        "Config": "nanovllm.config.EngineConfig",  # nano-vllm's name
        "KVEventsConfig": "nanovllm.features.cache_reports.kv_events_config.KVEventsConfig",
        "PoolerConfig": "nanovllm.features.pooling.params.PoolerConfig",
        "ProfilerConfig": "nanovllm.features.callers.profile.ProfilerConfig",
        "VllmConfig": "nanovllm.features.logits_processors.classes.VllmConfig",
    },
    "nanovllm.outputs": {name: f"nanovllm.features.pooling.outputs.{name}" for name in POOLING_OUTPUTS},
    "nanovllm.sampling_params": {
        "BeamSearchParams": "nanovllm.features.beam_search.params.BeamSearchParams",
        "StructuredOutputsParams": "nanovllm.features.grammar.params.StructuredOutputsParams",
    },
}


def find_spec(name: str) -> ModuleSpec | None:
    """How such a path is imported; None for a path that neither vLLM nor nano-vllm has."""
    paths = (*PATHS, *NANO_CLASSES)
    is_known = any(path == name or path.startswith(f"{name}.") for path in paths)  # or is a package above a known one
    return ModuleSpec(name, OtherPath(), is_package=True) if is_known else None


def class_in(module: str, name: str) -> Any:
    """A class that vLLM has in this module of ours. Raises AttributeError."""
    if name not in CLASSES.get(module, {}):
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    where, _, class_name = CLASSES[module][name].rpartition(".")
    return getattr(import_module(where), class_name)


class OtherPath(Loader):
    """Makes a module with the names of ours."""

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        ours = vars(import_module(PATHS[name])) if name in PATHS else {}
        vars(module).update({key: value for key, value in ours.items() if not key.startswith("__")})
        for class_name, (where, our_name) in NANO_CLASSES.get(name, {}).items():
            setattr(module, class_name, getattr(import_module(where), our_name))
