"""Tools for a chat template that knows none: described in the system message, the way Hermes' models were taught.

Such a model was not trained to call. A grammar can make it (tool_choice "required"), and then it has to have read what
there is to call, and what was answered: a template that leaves tools out would hide both. Qwen's templates, among many,
have the same words in them (NousResearch/Hermes-Function-Calling).
"""

import json
from typing import Any

SYSTEM = (
    "You may call one or more functions to help with the user's request.\n\n"
    "The functions and their signatures are within <tools></tools> tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each call, write a JSON object with the function's name and arguments within <tool_call></tool_call> tags:\n"
    '<tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'
)


def with_tools_as_text(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """Messages (plain_messages) in which tools, calls and what the tools have answered are text."""
    shown: list[dict[str, Any]] = []
    for message in messages:
        role, text = message["role"], message["content"]
        if role == "tool":
            answer = f"<tool_response>\n{text}\n</tool_response>"
            if shown and shown[-1].get("is_answer"):  # of calls that were made together
                shown[-1]["content"] += f"\n{answer}"
            else:
                shown.append({"role": "user", "content": answer, "is_answer": True})
            continue
        calls = [f"<tool_call>\n{_json(_called(call))}\n</tool_call>" for call in message.get("tool_calls", ())]
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        shown.append(kept | {"content": "\n".join([text] * bool(text or not calls) + calls)})
    for message in shown:
        message.pop("is_answer", None)
    if not tools:
        return shown
    about = SYSTEM.format(tools="\n".join(map(_json, tools)))
    has_system = bool(shown) and shown[0]["role"] == "system"
    before = f"{shown[0]['content']}\n\n" if has_system else ""
    return [{"role": "system", "content": before + about}, *shown[has_system:]]


def _called(call: dict[str, Any]) -> dict[str, Any]:
    return {name: call["function"].get(name) for name in ("name", "arguments")}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
