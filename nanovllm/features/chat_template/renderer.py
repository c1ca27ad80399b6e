"""The sandbox in which chat templates run: they are programs by whoever made the checkpoint."""

from pathlib import Path

from nanovllm.checks.sandbox import Sandbox

# An ordinary template takes a millisecond.
RENDERER = Sandbox(Path(__file__).with_name("sandboxed_templates.py"), seconds=2, max_mb=128, lanes=2)
