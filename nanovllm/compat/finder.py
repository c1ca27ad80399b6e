"""Imports of modules that vLLM or nano-vllm has and this package has not (paths.py says where they lead).

It is the only module of compat/ that `import nanovllm` loads, and no module of the engine has to know of it.
"""

import sys
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

# Scripts for vLLM import more from these modules than their files have: classes, and modules below nanovllm.engine.
SHARED = ("nanovllm.config", "nanovllm.engine", "nanovllm.outputs", "nanovllm.sampling_params")


class Finder:
    """Finds this package's files, and for paths that have none asks paths.py, which is loaded then."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not name.startswith("nanovllm."):
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            from nanovllm.compat import paths

            return paths.find_spec(name)
        if name in SHARED and spec.origin is not None:
            spec.loader = SharedFile(name, spec.origin)
            spec.submodule_search_locations = []  # Python takes it for a package, and asks for modules below it
        return spec


class SharedFile(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.__getattr__ = partial(class_of_vllm, module.__name__)


def class_of_vllm(module: str, name: str) -> Any:
    """A module's __getattr__, which is asked for what its file does not have."""
    from nanovllm.compat import paths

    return paths.class_in(module, name)


def install() -> None:
    """Before Python's own finder of files, and after whatever somebody has put before that."""
    if Finder not in sys.meta_path:  # importlib.reload(nanovllm) comes here again
        sys.meta_path.insert(sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else 0, Finder)
