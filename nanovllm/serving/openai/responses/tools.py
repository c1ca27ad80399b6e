"""Tools as the responses API describes them -> as a chat does."""

from typing import Any

from nanovllm.checks.values import shorten
from nanovllm.serving.openai.tools import functions_of, is_other

ON_SERVER = "tools that run on a server, or take free text, are not here; tools of type function are"


def chat_tools(body: dict[str, Any]) -> dict[str, Any]:
    """A chat's tools and tool_choice, as far as the body has them; the chat leaves out what is no function.

    Raises ValueError.
    """
    given, choice = body.get("tools", []), body.get("tool_choice")
    if not isinstance(given, list):
        raise ValueError(f"tools must be a list, found {shorten(given)}")
    tools = [_nested(tool, f"tools[{index}]") for index, tool in enumerate(given)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        tools, choice = _allowed(tools, choice)
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
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _allowed(tools: list[dict[str, Any]], choice: dict[str, Any]) -> tuple[list[dict[str, Any]], Any]:
    """Those of the tools that may be called, and whether one has to be. The model is shown no others."""
    given, mode = choice.get("tools"), choice.get("mode", "auto")
    if not isinstance(given, list) or mode not in ("auto", "required"):
        raise ValueError(f"allowed_tools needs a list tools, and mode auto or required; found {shorten(choice)}")
    names = [tool.get("name") if isinstance(tool, dict) else tool for tool in given]
    tools = functions_of(tools)
    known = [tool["function"]["name"] for tool in tools]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"tool_choice allows {shorten(unknown[0])}, and tools has {', '.join(known) or 'none'}")
    return [tool for tool in tools if tool["function"]["name"] in names], mode
