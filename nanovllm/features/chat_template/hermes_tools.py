"""Tools for a chat template that knows none: described in a message, the way Hermes' models were taught.

Such a model was not trained to call. A grammar can make it (tool_choice "required"), and then it has to have read what
there is to call, and what was answered: a template that leaves tools out would hide both. Qwen's templates, among many,
have the same words in them (NousResearch/Hermes-Function-Calling).
"""

import json
from typing import Any

from nanovllm.features.chat_template.messages import Message, arguments_as_object, text_of, with_text_before

ABOUT = (
    "You may call one or more functions to help with the user's request.\n\n"
    "The functions and their signatures are within <tools></tools> tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each call, write a JSON object with the function's name and arguments within <tool_call></tool_call> tags:\n"
    '<tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'
)


def with_calls_as_text(messages: list[Message], results: bool = True) -> list[Message]:
    """Checked messages in which calls, and with `results` what the tools have answered, are text."""
    shown: list[Message] = []
    follows_answer = False
    for index, message in enumerate(messages):
        if results and message["role"] == "tool":
            answer = f"<tool_response>\n{text_of(message['content'])}\n</tool_response>"
            if follows_answer:  # of calls that were made together
                shown[-1]["content"] += f"\n{answer}"
            else:
                shown.append({"role": "user", "content": answer, "index": message["index"]})
            follows_answer = True
            continue
        follows_answer = False
        if called := message.get("tool_calls"):
            texts = [f"<tool_call>\n{_json(_called(call, index))}\n</tool_call>" for call in called]
            words = text_of(message["content"])
            message = message | {"content": "\n".join([words] * bool(words) + texts)}
            del message["tool_calls"]
        shown.append(message)
    return shown


def with_description(messages: list[Message], tools: list[dict[str, Any]], role: str) -> list[Message]:
    """Checked messages that describe the tools.

    role: "system", or "user" for a template that shows no system message: the first message of that role does it.
    """
    about = ABOUT.format(tools="\n".join(map(_json, tools)))
    if role == "system":
        has_system = messages[0]["role"] == "system"
        before = f"{text_of(messages[0]['content'])}\n\n" if has_system else ""
        described = {"role": "system", "content": before + about, "index": 0 if has_system else None}
        return [described, *messages[has_system:]]
    first = next((place for place, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        return [{"role": "user", "content": about, "index": None}, *messages]
    question = messages[first]
    with_tools = question | {"content": with_text_before(question["content"], about)}
    return [*messages[:first], with_tools, *messages[first + 1 :]]


def _called(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call["function"]
    return {"name": function.get("name"), "arguments": arguments_as_object(function.get("arguments") or {}, index)}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
