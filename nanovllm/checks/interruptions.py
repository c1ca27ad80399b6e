"""Ctrl-C in the middle of an import."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interruptible_imports() -> Iterator[None]:
    """What comes out of here for a Ctrl-C is a KeyboardInterrupt.

    Before 3.12 Python makes a RuntimeError of what is raised in a __set_name__, and others make errors of that.
    """
    handled = sys.exc_info()[1]  # outside: not what an error in here is made of
    try:
        yield
    except Exception as error:
        found: BaseException | None = error
        while found is not None and found is not handled:
            if isinstance(found, KeyboardInterrupt):
                raise found from None
            found = found.__cause__ or found.__context__
        raise
