"""Programs in Python that people have: each asks, streams, fills in a form, and is an agent with a tool.

The demo model calls no tool by itself; tool_choice "required" makes it, in the way that each library says it. "auto"
follows, which is what each says by itself.
"""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.marks import by_night
from tests.serving.clients.conftest import needs
from tests.serving.clients.weather import BRIEF, QUESTION, USER, Report, weather

ONE_CALL: dict[str, Any] = dict(parallel_tool_calls=False)


SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"name": "weather", "description": weather.__doc__, "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}


def called(message: Any) -> list[dict[str, Any]]:
    """What a client adds to a conversation: the message that calls, and the tool's answer."""
    [call] = message.tool_calls
    answer = weather(**json.loads(call.function.arguments))
    return [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": answer}]


# -- openai ------------------------------------------------------------------------------------------------------------


@pytest.mark.ci  # tests/serving/http has most of this by day, of a small model
def test_openai_chat(server, weather_is_told):
    create = server.client().chat.completions.create
    given: dict[str, Any] = dict(model="demo", tools=[TOOL], **ONE_CALL, **BRIEF)
    message = create(messages=USER, tool_choice="required", **given).choices[0].message
    messages = USER + called(message)
    whole = create(messages=messages, **given).choices[0].message.content
    weather_is_told(whole)
    *chunks, last = create(messages=messages, stream=True, stream_options={"include_usage": True}, **given)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    assert last.usage.completion_tokens >= len(chunks) - 2 > 5


@pytest.mark.ci
def test_openai_completions(server):
    given: dict[str, Any] = dict(model="demo", prompt="The capital of France is", **BRIEF)
    create = server.client().completions.create
    whole = create(**given).choices[0].text
    assert "Paris" in whole and "".join(chunk.choices[0].text for chunk in create(stream=True, **given)) == whole


@pytest.mark.ci
def test_openai_forms(server):
    """Its helpers: a class is the form of an answer or of a call; a stream has events."""
    client, tool = server.client().chat.completions, openai.pydantic_function_tool(Report)
    report = client.parse(model="demo", messages=USER, response_format=Report, **BRIEF).choices[0].message.parsed
    assert report.city == "Oslo"
    given: dict[str, Any] = dict(tools=[tool], tool_choice="required", **ONE_CALL)
    with client.stream(model="demo", messages=USER, **given, **BRIEF) as stream:
        types = [event.type for event in stream]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.parsed_arguments.city == "Oslo"
    assert types.count("tool_calls.function.arguments.done") == 1 < types.count("tool_calls.function.arguments.delta")


@pytest.mark.ci
def test_openai_responses(server, weather_is_told):
    responses = server.client().responses
    given: dict[str, Any] = dict(model="demo", temperature=0, max_output_tokens=40)
    tools: dict[str, Any] = dict(tools=[{"type": "function", "strict": True} | FUNCTION], **ONE_CALL)
    first = responses.create(input=QUESTION, tool_choice="required", **tools, **given)
    [call] = [item for item in first.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": weather(**json.loads(call.arguments))}
    with responses.stream(input=[output], previous_response_id=first.id, **tools, **given) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        answer = stream.get_final_response().output_text
    weather_is_told(answer)
    assert "".join(deltas) == answer and len(deltas) > 5
    assert responses.parse(input=QUESTION, text_format=Report, **given).output_parsed.city == "Oslo"


# -- other people's --------------------------------------------------------------------------------------------------


@needs("litellm")
@pytest.mark.filterwarnings("ignore::UserWarning:pydantic")
def test_litellm(server, weather_is_told):
    import litellm

    given: dict[str, Any] = dict(model="hosted_vllm/demo", api_base=f"{server.url}/v1", api_key="none", **BRIEF)
    tools: dict[str, Any] = dict(tools=[TOOL], **ONE_CALL)
    message = litellm.completion(messages=USER, tool_choice="required", **tools, **given).choices[0].message
    messages = USER + called(message)
    whole = litellm.completion(messages=messages, **tools, **given).choices[0].message.content
    weather_is_told(whole)
    chunks = list(litellm.completion(messages=messages, stream=True, **tools, **given))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == whole and len(chunks) > 5
    form = litellm.completion(messages=USER, response_format=Report, **given)
    assert Report.model_validate_json(form.choices[0].message.content).city == "Oslo"


@needs("langchain_openai")
@needs("langchain")
@pytest.mark.parametrize("is_responses", [False, by_night(True)])
def test_langchain(server, weather_is_told, is_responses):
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model="demo", base_url=f"{server.url}/v1", api_key="none", use_responses_api=is_responses, **BRIEF
    )

    @wrap_model_call
    def calls_first(request, handler):
        choice = "required" if len(request.messages) == 1 else "auto"
        return handler(request.override(tool_choice=choice, model_settings=ONE_CALL))

    agent = create_agent(model, tools=[weather], middleware=[calls_first])
    answer = agent.invoke({"messages": USER})["messages"][-1].text
    weather_is_told(answer)
    streamed = [chunk.text for chunk, _ in agent.stream({"messages": USER}, stream_mode="messages")]
    weather_is_told(answer)
    assert "".join(streamed).endswith(answer) and len(streamed) > 10
    for method in ("json_schema", "function_calling"):
        assert model.with_structured_output(Report, method=method).invoke(QUESTION).city == "Oslo"


@needs("pydantic_ai")
@pytest.mark.parametrize("name", ["OpenAIChatModel", by_night("OpenAIResponsesModel")])
def test_pydantic_ai(server, weather_is_told, name):
    """An agent with a tool; forms as a call (which the library requires by itself) and as response_format."""
    import pydantic_ai as ai
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = getattr(models, name)("demo", provider=provider)

    class CallsFirst(AbstractCapability):
        def get_model_settings(self):
            return lambda context: {"tool_choice": "required" if context.run_step == 1 else "auto"}

    async def streamed() -> list[str]:
        async with agent.run_stream(QUESTION) as run:
            return [text async for text in run.stream_text(delta=True, debounce_by=None)]

    agent = ai.Agent(model, tools=[weather], model_settings=BRIEF | ONE_CALL, capabilities=[CallsFirst()])
    answer = agent.run_sync(QUESTION).output
    weather_is_told(answer)
    assert "".join(asyncio.run(streamed())) == answer
    weather_is_told(answer)
    for form in (ai.ToolOutput(Report), ai.NativeOutput(Report)):
        assert ai.Agent(model, output_type=form, model_settings=BRIEF).run_sync(QUESTION).output.city == "Oslo"


@needs("agents")
@pytest.mark.parametrize("name", ["OpenAIResponsesModel", by_night("OpenAIChatCompletionsModel")])
def test_openai_agents(server, weather_is_told, name):
    """The library asks for "auto" by itself, once a tool was called."""
    import agents

    async def run() -> tuple[str, str]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        settings = agents.ModelSettings(tool_choice="required", **ONE_CALL, **BRIEF)
        model, tools = getattr(agents, name)("demo", client), [agents.function_tool(weather)]
        agent = agents.Agent("Weather", model=model, tools=tools, model_settings=settings)
        streamed = agents.Runner.run_streamed(agent, QUESTION)
        num_events = len([event async for event in streamed.stream_events()])
        assert num_events > 10
        return (await agents.Runner.run(agent, QUESTION)).final_output, streamed.final_output

    whole, streamed = asyncio.run(run())
    weather_is_told(whole, times=2)
    assert whole == streamed
