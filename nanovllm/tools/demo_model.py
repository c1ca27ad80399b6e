"""The demo model, for scripts and examples. nanovllm/files/demo_model.py fetches and unpacks it."""

import sys
from pathlib import Path

from nanovllm.files.demo_model import DemoModelError, demo_model_path
from nanovllm.files.hub import is_demo_name

__all__ = ["DemoModelError", "demo_model_path", "model_or_demo"]


def model_or_demo(model: str | None = None) -> str:
    """The model that a script was given, or where the demo model is. Ends the script if that cannot be made."""
    if model and not is_demo_name(model):
        return model
    try:
        return str(demo_model_path(model or None))
    except DemoModelError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")
