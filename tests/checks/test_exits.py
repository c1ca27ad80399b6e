"""A program that ends while our threads compute ends as it would without them."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.marks import by_night
from tests.processes import LIMIT_S

ENV = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}

# Computes for long enough outside of Python, so that the program ends meanwhile.
BEGIN = """
    import asyncio, sys, threading
    import torch
    from nanovllm import LLM, SamplingParams
    from nanovllm.serving.async_llm import AsyncLLM

    began, matrix = threading.Event(), torch.ones(1500, 1500)

    def compute(*given, then):
        began.set()
        for _ in range(4):
            matrix @ matrix
        return then(*given)

    def slow(owner, name):
        then = getattr(owner, name)
        setattr(owner, name, lambda *given: compute(*given, then=then))

    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    options = dict(max_model_len=256, num_gpu_blocks_override=40)
"""
PROGRAMS = {
    "asyncio": """
        llm = AsyncLLM(sys.argv[1], **options)
        slow(llm.engine.model_runner, "run")

        async def ask():
            async for output in llm.generate([5, 6, 7], params):
                pass

        threading.Thread(target=lambda: asyncio.run(ask()), daemon=True).start()
    """,
    "a thread of the caller's": """
        llm = LLM(sys.argv[1], **options)
        slow(llm.engine.model_runner, "run")
        threading.Thread(target=lambda: llm.generate([[5, 6, 7]], params), daemon=True).start()
    """,
    "a request that is prepared": """
        llm = AsyncLLM(sys.argv[1], **options)

        async def ask():
            await llm.prepare(lambda: compute(then=lambda: None))

        threading.Thread(target=lambda: asyncio.run(ask()), daemon=True).start()
    """,
}


@pytest.mark.compiler
@pytest.mark.parametrize("name", [name if name == "asyncio" else by_night(name) for name in PROGRAMS])
def test_a_program_that_ends_in_the_middle_of_a_step(checkpoint, tmp_path, name):
    program = tmp_path / "program.py"
    end = "\nbegan.wait()\nprint('the end')\n"
    program.write_text(textwrap.dedent(BEGIN) + textwrap.dedent(PROGRAMS[name]) + end)
    command = [sys.executable, str(program), str(checkpoint())]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the end\n", "")
