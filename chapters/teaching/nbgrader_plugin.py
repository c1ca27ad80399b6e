"""nbgrader plugin: what was handed in is not run in the process of the cells that grade, which could be replaced there.

These cells find exercise.py and course.zip in their folder, and nothing else (hidden_test.py).
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

from nbgrader.preprocessors import Execute

from chapters.exercise_cells import code_in, exercise_of


class AsText(Execute):
    """In the place of nbgrader's Execute, after it has restored the cells that are locked."""

    def preprocess(self, nb: Any, resources: Any = None, km: Any = None) -> Any:
        course = Path(resources["metadata"]["path"], "course.zip")  # nbgrader has put ours there
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "exercise.py").write_text(exercise_of(code_in(nb)), "utf-8", "replace")
            shutil.copy(course, folder)
            resources["metadata"]["path"] = folder
            try:
                return super().preprocess(nb, resources, km)
            finally:
                resources["metadata"]["path"] = str(course.parent)

    def preprocess_cell(self, cell: Any, resources: Any, index: int) -> Any:
        ours = cell.metadata.get("nbgrader", {})
        if ours.get("grade") and ours.get("locked") and ours.get("grade_id"):
            return super().preprocess_cell(cell, resources, index)
        return cell, resources
