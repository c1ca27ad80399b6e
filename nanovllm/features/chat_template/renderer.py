"""The process in which chat templates run: they are programs of whoever made the checkpoint."""

from pathlib import Path

from nanovllm.checks.confined import Confined

# An ordinary template takes a millisecond.
RENDERER = Confined(Path(__file__).with_name("confined_render.py"), seconds=2, max_mb=128, lanes=2)
