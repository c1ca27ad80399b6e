"""examples/colab.ipynb, run by a kernel: whole, on the CPU; its engine on a pretend T4. An assignment's notebook."""

import shutil
import subprocess
from pathlib import Path

import pytest

from chapters.__main__ import main
from chapters.course import find_chapter
from chapters.exercise_cells import MARK
from chapters.teaching.cells import notebook
from tests.marks import by_night

HINT = 'needs nbclient and ipykernel: pip install -e ".[ci]"'
pytest.importorskip("ipykernel", reason=HINT)
nbclient, nbformat = (pytest.importorskip(name, reason=HINT) for name in ("nbclient", "nbformat"))

ROOT = Path(__file__).parent.parent
ON_A_T4 = """from tests.pretend_gpu import pretend_gpu
pretending = pretend_gpu(capability=(7, 5))
pretending.__enter__();"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """examples/ of a copy of the repository. pip says what it would install, and installs nothing."""
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT, tmp_path / "repository", ignore=ignored, symlinks=True)
    return tmp_path / "repository" / "examples"


def run(folder: Path, cells: list | None = None) -> dict[str, str]:
    """What each cell has put out, by its id. cells: these instead of those of colab.ipynb."""
    nb = nbformat.v4.new_notebook(cells=cells) if cells else nbformat.read(folder / "colab.ipynb", 4)
    nbclient.NotebookClient(nb, timeout=900, resources={"metadata": {"path": str(folder)}}).execute()
    return {cell.id: "".join(map(text_of, cell.get("outputs", []))) for cell in nb.cells}


def text_of(output: dict) -> str:
    if output["output_type"] == "stream":
        return output["text"]
    return output["data"]["text/plain"] if "data" in output else f"{output['ename']}: {output['evalue']}"


@pytest.mark.nightly
def test_on_a_cpu(folder, demo_checkpoint):
    out = run(folder)
    assert out["install-cell"].startswith("PyTorch 2.")
    assert "The cafe is called Rope Walk." in out["quickstart"]
    assert "computed in torch.bfloat16 on cpu" in out["llm"]
    assert ", 0 of them from the cache" in out["cache"] and "'hits': " in out["cache"]
    assert (folder.parent / "gpu_report.md").stat().st_size > 1000
    assert "\x1b" not in out["report-cell"]
    assert out["check"].startswith("NotPassed: 0 of 9 checks passed\nnot started")


def test_alone(folder, tmp_path):
    """Opened from GitHub: it says what it lacks, clones what it is told to, and may be run again."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(folder.parent)]
    for command in (["init", "-q"], ["add", "pyproject.toml", "nanovllm"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    alone = tmp_path / "deeper" / "alone"
    alone.mkdir(parents=True)
    shutil.copy(folder / "colab.ipynb", alone)
    cells = {cell.id: cell for cell in nbformat.read(alone / "colab.ipynb", 4).cells}
    fetch, install = cells["fetch"], cells["install-cell"]
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="write the repository's address"):
        run(alone, [fetch, install])
    fetch.source = f"repository = {folder.parent.as_uri()!r}"
    where = nbformat.v4.new_code_cell("import nanovllm\nprint(nanovllm.__file__)")
    out = run(alone, [fetch, install, install, where])
    assert out[where.id] == f"{alone}/nanovllm-clone/nanovllm/__init__.py\n"


@pytest.mark.nightly
def test_on_a_t4(folder, checkpoint):
    cells = [cell for cell in nbformat.read(folder / "colab.ipynb", 4).cells if cell.cell_type == "code"]
    wanted = {cell.id: cell for cell in cells if cell.id in ("fetch", "install-cell", "llm", "cache", "forget")}
    small = f"{str(checkpoint())!r}, max_num_batched_tokens=64, max_num_seqs=4, max_model_len=256"
    wanted["llm"].source = wanted["llm"].source.replace('"demo", max_model_len=2048', small)
    wanted["cache"].source = wanted["cache"].source.replace("[:1200]", "[:100]")
    pretend = nbformat.v4.new_code_cell(ON_A_T4)
    first, second, *others = wanted.values()
    out = run(folder, [first, second, pretend, *others])
    assert "computed in torch.float32 on pretend:0" in out["llm"]  # as the checkpoint says


def test_the_exercise_is_the_chapters(folder):
    """Its cells are those of an assignment's notebook."""
    cells = nbformat.read(folder / "colab.ipynb", 4).cells
    ours = [cell.source for cell in cells if cell.cell_type == "code" and cell.source.startswith(MARK)]
    theirs = [cell.source for cell in nbformat.reads(notebook(find_chapter(7)), 4).cells]
    assert len(ours) == 2 and set(ours) <= set(theirs)


@pytest.mark.parametrize("is_unpacked", [False, by_night(True)])
def test_an_assignment(tmp_path, monkeypatch, demo_checkpoint, is_unpacked):
    """It needs what is handed out, and nothing else: an empty exercise does not pass, our solution does."""
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert main(["student", str(tmp_path / "out"), "--assignment", "4", "--for", "colab"]) == 0
    folder = shutil.copytree(tmp_path / "out" / "ch04", tmp_path / "alone")
    assert {path.name for path in folder.iterdir()} == {"ch04.ipynb", "course.zip"}
    cells = {cell.id: cell for cell in nbformat.read(folder / "ch04.ipynb", 4).cells if cell.cell_type == "code"}
    if is_unpacked:
        shutil.unpack_archive(folder / "course.zip", tmp_path)
        (folder / "course.zip").unlink()
        for part in ("chapters", "nanovllm"):
            shutil.move(tmp_path / "course" / part, folder)
    where = nbformat.v4.new_code_cell("import chapters, nanovllm\nprint(chapters.__file__, nanovllm.__file__)")
    first, task, check = cells["first"], cells["task-free"], cells["check-free"]
    check.metadata["tags"] = ["raises-exception"]
    ours = nbformat.v4.new_code_cell(f"{MARK}: all\n{(find_chapter(4).folder / 'solution.py').read_text()}")
    again = nbformat.v4.new_code_cell(check.source)
    out = run(folder, [first, cells["beginning"], where, task, check, ours, again])
    course = folder if is_unpacked else folder / "course"
    assert out[where.id].split() == [f"{course}/{part}/__init__.py" for part in ("chapters", "nanovllm")]
    assert out[check.id].startswith("NotPassed: 0 of 8 checks passed\nnot started")
    assert out[again.id] == "free: passed, 8 checks\n"


def test_an_assignment_without_its_course(tmp_path):
    cells = [cell for cell in nbformat.reads(notebook(find_chapter(4)), 4).cells if cell.id == "first"]
    with pytest.raises(nbclient.exceptions.CellExecutionError, match=r"put course\.zip, which belongs to"):
        run(tmp_path, cells)
