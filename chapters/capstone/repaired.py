"""The process in which a broken or repaired file stands in for one of the engine's: started by repair.py alone."""

import json
import sys
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


def main(number: int, module: str, file: str, token: str, case: str | None) -> None:
    """Say what users see (without a token), or what is seen in a case, or a line for each check, after this token."""
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, InPlace(module, Path(file)))
    if case is not None:
        from chapters.capstone.case import read_case, see

        try:
            print(json.dumps(see(read_case(case))))
        except (ValueError, IndexError) as error:
            sys.exit(f"{error}")
        return
    if not token:
        from chapters.capstone.symptoms import SYMPTOMS

        for line in SYMPTOMS[number]():
            print(line, flush=True)
        return
    from chapters.capstone.battery import BATTERIES
    from chapters.expect import Wrong
    from chapters.submission import describe, readable

    for check in BATTERIES[number]:
        problem = ""
        try:
            check()
        except Wrong as wrong:
            problem = f"{wrong.hint}" + "".join(
                f"; {what} {readable(value, 300)}"
                for what, value in (("expected", wrong.expected), ("found", wrong.got))
                if value is not None
            )
        except BaseException as error:
            problem = describe(error, file)
        print(token, json.dumps([check.__doc__, problem]), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.stdin.readline()))
