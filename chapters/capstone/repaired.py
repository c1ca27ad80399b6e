"""What happens in the process of a Run where a broken or repaired file stands in for one of the engine's (repair.py).

Nothing of the engine may be imported before that file is in its place.
"""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any


class InPlace(MetaPathFinder):
    """Whoever imports this module gets that file."""

    def __init__(self, module: str, file: Path) -> None:
        self.module, self.file = module, file

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.file) if name == self.module else None


def put_in_place(module: str, file: str) -> None:
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, InPlace(module, Path(file)))


def complain(tell: Callable[..., None], number: int, module: str, file: str) -> list[str]:
    """What users see."""
    put_in_place(module, file)
    from chapters.capstone.symptoms import SYMPTOMS

    return list(SYMPTOMS[number]())


def play(tell: Callable[..., None], case: str, module: str, file: str) -> list[str] | str:
    """What is seen in this case, or why it cannot be read."""
    put_in_place(module, file)
    from chapters.capstone.case import read_case, see

    try:
        return see(read_case(case))
    except (ValueError, IndexError) as error:
        return str(error)


def check(tell: Callable[..., None], number: int, module: str, file: str) -> list[tuple[str | None, str]]:
    """Of each check its title, and what it has found."""
    put_in_place(module, file)
    from chapters.capstone.battery import BATTERIES
    from chapters.expect import NOT_GIVEN, Wrong
    from chapters.submission import describe, readable

    found = []
    for check in BATTERIES[number]:
        problem = ""
        try:
            check()
        except Wrong as wrong:
            problem = f"{wrong.hint}" + "".join(
                f"; {what} {readable(value, 300)}"
                for what, value in (("expected", wrong.expected), ("found", wrong.got))
                if value is not NOT_GIVEN
            )
        except BaseException as error:
            problem = describe(error, file)
        found.append((check.__doc__, problem))
    return found
