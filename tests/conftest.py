from pathlib import Path

import pytest
from checkpoints import VARIANTS, make_checkpoint

from nanovllm import LLM
from nanovllm.tools.demo_model import DemoModelError, demo_model_path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(variant) -> directory; each is made once a session."""
    made: dict[str, Path] = {}

    def get(variant: str = "llama") -> Path:
        if variant not in made:
            made[variant] = make_checkpoint(tmp_path_factory.mktemp(variant), variant)
        return made[variant]

    return get


@pytest.fixture(scope="session", params=list(VARIANTS))
def every_checkpoint(request, checkpoint) -> Path:
    return checkpoint(request.param)


@pytest.fixture
def llm(checkpoint) -> LLM:
    """A tiny engine with a small pool; checked for integrity after the test."""
    llm = LLM(str(checkpoint()), block_size=4, num_gpu_blocks_override=160, max_model_len=256)
    yield llm
    llm.engine.scheduler.check_integrity()
    assert len(llm.engine.block_manager.free_blocks) == 160, "a block was not given back"


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    try:
        return demo_model_path()
    except DemoModelError as error:
        pytest.skip(f"no demo checkpoint: {error}")
