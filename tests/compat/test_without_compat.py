"""compat/ can be deleted: the engine generates, and its errors are as plain as before."""

import os
import shutil
from pathlib import Path

import pytest

import nanovllm
from nanovllm import LLM, SamplingParams

PROGRAM = """
import sys
# An editable installation finds the folder where it was.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in finder.__module__]
from nanovllm import LLM, SamplingParams
from nanovllm.tools.cli import main

def shown(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"

llm = LLM(sys.argv[1])
[output] = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
print(output.outputs[0].token_ids)
print(shown(lambda: LLM(sys.argv[1], max_model_length=5)))
print(shown(lambda: LLM(sys.argv[1], swap_space=4)))
print(shown(lambda: SamplingParams(best_of=1)))
print(shown(lambda: setattr(SamplingParams(), "temprature", 1)))
print(shown(lambda: llm.generate([[5]], max_tokens=5)))
print(shown(lambda: llm.sleep))
print(shown(lambda: llm.engine.sleep))
print(shown(lambda: __import__("nanovllm.engine.arg_utils")))
print(shown(lambda: exec("from nanovllm import EngineArgs")))
print(shown(lambda: exec("from nanovllm.config import PoolerConfig")))
print(main(["generate", "--model", sys.argv[1], "--max-tokens", "2", "two gulls"]))
"""


@pytest.fixture
def copy(tmp_path):
    """A folder with the package, without compat/."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(nanovllm.__file__).parent, tmp_path / "nanovllm", ignore=ignored)
    shutil.rmtree(tmp_path / "nanovllm" / "compat")
    return tmp_path


@pytest.mark.nightly  # tests/test_wings.py asks most of it by day, where other folders are gone, too
def test_without_compat(copy, checkpoint, processes):
    folder = str(checkpoint())
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [expected] = LLM(folder).generate([[5, 6, 7]], params)
    environment = os.environ | {"PYTHONPATH": str(copy)}
    code, out, err = processes.run("-c", PROGRAM, folder, cwd=copy, env=environment)
    assert code == 0, err
    page = "examples/move_to_vllm.md lists what it takes"
    assert out.splitlines()[:10] == [
        str(expected.outputs[0].token_ids),
        f"ValueError: LLM has no argument 'max_model_length' (found 5); did you mean 'max_model_len'? {page}",
        f"ValueError: LLM has no argument 'swap_space' (found 4). {page}",
        f"ValueError: SamplingParams has no argument 'best_of' (found 1). {page}",
        f"ValueError: SamplingParams has no argument 'temprature' (found 1); did you mean 'temperature'? {page}",
        f"ValueError: generate has no argument 'max_tokens' (found 5). {page}",
        "AttributeError: 'LLM' object has no attribute 'sleep'",
        "AttributeError: 'LLMEngine' object has no attribute 'sleep'",
        "ModuleNotFoundError: No module named 'nanovllm.engine.arg_utils'; 'nanovllm.engine' is not a package",
        "MissingWing: this needs nanovllm/compat/, which is not there"
        ": put that folder back, or leave out what asks for it",
    ]
    assert out.splitlines()[10].startswith("ImportError: cannot import name 'PoolerConfig' from 'nanovllm.config'")
    assert out.splitlines()[-1] == "0", "the command works, too"
