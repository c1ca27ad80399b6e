"""The terminal app of a lab, asked for without textual at hand."""

from typing import Any


def explorer(title: str, *face: Any, **more: Any) -> Any:
    """The terminal app of these (explorer.py). Only now is textual needed."""
    from chapters.explorer import Explorer

    return Explorer(title, *face, **more)
