# Run this cell first: it unpacks the course and installs what it needs. The machine's own PyTorch stays as it is.
import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

CHAPTER = "ch04_paged_attention"
PACKAGES: list[str] = []
TORCH = "torch"
KAGGLE = Path("/kaggle/input")  # where Kaggle puts what is added to a notebook


def get_ready() -> None:
    if not has_chapter(Path.cwd()):
        unpack()
    if course() is None and "google.colab" in sys.modules:
        from google.colab import files

        files.upload()  # a button
        unpack()
    folder = course()
    if folder is None:
        raise FileNotFoundError(f"put course.zip, which belongs to this notebook ({CHAPTER}), into the same folder")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = str(folder)  # of the processes in which cells are checked
    wanted = PACKAGES if find_spec("torch") else [TORCH, *PACKAGES]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *wanted], check=True)


def unpack() -> None:
    """Every archive that is here, course (1).zip, too: the newest last, over those of other assignments. Only an
    exercise.py that is there stays, since somebody may have written into it."""
    archives = [*Path.cwd().glob("course*.zip"), *KAGGLE.rglob("course*.zip")]
    for path in sorted(archives, key=lambda path: path.stat().st_mtime):
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.startswith("course/")]
            archive.extractall(members=(name for name in names if not is_written(Path(name))))


def is_written(path: Path) -> bool:
    return path.name == "exercise.py" and path.exists()


def course() -> Path | None:
    """Where it is: beside this notebook, in the folder that course.zip makes, or in one that Kaggle has unpacked."""
    folders = [Path.cwd(), Path.cwd() / "course", *(path.parent for path in KAGGLE.rglob("nanovllm"))]
    return next(filter(has_chapter, folders), None)


def has_chapter(folder: Path) -> bool:
    return (folder / "nanovllm" / "engine.py").is_file() and (folder / "chapters" / CHAPTER).is_dir()
