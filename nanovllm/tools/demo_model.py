"""The demo model, for scripts and examples. nanovllm/files/demo_model.py fetches and unpacks it."""

import sys
from pathlib import Path

from nanovllm.files.demo_model import DemoModelError, demo_model_path
from nanovllm.files.hub import is_demo_name, resolve_checkpoint

__all__ = ["DemoModelError", "demo_model_path", "model_or_demo"]


def model_or_demo(model: str | None = None) -> str:
    """The model that a script was given, or where the demo model is. Ends the script if there is no such model."""
    try:
        if not model or is_demo_name(model):
            return str(demo_model_path(model or None))
        path = resolve_checkpoint(model, load_format="dummy")  # a hub's weights can wait
        if path.is_dir() and not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path} has no config.json, so it is not a checkpoint directory")
        return model
    except (DemoModelError, FileNotFoundError, ValueError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
