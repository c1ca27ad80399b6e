"""What an engine on a GPU may compute with. The first one whose packages are installed is what LLM(...) chooses."""

import importlib.util

BACKENDS = {
    "flash-attn, graphs": ("triton", "flash_attn", "cuda_graphs"),
    "flash-attn": ("triton", "flash_attn"),
    "Triton, graphs": ("triton", "cuda_graphs"),
    "Triton": ("triton",),
    "PyTorch": (),
}


def installed_backends() -> list[str]:
    packages = {name for name in ("triton", "flash_attn") if importlib.util.find_spec(name)}
    return [name for name, needs in BACKENDS.items() if packages.issuperset({*needs} - {"cuda_graphs"})]
