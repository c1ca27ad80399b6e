"""Where vLLM's scripts import from: these module paths lead to the same objects here, wherever they live."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import nanovllm.config
import nanovllm.sampling_params
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.features.pooling.params import PoolerConfig

PATHS = {
    "nanovllm.inputs": "nanovllm.checks.vllm_inputs",
    "nanovllm.lora": "nanovllm.features.lora",
    "nanovllm.lora.request": "nanovllm.features.lora.request",
    "nanovllm.pooling_params": "nanovllm.features.pooling.params",
    "nanovllm.utils": "nanovllm.checks.flexible_parser",
    "nanovllm.utils.argparse_utils": "nanovllm.checks.flexible_parser",
}


class VLLMPaths(MetaPathFinder, Loader):
    """Asked after the files of this package: a path that has a file is never one of these."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name in PATHS else None

    def exec_module(self, module: ModuleType) -> None:
        ours = vars(import_module(PATHS[module.__name__]))
        vars(module).update({name: value for name, value in ours.items() if not name.startswith("__")})


sys.meta_path.append(VLLMPaths())
nanovllm.sampling_params.StructuredOutputsParams = StructuredOutputsParams  # type: ignore[misc]
nanovllm.config.PoolerConfig = PoolerConfig  # type: ignore[attr-defined]
