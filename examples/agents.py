"""Agents of other libraries, each doing the same task in two steps against this server: find a train, then book it.

    pip install -e ".[clients,structured]"
    python examples/agents.py [MODEL]                    openai's SDK, LangChain and pydantic-ai; chats and responses
    python examples/agents.py [MODEL] --only openai      one of them
    python examples/agents.py [MODEL] --form qwen3_coder    calls as Qwen3-Coder writes them; hermes: as most models do

A model that fits a laptop cannot do such a task by itself, so a script tells it what to say: a logits processor, which
leaves one token at each step (chapter 8). Everything else is as with a large model: the tools are in the prompt, calls
are read from the answer while it is generated, and the library calls the functions and asks again with their results.
The arguments are nested, some are optional, and one is a text that looks like a number. Prints what each agent called
and answered.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from measuring import arguments, needs
from rich.console import Console
from rich.table import Table

from nanovllm import AsyncLLM
from nanovllm.features.logits_processors.classes import AdapterLogitsProcessor
from nanovllm.files.hub import resolve_checkpoint
from nanovllm.files.tokenizer import load_tokenizer
from nanovllm.tools.demo_model import model_or_demo

EXTRAS = '-e ".[clients,structured]"'
with needs(EXTRAS):
    from pydantic import BaseModel

    from nanovllm.serving.http.options import ServeOptions
    from nanovllm.serving.http.serve import Server, bind

for name in ("OPENAI_AGENTS_DISABLE_TRACING", "LITELLM_LOCAL_MODEL_COST_MAP"):  # nobody is told anything
    os.environ.setdefault(name, "True")
os.environ.setdefault("LANGSMITH_TRACING", "false")
os.environ.setdefault("LOGFIRE_SEND_TO_LOGFIRE", "false")

TASK = "Book a train from Oslo to Bergen for Ada and Bo."
FOUND, BOOKED, ANSWER = "Train 071 leaves at 8.", "Booking 42.", "It is booked: 42."


class Stop(BaseModel):
    city: str
    nights: int | None = None


class Trip(BaseModel):
    start: str
    stops: list[Stop]


class FindTrains(BaseModel):
    """Trains for a trip."""

    trip: Trip
    latest: str | None = None


class Book(BaseModel):
    """Book a train."""

    train: str
    passengers: list[str]
    seat: Literal["window", "aisle"] | None = None


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("find_trains", {"trip": {"start": "Oslo", "stops": [{"city": "Bergen\n(Å)", "nights": None}]}, "latest": "0830"}),
    ("book", {"train": "071", "passengers": ["Ada", "Bo"], "seat": None}),
]
called: list[tuple[str, dict[str, Any]]] = []  # by the agent that is at work


def find_trains(trip: Trip, latest: str | None = None) -> str:
    """Trains for a trip."""
    called.append(("find_trains", FindTrains(trip=trip, latest=latest).model_dump()))
    return FOUND


def book(train: str, passengers: list[str], seat: Literal["window", "aisle"] | None = None) -> str:
    """Book a train."""
    called.append(("book", Book(train=train, passengers=passengers, seat=seat).model_dump()))
    return BOOKED


# -- the model ---------------------------------------------------------------------------------------------------------


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    """Texts are written without quotes."""
    texts = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in arguments.items()
    }
    shown = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items())
    return f"<tool_call>\n<function={name}>\n{shown}</function>\n</tool_call>"


FORMS = {"hermes": hermes, "qwen3_coder": qwen3_coder}


def script(tokenizer: Any, form: str) -> type[AdapterLogitsProcessor]:
    """A class of logits processors that leaves only the next token of a text; the prompt says which text."""
    texts = [f"Let me see. {FORMS[form](*CALLS[0])}", FORMS[form](*CALLS[1]), ANSWER]
    scripts = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]

    class Script(AdapterLogitsProcessor):
        def is_argmax_invariant(self) -> bool:
            return False

        def new_req_logits_processor(self, params: Any) -> Callable[..., Any]:
            def keep_next(prompt: list[int], generated: list[int], row: Any) -> Any:
                seen = tokenizer.decode(prompt)
                token_ids = scripts[sum(result in seen for result in (FOUND, BOOKED))]
                token_id = token_ids[min(len(generated), len(token_ids) - 1)]
                kept = torch.full_like(row, -torch.inf)
                kept[token_id] = row[token_id]
                return kept

            return keep_next

    return Script


@contextmanager
def served(model: str, form: str) -> Iterator[str]:
    """The base URL of a server whose model says what the script has."""
    listener, options = bind("127.0.0.1", 0), ServeOptions(tool_call_parser=form)
    processors = [script(load_tokenizer(resolve_checkpoint(model)), form)]
    with listener, AsyncLLM(model, max_model_len=4096, max_num_seqs=4, logits_processors=processors) as llm:
        server = Server(llm, options, ("scripted",), listener)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise SystemExit("the server has not started")
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        server.end()
        thread.join()


# -- the agents --------------------------------------------------------------------------------------------------------


FUNCTIONS: dict[str, Callable[..., str]] = {"find_trains": find_trains, "book": book}


def run_function(name: str, arguments: str) -> str:
    given = (FindTrains if name == "find_trains" else Book).model_validate_json(arguments)
    return FUNCTIONS[name](**{name: getattr(given, name) for name in type(given).model_fields})


def openai_chat(url: str) -> str:
    """openai's SDK: a loop over streams of chats. The tools are strict."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    models: dict[str, type[BaseModel]] = {"find_trains": FindTrains, "book": Book}
    tools = [openai.pydantic_function_tool(model, name=name) for name, model in models.items()]
    messages: list[Any] = [{"role": "user", "content": TASK}]
    while True:
        with client.chat.completions.stream(model="scripted", messages=messages, tools=tools) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.to_dict())
        for call in message.tool_calls:
            content = run_function(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def openai_responses(url: str) -> str:
    """The same over responses, which the server keeps between the steps; with a tool that this server does not have."""
    import openai

    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    models: dict[str, type[BaseModel]] = {"find_trains": FindTrains, "book": Book}
    tools: list[Any] = [{"type": "web_search"}]
    for name, model in models.items():
        tools.append({"type": "function", "name": name, "parameters": model.model_json_schema(), "strict": False})
    given: Any = TASK
    before = None
    while True:
        answer = client.responses.create(model="scripted", input=given, tools=tools, previous_response_id=before)
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return answer.output_text
        before, given = answer.id, []
        for call in calls:
            output = run_function(call.name, call.arguments)
            given.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def langchain(url: str, is_responses: bool) -> str:
    """LangChain's agent, streamed."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    make_model: Any = ChatOpenAI  # whose types want a secret to be of a class of its own
    model = make_model(model="scripted", base_url=url, api_key="none", use_responses_api=is_responses)
    agent = create_agent(model, tools=[find_trains, book])
    texts: dict[str, str] = {}
    chunks: Any = agent.stream({"messages": [("user", TASK)]}, stream_mode="messages")
    for chunk, _ in chunks:
        if chunk.type == "AIMessageChunk":
            texts[chunk.id] = texts.get(chunk.id, "") + chunk.text
    return list(texts.values())[-1]


def pydantic_ai(url: str, name: str) -> str:
    """pydantic-ai's agent, which checks the arguments before it calls a function."""
    import pydantic_ai as ai
    from pydantic_ai.models import openai as models
    from pydantic_ai.providers.openai import OpenAIProvider

    model = getattr(models, name)("scripted", provider=OpenAIProvider(base_url=url, api_key="none"))
    return ai.Agent(model, tools=[find_trains, book]).run_sync(TASK).output


AGENTS: dict[str, Callable[[str], str]] = {
    "openai, chats": openai_chat,
    "openai, responses": openai_responses,
    "langchain, chats": lambda url: langchain(url, False),
    "langchain, responses": lambda url: langchain(url, True),
    "pydantic-ai, chats": lambda url: pydantic_ai(url, "OpenAIChatModel"),
    "pydantic-ai, responses": lambda url: pydantic_ai(url, "OpenAIResponsesModel"),
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", help="only agents whose names begin with this")
    parser.add_argument("--form", choices=FORMS, default="hermes", help="the form of the model's calls")
    args = parser.parse_args()
    agents = {name: agent for name, agent in AGENTS.items() if name.startswith(args.only)}
    if not agents:
        parser.error(f"--only {args.only}: the agents are {', '.join(AGENTS)}")
    table = Table("agent", "called", "with", "answered", show_lines=True)
    with needs(EXTRAS), served(model_or_demo(args.model), args.form) as url:
        for name, agent in agents.items():
            called.clear()
            answer = agent(url)
            if (called, answer) != (CALLS, ANSWER):
                raise SystemExit(f"{name} called {called} and answered {answer!r}")
            shown = [json.dumps(arguments, ensure_ascii=False) for _, arguments in called]
            table.add_row(name, "\n".join(function for function, _ in called), "\n".join(shown), answer)
    Console().print(table)


if __name__ == "__main__":
    main()
