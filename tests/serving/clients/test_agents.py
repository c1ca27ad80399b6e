"""Agents that people have, with tools that a script lets the model call: examples/agents.py runs all of them."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.marks import by_night
from tests.serving.clients.conftest import needs

EXAMPLE = Path(__file__).parents[3] / "examples" / "agents.py"


@needs("langchain_openai")
@needs("langchain")
@needs("pydantic_ai")
@pytest.mark.parametrize("form", ["hermes", by_night("qwen3_coder")])
def test_two_steps(tmp_path, monkeypatch, capsys, form):
    model = make_checkpoint(tmp_path, "llama", max_position_embeddings=4096)
    monkeypatch.setattr(sys, "argv", ["agents.py", str(model), "--form", form])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.count("It is booked: 42.") == 6
