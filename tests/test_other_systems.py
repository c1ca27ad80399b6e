"""Windows and macOS as far as they can be had here: what they lack is hidden, and the engine works all the same."""

import ast
import json
import os
from pathlib import Path

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.files import system

ROOT = Path(__file__).parents[1]


@pytest.mark.ci
@pytest.mark.parametrize("name", ["win32", "darwin"])
def test_the_engine_works_without_what_the_system_lacks(checkpoint, processes, tmp_path, name):
    model = str(checkpoint())
    # For the processes that this one starts.
    (tmp_path / "sitecustomize.py").write_text(f"from tests.pretend import pretend\npretend({name!r})\n", "utf-8")
    path = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "examples")))
    env = os.environ | {"PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    tools = tmp_path / "xcode-select"  # every Mac has it; it says that there are Apple's developer tools
    tools.write_text("#!/bin/sh\n", "utf-8")
    tools.chmod(0o755)
    env["PATH"] = f"{tmp_path}{os.pathsep}{env['PATH']}"
    code, out, err = processes.run("-m", "tests.other_systems", name, model, str(tmp_path), env=env, cwd=ROOT)
    assert code == 0, f"{out}\n{err}"
    params = SamplingParams(temperature=0, max_tokens=6)
    expected = LLM(model, max_model_len=64).generate(["the quick", "one two three"], params)
    found = json.loads(out.splitlines()[-1])
    assert found["token_ids"] == [output.outputs[0].token_ids for output in expected]
    assert found["num_modules"] > 200
    suffix = {"win32": ".dll", "darwin": ".so"}[name]
    assert {path.suffix for path in (tmp_path / "cache/nanovllm/kernels").iterdir()} == {suffix, ".sha256"}


def test_memory_and_locks_where_it_is_known(tmp_path):
    assert 0 < system.available_bytes() <= system.installed_bytes() < 1 << 50
    assert 1 << 20 < system.peak_memory_bytes() < 1 << 50
    with open(tmp_path / "file", "wb") as first, open(tmp_path / "file", "wb") as second:
        system.lock_file(first.fileno())
        with pytest.raises(BlockingIOError):
            system.lock_file(second.fileno(), wait=False)
        first.close()
        system.lock_file(second.fileno(), wait=False)


@pytest.mark.parametrize("folder", ["nanovllm", "chapters", "examples"])
def test_texts_are_utf_8_whatever_the_system_prefers(folder):
    """Windows prefers another encoding: every file that is opened as text says which one it has."""
    bare = [
        f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and opens_text(node) and "utf-8" not in ast.unparse(node)
    ]
    assert not bare


OPEN_PICTURES = ("Image", "pil()", "opener")


def opens_text(call: ast.Call) -> bool:
    """open(...), path.open(...), path.read_text(...), path.write_text(...), without b in a mode."""
    is_method = isinstance(call.func, ast.Attribute)  # unparsing takes long, and is for the few that are named so
    name = call.func.attr if is_method else getattr(call.func, "id", "")
    if name == "open":
        owner = ast.unparse(call.func.value) if is_method else ""
        if owner in ("os", "tarfile", "self", "Adapter", *OPEN_PICTURES):
            return False
        modes = [arg.value for arg in call.args[:2] if isinstance(arg, ast.Constant)]
        return not any(mode in ("rb", "wb", "ab", "r+b") for mode in modes)
    return name in ("read_text", "write_text")
