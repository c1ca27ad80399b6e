"""Checkpoints that see images."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.image_checkpoints import make_image_checkpoint


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[[str], Path]:
    """folder_of(kind) -> a checkpoint, made once."""
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = make_image_checkpoint(tmp_path_factory.mktemp(kind), kind)
        return made[kind]

    return make
