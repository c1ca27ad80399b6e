"""Programs in Python that people have: each asks, streams, and is an agent with a tool.

The demo model calls no tool by itself; tool_choice "required" makes it, in the way that each library says it.
"""

import asyncio
import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.serving.clients.conftest import WEATHER

QUESTION = "What is the weather in Oslo?"
USER = [{"role": "user", "content": QUESTION}]
BRIEF: dict[str, Any] = dict(temperature=0, max_tokens=40)
City = Literal["Oslo", "Rome"]


class Report(BaseModel):
    """How it is outside."""

    city: City
    is_wet: bool


def weather(city: City) -> str:
    """The weather in a city, now."""
    assert city == "Oslo"
    return WEATHER


SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": weather.__doc__, "parameters": SCHEMA}}


def imported(name: str) -> Any:
    return pytest.importorskip(name, reason=f'needs {name}: pip install -e ".[clients]"')


def called(message: Any) -> list[dict[str, Any]]:
    """What a client adds to a conversation: the message that calls, and the tool's answer."""
    [call] = message.tool_calls
    answer = weather(**json.loads(call.function.arguments))
    return [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": answer}]


def test_openai_chat(server, weather_is_told):
    create = server.client().chat.completions.create
    given: dict[str, Any] = dict(model="demo", tools=[TOOL], parallel_tool_calls=False, **BRIEF)
    message = create(messages=USER, tool_choice="required", **given).choices[0].message
    messages = USER + called(message)
    whole = create(messages=messages, **given).choices[0].message.content
    weather_is_told(whole)
    chunks = list(create(messages=messages, stream=True, stream_options={"include_usage": True}, **given))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == whole
    assert chunks[-1].usage.completion_tokens == len(chunks) - 2


def test_openai_completions(server):
    given: dict[str, Any] = dict(model="demo", prompt="The capital of France is", **BRIEF)
    create = server.client().completions.create
    whole = create(**given).choices[0].text
    assert "Paris" in whole and "".join(chunk.choices[0].text for chunk in create(stream=True, **given)) == whole


def test_openai_parse(server):
    """Its helpers: a pydantic model as the form of an answer, and as a tool; a stream with events."""
    client, pydantic_tool = server.client().chat.completions, imported("openai").pydantic_function_tool(Report)
    report = client.parse(model="demo", messages=USER, response_format=Report, **BRIEF).choices[0].message.parsed
    assert report.city == "Oslo"
    given: dict[str, Any] = dict(tools=[pydantic_tool], tool_choice="required", parallel_tool_calls=False)
    with client.stream(model="demo", messages=USER, **given, **BRIEF) as stream:
        types = [event.type for event in stream]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments.city == "Oslo"
    assert types.count("tool_calls.function.arguments.done") == 1 < types.count("tool_calls.function.arguments.delta")


def test_litellm(server, weather_is_told):
    litellm = imported("litellm")
    given: dict[str, Any] = dict(model="hosted_vllm/demo", api_base=f"{server.url}/v1", api_key="none", **BRIEF)
    message = litellm.completion(messages=USER, tools=[TOOL], tool_choice="required", **given).choices[0].message
    messages = USER + called(message)
    whole = litellm.completion(messages=messages, tools=[TOOL], **given).choices[0].message.content
    weather_is_told(whole)
    chunks = litellm.completion(messages=messages, tools=[TOOL], stream=True, **given)
    assert litellm.stream_chunk_builder(list(chunks)).choices[0].message.content == whole
    form = litellm.completion(messages=USER, response_format=Report, **given)
    assert Report.model_validate_json(form.choices[0].message.content).city == "Oslo"


def test_langchain(server, weather_is_told):
    agents, middleware = imported("langchain.agents"), imported("langchain.agents.middleware")
    model = imported("langchain_openai").ChatOpenAI(
        model="demo", base_url=f"{server.url}/v1", api_key="none", max_retries=0, **BRIEF
    )

    @middleware.wrap_model_call
    def calls_first(request, handler):
        return handler(request.override(tool_choice="required" if len(request.messages) == 1 else "auto"))

    agent = agents.create_agent(model, tools=[weather], middleware=[calls_first])
    weather_is_told(agent.invoke({"messages": USER})["messages"][-1].text)
    streamed = [chunk.text for chunk in model.stream(QUESTION)]
    assert "".join(streamed) == model.invoke(QUESTION).text and len(streamed) > 10
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(Report, method=method).invoke(QUESTION).city == "Oslo"


def test_pydantic_ai(server, weather_is_told):
    ai, models = imported("pydantic_ai"), imported("pydantic_ai.models.openai")
    provider = imported("pydantic_ai.providers.openai").OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = models.OpenAIChatModel("demo", provider=provider)
    agent = ai.Agent(model, tools=[weather], model_settings=BRIEF)
    weather_is_told(agent.run_sync(QUESTION).output)


def test_openai_agents(server, weather_is_told):
    """The library asks for "auto" by itself, once a tool was called."""
    agents, openai = imported("agents"), imported("openai")
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    agent = agents.Agent(
        "Weather",
        model=agents.OpenAIChatCompletionsModel("demo", client),
        tools=[agents.function_tool(weather)],
        model_settings=agents.ModelSettings(tool_choice="required", **BRIEF),
    )
    weather_is_told(asyncio.run(agents.Runner.run(agent, QUESTION)).final_output)
