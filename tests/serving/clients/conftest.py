"""A server of the demo model for programs that people have, and what the model gets to read because of them."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from tests.servers import Running, serving

QUIET = {  # no program asks anything of the network or tells anybody anything
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "LOGFIRE_SEND_TO_LOGFIRE": "false",
    "AI_SDK_LOG_WARNINGS": "false",
}
ENGINE = dict(
    quantization="int8", block_size=16, num_gpu_blocks_override=512, max_model_len=2048, max_num_batched_tokens=512
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
WEATHER = "Rain, 7 degrees."  # in Oslo; what the tool says


def needs(package: str, extra: str = "clients") -> Callable[[Callable], Callable]:
    """A test that imports it: for CI, and skipped before there is a server."""
    missing = pytest.mark.skipif(find_spec(package) is None, reason=f'needs {package}: pip install -e ".[{extra}]"')
    return lambda test: pytest.mark.ci(missing(test))


@pytest.fixture(scope="module")
def server(demo_checkpoint) -> Iterator[Running]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        with serving(demo_checkpoint, names=("demo",), **ENGINE) as running:
            yield running


@pytest.fixture
def prompts(server, monkeypatch) -> list[str]:
    """The prompts of chats, as the model reads them."""
    made, chat_prompt = [], server.llm.llm.chat_prompt

    def recorded(*args, **options) -> dict:
        prompt = chat_prompt(*args, **options)
        made.append(prompt["prompt"])
        return prompt

    monkeypatch.setattr(server.llm.llm, "chat_prompt", recorded)
    return made


@pytest.fixture
def weather_is_told(prompts):
    """weather_is_told(answer): the tool was called once, and the model has read what it said before it answered.

    times: so many conversations were held since the test began or this was last asked.
    """

    def check(answer: str, times: int = 1) -> None:
        assert [prompt.count(CALL) for prompt in prompts[: 2 * times]] == [0, 1] * times
        for prompt in prompts[1 : 2 * times : 2]:
            assert WEATHER in prompt.split(CALL)[1]
        assert answer.strip()
        prompts.clear()

    return check
