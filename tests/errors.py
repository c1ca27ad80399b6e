"""A person's mistake gets an error that says what was found and what would work."""

import re

import pytest


def expect(text: str, call, *args, error=ValueError, **kwargs) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call(*args, **kwargs)
