"""Checkpoints of few bits that several tests read."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.published_files import FORMATS, publish


@pytest.fixture(scope="session")
def published_of(tmp_path_factory) -> Callable[[Path, str], tuple[Path, Path]]:
    """published_of(source, kind) -> publish()'s two folders, made once: to be read, or copied."""
    return cache(lambda source, kind: publish(source, tmp_path_factory.mktemp("of"), *FORMATS[kind]))
