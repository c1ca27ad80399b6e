"""Programs in Python that want openai 2: llama-index, instructor (test_python_clients.py has the others)."""

import asyncio
from typing import Any

import pytest

from tests.serving.clients.conftest import needs
from tests.serving.clients.weather import BRIEF, QUESTION, USER, Report, weather

EXTRA = "clients-of-openai-2"
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@needs("llama_index", EXTRA)
@pytest.mark.parametrize("streaming", [False, True])
def test_llama_index(server, weather_is_told, streaming):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    llm = OpenAILike(
        model="demo",
        api_base=f"{server.url}/v1",
        api_key="none",
        context_window=2048,
        is_chat_model=True,
        is_function_calling_model=True,
        **BRIEF,
    )
    agent = FunctionAgent(
        tools=[weather], llm=llm, initial_tool_choice="required", allow_parallel_tool_calls=False, streaming=streaming
    )

    async def run() -> str:
        return str(await agent.run(QUESTION))

    weather_is_told(asyncio.run(run()))
    assert llm.as_structured_llm(Report).complete(QUESTION).raw.city == "Oslo"
    assert "".join(piece.delta for piece in llm.stream_complete(QUESTION)) == llm.complete(QUESTION).text


@needs("instructor", EXTRA)
@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(server, mode):
    import instructor

    client = instructor.from_openai(server.client(), mode=instructor.Mode[mode]).chat.completions
    given: dict[str, Any] = dict(model="demo", messages=USER, response_model=Report, **BRIEF)
    assert client.create(max_retries=0, **given).city == "Oslo"
    if mode == "TOOLS":
        *parts, last = client.create_partial(**given)
        assert last.city == "Oslo" and any(part.city is None for part in parts)
