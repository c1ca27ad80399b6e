"""Fields of messages, calls and tools that the model is not shown, as a warning names them.

A chat template may read any field, so none is left out before. What it reads is looked up: a message's fields in the
text of the template; those of a call or a tool in the prompt, too, for these are mostly shown as they are.
"""

import re
from collections.abc import Iterator
from typing import Any

OF_MESSAGES = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal"}
OF_CALLS, OF_CALLED = {"type", "id", "index", "function"}, {"name", "arguments"}
OF_TOOLS, OF_FUNCTIONS = {"type", "function"}, {"name", "description", "parameters", "strict"}
MAX_CHARS = 40  # of a name in a warning


def unread_fields(messages: list[dict[str, Any]], tools: list[dict[str, Any]], template: str, prompt: str) -> list[str]:
    """messages, tools: checked. Fields without a value say nothing."""
    unknown = [
        (path, name, known is OF_MESSAGES)
        for path, given, known in _objects(messages, tools)
        for name in sorted(given.keys() - known)
        if given[name]
    ]
    if not unknown:
        return []
    in_template = set(re.findall(r"\w+", template))
    in_both = in_template.union(re.findall(r"\w+", prompt))
    found = []
    for path, name, is_of_message in unknown:
        if not set(re.findall(r"\w+", name)) <= (in_template if is_of_message else in_both):
            found.append(f"{path}: {name[:MAX_CHARS]!a}")
    return found


def _objects(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> Iterator[tuple[str, dict[str, Any], set[str]]]:
    """Where each is, itself, and the names that are known in it."""
    for place, message in enumerate(messages):
        yield f"messages[{place}]", message, OF_MESSAGES
        for number, call in enumerate(message.get("tool_calls") or ()):
            yield f"messages[{place}].tool_calls[{number}]", call, OF_CALLS
            yield f"messages[{place}].tool_calls[{number}].function", call["function"], OF_CALLED
    for place, tool in enumerate(tools):
        yield f"tools[{place}]", tool, OF_TOOLS
        yield f"tools[{place}].function", tool["function"], OF_FUNCTIONS
