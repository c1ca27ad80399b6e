"""What a body of the responses API asks for, as a body of a chat: all else is done there."""

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from nanovllm.checks.names import known_names, neutral_options
from nanovllm.checks.values import check_choice, check_number, check_switch, check_text, shorten
from nanovllm.serving.openai.fields import INSIDE, Known, by_type, fields, without_unknown
from nanovllm.serving.openai.openai_request import EFFORTS, KNOWN_BY_URL
from nanovllm.serving.openai.responses.items import add_items, is_open, known_of_item, read_input, without_other_tools
from nanovllm.serving.openai.shown import CHAT
from nanovllm.serving.openai.tools import ON_SERVER, allowed, functions_of, is_other

WHAT = "body of a response"  # in errors, and in compat/neutral.py
READ_HERE = {
    *("input", "instructions", "previous_response_id", "store", "background", "metadata"),
    *("include", "max_output_tokens", "reasoning", "text", "tools", "tool_choice", "top_logprobs"),
}
RENAMED = {  # fields of a chat -> what a response calls them
    "messages": "input",
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), "max_output_tokens"),
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": 'include: ["message.output_text.logprobs"]',
}
NEUTRAL = neutral_options(WHAT).keys()
PASSED_ON = (neutral_options("body").keys() | KNOWN_BY_URL[CHAT]) - READ_HERE - RENAMED.keys() - NEUTRAL
KNOWN = READ_HERE | RENAMED.keys() | PASSED_ON
OF_FORMATS: dict[str, Known] = {
    "text": fields("type"),
    "json_object": fields("type", "schema"),
    "json_schema": fields("type", "name", "description", "schema", "strict"),
}
TYPES_OF_FORMATS = (*OF_FORMATS, "structural_tag")
OF_CHOICES: dict[str, Known] = {"function": fields("type", "name"), "allowed_tools": fields("type", "mode", "tools")}
OF_TOOLS: dict[str, Known] = {"function": fields("type", "name", "description", "parameters", "strict")}
INSIDE_HERE: dict[str, Known] = {
    "input": [known_of_item],
    "reasoning": fields("effort", "summary", "generate_summary"),
    "stream_options": INSIDE["stream_options"],
    "text": fields("verbosity", format=by_type(OF_FORMATS)),
    "tool_choice": by_type(OF_CHOICES),
    "tools": [by_type(OF_TOOLS)],
}
ECHOED = ("user", "safety_identifier", "prompt_cache_key")
# Of what nothing is left to say: the items that these are about never come, reasoning stands in content as it is.
INCLUDABLE = {
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url"),
}


@dataclass(frozen=True, slots=True)
class Kept:
    """Answers that are kept: the conversation up to one, by its id (raises if it is not there); items (read_input)."""

    conversation: Callable[[str], list[dict[str, Any]]]
    items: Callable[[str], dict[str, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """chat: the body of a chat. messages: its messages, without instructions: they are of one answer only. items: the
    input's, of which the last messages are made.

    echoed: what the answer repeats. unknown: fields left out, as a warning names them. goes_on: the last message is
    open, and the answer is more of it.
    """

    chat: dict[str, Any]
    messages: list[dict[str, Any]]
    items: list[dict[str, Any]]
    echoed: dict[str, Any]
    unknown: list[str]
    store: bool
    background: bool
    goes_on: bool


def translate(body: dict[str, Any], kept: Kept) -> Asked:
    """Raises ValueError for what cannot be honoured, and what `kept` raises for an answer that is not there."""
    body, unknown = without_unknown(body, KNOWN | NEUTRAL, INSIDE_HERE)
    if wrong := next((name for name in body if name in RENAMED), None):
        raise ValueError(f"{wrong} is a field of chats; here it is {RENAMED[wrong]}")
    if "conversation" in body:
        raise ValueError("conversation: there are none here; previous_response_id goes on with an answer that is kept")
    body = known_names(body, sorted(KNOWN), WHAT)
    store = check_switch("store", body.get("store", True))
    background = check_switch("background", body.get("background", False))
    if background and not store:
        raise ValueError("background can only be used when `store` is true")
    chat = {name: body[name] for name in PASSED_ON & body.keys()}
    chat |= _max_tokens(body) | _reasoning(body) | _response_format(body) | _logprobs(body, unknown)
    chat |= chat_tools(body)
    if chat.get("stream"):
        options = body.get("stream_options", {})
        chat["stream_options"] = options | {"include_usage": True} if isinstance(options, dict) else options
    items = read_input(body.get("input"), kept.items)
    response_id = body.get("previous_response_id")
    before = [] if response_id is None else kept.conversation(check_text("previous_response_id", response_id))
    messages = add_items(before, items)
    items, left_out = without_other_tools(items)
    unknown += left_out
    goes_on = is_open(items)
    if goes_on:
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    instructions = body.get("instructions")
    chat["messages"] = _instructed(check_text("instructions", instructions), messages) if instructions else messages
    return Asked(chat, messages, items, _echoed(body, store, background), unknown, store, background, goes_on)


def _instructed(instructions: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages that begin with these instructions. Many templates take one system message, and only as the first.

    One that is no text has images, and is refused as in any chat.
    """
    texts, rest = [instructions], list(messages)
    while rest and rest[0]["role"] in ("system", "developer") and isinstance(rest[0]["content"], str):
        texts.append(rest.pop(0)["content"])
    return [{"role": "system", "content": "\n\n".join(texts)}, *rest]


def _echoed(body: dict[str, Any], store: bool, background: bool) -> dict[str, Any]:
    metadata = body.get("metadata", {})
    texts = [*metadata.keys(), *metadata.values()] if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(f"metadata must be an object whose values are texts, found {shorten(metadata)}")
    text = body.get("text", {})
    return {
        "background": background,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": metadata,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None} | body.get("reasoning", {}),
        "service_tier": "default",
        "store": store,
        "text": text | {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_logprobs": body.get("top_logprobs", 0),
        "truncation": "disabled",
        **{name: body.get(name) for name in ECHOED},
    }


def _max_tokens(body: dict[str, Any]) -> dict[str, Any]:
    if "max_output_tokens" not in body:
        return {}
    return {"max_completion_tokens": check_number("max_output_tokens", body["max_output_tokens"], Integral, 1)}


def _reasoning(body: dict[str, Any]) -> dict[str, Any]:
    """A summary is always the whole: reasoning is shown as it is."""
    given = _object(body, "reasoning")
    if (effort := given.get("effort")) is not None:
        check_choice("reasoning.effort", effort, EFFORTS)
    return {} if effort is None else {"reasoning_effort": effort}


def _response_format(body: dict[str, Any]) -> dict[str, Any]:
    if (form := _object(body, "text").get("format")) is None:
        return {}
    if not isinstance(form, dict) or form.get("type") not in TYPES_OF_FORMATS:
        raise ValueError(f"text.format must be an object of type {', '.join(TYPES_OF_FORMATS)}, found {shorten(form)}")
    if form["type"] == "json_schema":
        holder = {name: value for name, value in form.items() if name != "type"}
        form = {"type": "json_schema", "json_schema": holder}
    return {"response_format": form}


def _logprobs(body: dict[str, Any], unknown: list[str]) -> dict[str, Any]:
    include, num = body.get("include", []), body.get("top_logprobs", 0)
    if not isinstance(include, list) or not all(isinstance(name, str) for name in include):
        raise ValueError(f"include must be a list of texts, found {shorten(include)}")
    unknown += [f"include: {name[:80]!a}" for name in include if name not in INCLUDABLE]
    check_number("top_logprobs", num, Integral, 0)
    return {"logprobs": True, "top_logprobs": num} if "message.output_text.logprobs" in include else {}


def _object(body: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(given := body.get(name, {}), dict):
        raise ValueError(f"{name} must be an object, found {shorten(given)}")
    return given


# -- tools, as a chat has them -----------------------------------------------------------------------------------------


def chat_tools(body: dict[str, Any]) -> dict[str, Any]:
    """A chat's tools and tool_choice, as far as the body has them; the chat leaves out what is no function.

    Raises ValueError.
    """
    given, choice = body.get("tools", []), body.get("tool_choice")
    if not isinstance(given, list):
        raise ValueError(f"tools must be a list, found {shorten(given)}")
    tools = [_nested(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = allowed(functions_of(tools), choice)
    elif isinstance(choice, dict):
        if choice.get("type") != "function":
            raise ValueError(f"tool_choice is {shorten(choice)}: {ON_SERVER}")
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return ({"tools": tools} if tools else {}) | ({"tool_choice": choice} if choice is not None else {})


def _nested(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise ValueError(f"{where} must be an object with a type, found {shorten(tool)}")
    if is_other(tool):
        return {"type": tool["type"]}
    if not isinstance(tool.get("name"), str):
        raise ValueError(f"{where} needs a string 'name' beside its type, found {shorten(tool)}")
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
