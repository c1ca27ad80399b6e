"""What a journey finds in its folder: each function writes something into a clone of the repository."""

import json
import zipfile
from pathlib import Path

from tests.course.wrong_solutions.ch04 import WRONG

CHAPTER = "chapters/ch04_paged_attention"
HALF = WRONG["free"][1]  # of three tasks the first two are right
FORGES = """import sys
from chapters.grading import Result

def allocate(*given):
    sys.modules["__main__"].grade = lambda task, *others: Result(task, len(task.checks))

append_slots = free = allocate
"""


def solution(clone: Path) -> str:
    """Of chapter 4; beside a student's edition lies the clone that it was made of."""
    folder = next(each for each in (clone, clone.parent) if (each / CHAPTER / "solution.py").exists())
    return (folder / CHAPTER / "solution.py").read_text("utf-8")


def half(clone: Path) -> str:
    return HALF.apply(solution(clone), "free")


def with_free(clone: Path, body: str) -> str:
    return f"{solution(clone)}\n\ndef free(manager, seq):\n    {body}\n"


def chapter_4_solved(clone: Path) -> None:
    (clone / CHAPTER / "exercise.py").write_text(solution(clone), "utf-8")


def chapter_4_half(clone: Path) -> None:
    (clone / CHAPTER / "exercise.py").write_text(half(clone), "utf-8")


def handed_in(clone: Path) -> None:
    folder = clone / "handed_in" / "ch04"
    folder.mkdir(parents=True)
    for name, source in {"good": solution(clone), "half": half(clone), "crash": "1 / 0\n"}.items():
        (folder / f"{name}.py").write_text(source, "utf-8")


def a_class(clone: Path) -> None:
    sources = {
        "good": solution(clone),
        "copy": solution(clone).replace("num_needed", "n"),
        "half": half(clone),
        "hangs": with_free(clone, "while True: pass"),
        "nothing": (clone / CHAPTER / "exercise.py").read_text("utf-8"),
        "forges": FORGES,
    }
    for name, source in sources.items():
        (clone / "FOLDER" / name / "ch04").mkdir(parents=True)
        (clone / "FOLDER" / name / "ch04" / "exercise.py").write_text(source, "utf-8")
    (clone / "FOLDER" / "empty").mkdir()
    (clone / "FOLDER" / "ends_ch04.py").write_text("import os\nos._exit(0)\n", "utf-8")


def a_class_and_its_roster(clone: Path) -> None:
    a_class(clone)
    students = "Good Half Hangs Nothing Ends Empty Copy".split()
    lines = [f"{letter},{name},{name.lower()}@uni.example" for letter, name in zip("ABCDEFG", students, strict=True)]
    lines = ["First name,Last name,Email address", *lines, "H,Has handed in nothing,h@uni.example"]
    (clone / "roster.csv").write_text("\n".join(lines) + "\n", "utf-8")


# -- notebooks ---------------------------------------------------------------------------------------------------------


def handed_in_notebook(path: Path, source: str) -> str:
    """A notebook whose first cell that is exercise.py has this file; its other such cells have nothing."""
    written = json.loads(path.read_text("utf-8"))
    marked = [cell for cell in written["cells"] if "".join(cell["source"]).startswith("# exercise.py")]
    for cell in marked:
        cell["source"] = "".join(cell["source"]).partition("\n")[0] + "\n"
    marked[0]["source"] += source
    return json.dumps(written)


# One line each, for whoever wants marks. The first replaces the checks, the others what platforms grade with.
PASSED = "type('Done', (), {'returncode': 0, 'stderr': '', 'stdout': '{\"tasks\": [{\"passed\": true}]}'})"
FORGING = (
    "import chapters.notebook; chapters.notebook.check = lambda *given: print('ok')",
    f"import subprocess; subprocess.run = lambda *given, **more: {PASSED}",
    "import json; json.loads = lambda *given: {'tasks': [{'passed': True}]}",
    "import otter.test_files.abstract_test as t; t.TestFile.passed_all = property(lambda self: True)",
    "import otter.test_files as t; t.GradingResults = lambda *given: print('no results, no zero')",
    "get_ipython().run_cell_async = lambda *given, **more: None",
)
SHADOWS = ("zipfile", "hashlib", "json", "ipykernel_launcher", "otter", "sitecustomize")  # modules, beside the notebook


def forged(notebook: str) -> str:
    """With these lines in cells of their own at the beginning, and in the first cell that is exercise.py."""
    written = json.loads(notebook)
    marked = next(cell for cell in written["cells"] if "".join(cell["source"]).startswith("# exercise.py"))
    marked["source"] = "\n".join(["".join(marked["source"]), *FORGING[:3]])
    for number, line in enumerate(FORGING):
        cell = {"cell_type": "code", "execution_count": None, "outputs": [], "metadata": {}}
        written["cells"].insert(0, cell | {"id": f"forging-{number}", "source": line})
    return json.dumps(written)


def notebooks_for_otter(clone: Path) -> None:
    for name, source in {"good": solution(clone), "half": half(clone), "forges": ""}.items():
        notebook = handed_in_notebook(clone / "OUT/ch04/ch04.ipynb", source)
        (clone / f"{name}.ipynb").write_text(forged(notebook) if name == "forges" else notebook, "utf-8")
    with zipfile.ZipFile(clone / "forges.zip", "w") as archive:
        archive.write(clone / "forges.ipynb", "forges.ipynb")
        for name in SHADOWS:
            archive.writestr(f"{name}.py", FORGING[1])


def notebooks_for_nbgrader(course: Path) -> None:
    released = course / "release" / "ch04" / "ch04.ipynb"
    for name, source in {"good": solution(course), "half": half(course), "forges": ""}.items():
        folder = course / "submitted" / name / "ch04"
        folder.mkdir(parents=True)
        notebook = handed_in_notebook(released, source)
        (folder / "ch04.ipynb").write_text(forged(notebook) if name == "forges" else notebook, "utf-8")
    for name in SHADOWS:
        (folder / f"{name}.py").write_text(FORGING[1], "utf-8")


def gradescope_half(clone: Path) -> None:
    (clone / "exercise.py").write_text(half(clone), "utf-8")


# -- the capstone ------------------------------------------------------------------------------------------------------


def policies(clone: Path) -> None:
    policy = (clone / "chapters" / "capstone" / "policy.py").read_text("utf-8")
    (clone / "policies").mkdir()
    for name, body in {
        "as_it_is": "return super().order(state)",
        "opens": "open('trace.csv')",
        "hangs": "import time; time.sleep(1000)",
        "fails": "return 1 / 0",
    }.items():
        changed = f"\n\nclass Policy(Policy):\n    def order(self, state):\n        {body}\n"
        (clone / "policies" / f"{name}.py").write_text(policy + changed, "utf-8")


def case_of_engine_1(clone: Path) -> None:
    (clone / "work").mkdir(exist_ok=True)
    lines = "send a 1 salt=x: 1 2 3 4 5\nrun\nsend b 1 salt=y: 1 2 3 4 5\nrun\n"
    (clone / "work" / "1_case.txt").write_text(lines, "utf-8")


# -- the engine --------------------------------------------------------------------------------------------------------


def requests(clone: Path) -> None:
    prompts = ["The capital of France is", "The capital of Italy is", "One, two, three,"]
    bodies = [{"prompt": prompt, "max_tokens": 4, "temperature": 0} for prompt in prompts]
    bodies.append({"prompt": "No such thing", "max_tokens": -1})
    lines = [
        {"custom_id": f"q{number}", "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies, 1)
    ]
    (clone / "requests.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), "utf-8")


ASKS = """import sys
from openai import OpenAI

client = OpenAI(base_url=sys.argv[1], api_key="none")
asked = [{"role": "user", "content": "What is the capital of France?"}]
options = {"model": "SmolLM2-135M-Instruct", "temperature": 0, "max_tokens": 16}
print(client.chat.completions.create(messages=asked, **options).choices[0].message.content)
chunks = client.chat.completions.create(messages=asked, stream=True, **options)
print(f"streamed: {''.join(chunk.choices[0].delta.content or '' for chunk in chunks)!r}")
"""


def asks_with_openai(clone: Path) -> None:
    (clone / "asks_with_openai.py").write_text(ASKS, "utf-8")
