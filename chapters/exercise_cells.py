"""Exercise cells: the cells of a notebook that are exercise.py.

Standard library only: the platforms that grade take this file along.
"""

import re
from collections.abc import Iterable
from typing import Any

MARK = "# exercise.py"


def exercise_of(sources: Iterable[str]) -> str:
    """exercise.py, of the sources of code cells, as they were typed: those whose first line begins with MARK; of those
    with the same first line, the last one, where the first one was."""
    cells = {source.partition("\n")[0].rstrip(): source.strip() for source in map(as_run, sources)}
    marked = [source for first_line, source in cells.items() if first_line.startswith(MARK)]
    return "\n\n\n".join(marked) + "\n" if marked else ""


def as_run(source: str) -> str:
    """A cell without the empty lines and the indentation that it begins with, as IPython runs it."""
    source = re.sub(r"\A\s*\n", "", source)
    indentation = source[: len(source) - len(source.lstrip())]
    return re.sub(f"^{indentation}", "", source, flags=re.MULTILINE)


def code_in(notebook: dict[str, Any]) -> list[str]:
    """The sources of a notebook's code cells. Raises KeyError or TypeError if it is no notebook."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
