# Run this cell first: it unpacks the course and installs what it needs. The machine's own PyTorch stays as it is.
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

PACKAGES: list[str] = []
TORCH = "torch"


def get_ready() -> None:
    if course() is None:
        if not Path("course.zip").is_file() and "google.colab" in sys.modules:
            from google.colab import files

            files.upload()  # a button
        if not Path("course.zip").is_file():
            raise FileNotFoundError("put course.zip, which belongs to this notebook, into the same folder")
        with zipfile.ZipFile("course.zip") as archive:
            archive.extractall()
    folder = str(course())
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = folder  # of the processes in which cells are checked
    wanted = PACKAGES if find_spec("torch") else [TORCH, *PACKAGES]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)


def course() -> Path | None:
    """Where it is: beside this notebook, or in the folder that course.zip makes."""
    folders = (Path.cwd(), Path.cwd() / "course")
    return next((folder for folder in folders if (folder / "nanovllm" / "engine.py").is_file()), None)
