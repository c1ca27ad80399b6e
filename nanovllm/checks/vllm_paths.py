"""Where vLLM's scripts import from: these module paths lead to the same objects here, wherever they live.

nano-vllm's are here, too (nano_vllm.py). What either has and this engine has not is refused by name and reason
(vllm_refused.py), where it is imported.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import nanovllm.config
import nanovllm.engine
import nanovllm.outputs
import nanovllm.sampling_params
from nanovllm.checks import nano_vllm
from nanovllm.checks.vllm_refused import NameRefused, refusal
from nanovllm.features.beam_search.params import BeamSearchParams
from nanovllm.features.cache_reports.config import KVEventsConfig
from nanovllm.features.callers.profile import ProfilerConfig
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.features.logits_processors.classes import VllmConfig
from nanovllm.features.pooling.params import PoolerConfig

HELPERS = "nanovllm.checks.vllm_helpers"
PATHS = {  # vLLM's module, under our package's name -> ours
    **dict.fromkeys(("nanovllm.inputs", "nanovllm.inputs.data"), "nanovllm.checks.vllm_inputs"),
    "nanovllm.engine.arg_utils": "nanovllm.checks.flags",
    "nanovllm.engine.llm_engine": "nanovllm.engine",
    "nanovllm.engine.async_llm_engine": "nanovllm.serving.async_llm",
    "nanovllm.engine.protocol": "nanovllm.serving.vllm_client",
    "nanovllm.entrypoints.chat_utils": HELPERS,
    "nanovllm.entrypoints.llm": "nanovllm.llm",
    "nanovllm.exceptions": HELPERS,
    "nanovllm.logger": HELPERS,
    "nanovllm.logprobs": "nanovllm.outputs",
    "nanovllm.lora": "nanovllm.features.lora",
    "nanovllm.lora.request": "nanovllm.features.lora.request",
    "nanovllm.distributed.kv_events": "nanovllm.features.cache_reports.events",
    **dict.fromkeys(("nanovllm.distributed", "nanovllm.distributed.parallel_state", "nanovllm.platforms"), HELPERS),
    **dict.fromkeys(("nanovllm.tokenizers", "nanovllm.transformers_utils.tokenizer"), HELPERS),
    "nanovllm.pooling_params": "nanovllm.features.pooling.params",
    "nanovllm.utils": HELPERS,
    "nanovllm.utils.argparse_utils": "nanovllm.checks.flexible_parser",
    "nanovllm.utils.network_utils": HELPERS,
    "nanovllm.v1.engine.async_llm": "nanovllm.serving.async_llm",
    "nanovllm.v1.engine.exceptions": "nanovllm.serving.vllm_client",
    "nanovllm.v1.engine.llm_engine": "nanovllm.engine",
    "nanovllm.v1.metrics.reader": "nanovllm.features.callers.metrics",
    **dict.fromkeys(
        (f"nanovllm.v1.sample.logits_processor{rest}" for rest in ("", ".interface", ".builtin")),
        "nanovllm.features.logits_processors.classes",
    ),
    **nano_vllm.PATHS,
}
LAZY = {"AsyncLLM": "nanovllm.serving.async_llm", "AsyncLLMEngine": "nanovllm.serving.async_llm"}


class VLLMPaths(MetaPathFinder, Loader):
    """Asked after the files of this package: a path that has a file is never one of these."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != "nanovllm" or not (_is_ours(name) or refusal(rest)):
            return None
        return ModuleSpec(name, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if not _is_ours(name):
            raise NameRefused(refusal(name.partition(".")[2]), name=name)
        ours = vars(import_module(PATHS[name])) if name in PATHS else {}
        vars(module).update({key: value for key, value in ours.items() if not key.startswith("__")})
        for class_name, (where, our_name) in nano_vllm.CLASSES.get(name, {}).items():
            setattr(module, class_name, getattr(import_module(where), our_name))


def _is_ours(name: str) -> bool:
    """Such a path, or a package above one."""
    return any(path == name or path.startswith(f"{name}.") for path in (*PATHS, *nano_vllm.CLASSES))


def load_lazily(name: str) -> Any:
    """`nanovllm.__getattr__`: what is imported only when a script asks for it."""
    if name in LAZY:
        return getattr(import_module(LAZY[name]), name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")


sys.meta_path.append(VLLMPaths())
for _module in (nanovllm.config, nanovllm.engine, nanovllm.outputs, nanovllm.sampling_params):
    _module.__path__ = []  # vLLM has modules below, or more names in, what are single files here
nanovllm.sampling_params.StructuredOutputsParams = StructuredOutputsParams  # type: ignore[misc]
nanovllm.config.ProfilerConfig = ProfilerConfig  # type: ignore[attr-defined]
nanovllm.config.KVEventsConfig = KVEventsConfig  # type: ignore[attr-defined]
nanovllm.config.VllmConfig = VllmConfig  # type: ignore[attr-defined]
nanovllm.sampling_params.BeamSearchParams = BeamSearchParams  # type: ignore[attr-defined]
nanovllm.config.PoolerConfig = PoolerConfig  # type: ignore[attr-defined]
nanovllm.config.Config = nanovllm.config.EngineConfig  # type: ignore[attr-defined]  # nano-vllm's name
