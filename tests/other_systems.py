"""What the engine does, in one process: python -m tests.other_systems win32 MODEL FOLDER

Imports every module, generates, compiles the kernels into an empty cache, runs a batch job, waits for the demo model's
lock, grades, and serves. test_other_systems.py runs it in a process that pretends to be on this system. Prints what was
generated, as JSON.
"""

import importlib
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.pretend import OURS, ROOT


def import_all() -> int:
    """Every module of the project that can be imported without being run. Returns how many."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for folder in OURS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if folder != "examples" or '__name__ == "__main__"' in path.read_text("utf-8")  # others run when imported
    ]
    names = [name for name in names if not name.endswith("__main__") and name not in NOT_IMPORTED]
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if str(error.name).split(".")[0] in OPTIONAL:
                continue
            raise
        except SystemExit as end:  # an example without an optional package
            if "which is not installed here" not in str(end):
                raise
    return len(names)


# Run as a program, by sandbox.py, and imported by nobody.
NOT_IMPORTED = {"chapters.teaching.nbgrader_plugin", "nanovllm.checks.sandbox_process"}
OPTIONAL = {
    "ray",
    "triton",
    "flash_attn",
    "peft",
    "vllm",
    "sglang",
    "llama_cpp",
    "datasets",
    "openai",
    "xxhash_wasm",
    "js",
    "pyodide",
}


def generate(model: str) -> list[list[int]]:
    from nanovllm import LLM, SamplingParams
    from nanovllm.worker.cpu import compiler

    # -O3 takes several times as long, and the bits are the same.
    compiler.COMPILE = [flag.replace("-O3", "-O1") for flag in compiler.COMPILE]
    llm = LLM(model, max_model_len=64)
    assert llm.engine.model_runner.kernels.library is not None, "the C kernels are off"
    outputs = llm.generate(["the quick", "one two three"], SamplingParams(temperature=0, max_tokens=6), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def answer_batch(model: str, folder: Path) -> None:
    from nanovllm.config import EngineConfig
    from nanovllm.jobs.output_file import OutputFile, fingerprint
    from nanovllm.tools.cli import main

    requests, answers = folder / "requests.jsonl", folder / "answers.jsonl"
    body = {"model": model, "prompt": "the quick", "max_tokens": 3, "temperature": 0}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    requests.write_text(json.dumps(line) + "\n", "utf-8")
    command = ["run-batch", "-i", str(requests), "-o", str(answers), "--model", model, "--max-model-len", "64"]
    assert main(command) == 0
    before = answers.read_bytes()
    assert main(command) == 0 and answers.read_bytes() == before, "the same command once more"
    assert before.endswith(b"}\n") and b"\r" not in before
    job = answers, requests, fingerprint(Path(model), EngineConfig(model, max_model_len=64))
    output = OutputFile(*job)
    try:
        OutputFile(*job)
    except ValueError as error:
        assert "another run-batch" in str(error)
    else:
        raise AssertionError("two jobs write one file")
    output.close()


def wait_for_lock(folder: Path) -> None:
    """As two processes do that make the demo model at once."""
    from nanovllm.files.demo_model import _locked
    from nanovllm.files.system import lock_file

    got_in = threading.Event()

    def enter() -> None:
        with _locked(folder / "lock"):
            got_in.set()

    with open(folder / "lock", "wb") as holder:
        lock_file(holder.fileno())
        waiter = threading.Thread(target=enter)
        waiter.start()
        waiter.join(0.3)
        assert not got_in.is_set()
    waiter.join(60)
    assert got_in.is_set()


def grade_solution() -> None:
    from chapters.course import find_chapter
    from chapters.report import report

    chapter = find_chapter(7)
    results = report(chapter, Path(str(chapter.module("solution").__file__)), None, 120.0, None)
    assert len(results) > 1 and all(result.passed or result.open for result in results), results


def serve_one(model: str) -> None:
    """In this thread; another one asks, for text that fits a grammar and with a chat, and ends the server by Ctrl-C."""
    from nanovllm.tools.cli import main

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    problems: list[BaseException] = []

    def ask() -> None:
        try:
            chat = {"messages": [{"role": "user", "content": "the quick"}], "max_tokens": 4, "temperature": 0}
            answer = post(port, "/v1/chat/completions", chat | {"structured_outputs": {"regex": "[a-z]{1,3}"}})
            assert answer["choices"][0]["message"]["content"].isalpha(), answer
        except BaseException as error:
            problems.append(error)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=ask).start()
    assert main(["serve", model, "--port", str(port), "--max-model-len", "64"]) == 0
    assert not problems, problems


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    """Waits until the server takes connections, too."""
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    for _ in range(600):
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read()) from error
        except urllib.error.URLError:
            time.sleep(0.1)
    raise AssertionError("the server does not answer")


def refuse_ranks(model: str) -> None:
    from nanovllm import LLM

    try:
        LLM(model, tensor_parallel_size=2)
    except ValueError as error:
        assert "needs Linux or macOS" in str(error)
    else:
        raise AssertionError("Windows has no ranks")


def main(system: str, model: str, folder: Path) -> None:
    num_modules = import_all()
    token_ids = generate(model)
    answer_batch(model, folder)
    wait_for_lock(folder)
    grade_solution()
    if system == "win32":
        refuse_ranks(model)
    serve_one(model)
    print(json.dumps({"num_modules": num_modules, "token_ids": token_ids}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
