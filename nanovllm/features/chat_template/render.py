"""A conversation as a prompt: one translation for chat(), batch jobs and whatever serves.

Messages may look as OpenAI's API allows; chat templates expect less. What happens between is vLLM's, so that the same
messages make the same prompt.
"""

import json
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from nanovllm.checks.confined import Confined, TooMuch
from nanovllm.checks.values import shorten
from nanovllm.features.chat_template.hermes_tools import with_tools_as_text
from nanovllm.files.tokenizer import tokenize

logger = logging.getLogger("nanovllm")

# Chat templates run there: they are programs of the checkpoint. An ordinary one takes a millisecond.
RENDERER = Confined(Path(__file__).with_name("confined_render.py"), seconds=2, max_mb=128, lanes=2)
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # type -> its key
KEPT = ("tool_calls", "tool_call_id", "name", "reasoning", "reasoning_content")


def render_chat(
    tokenizer: Any,
    messages: Any,
    add_generation_prompt: bool = True,
    *,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
    check: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """One conversation as a prompt, by a chat template. Raises ValueError if it does not take the messages.

    continue_final_message: the last message is open, the answer goes on with it; not with add_generation_prompt.
    chat_template: instead of the checkpoint's. chat_template_kwargs: what the template asks for by name, such as
    enable_thinking of Qwen3's. tools: functions that the model may call, as OpenAI's API describes them. check: of the
    text before it is tokenized.
    """
    template = chat_template or tokenizer.chat_template
    if not template:
        raise ValueError("this checkpoint has no chat template; give chat_template, or use generate() with a prompt")
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message goes on with the last message: it needs add_generation_prompt=False")
    if not isinstance(chat_template, str | None):
        raise ValueError(f"chat_template must be a template's text, found {shorten(chat_template)}")
    if not isinstance(chat_template_kwargs, dict | None):
        raise ValueError(f"chat_template_kwargs must be a dict, found {shorten(chat_template_kwargs)}")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"tools must be a list of dicts, found {shorten(tools)}")
    conversation = plain_messages(messages, knows_developer=bool(re.search("['\"]developer['\"]", str(template))))
    options = {
        **tokenizer.special_tokens_map,
        **(chat_template_kwargs or {}),
        "tools": tools or None,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
    }
    template, as_text = tokenizer.get_chat_template(chat_template, tools), ""
    has_tools = tools or any(message["role"] == "tool" or message.get("tool_calls") for message in conversation)
    if has_tools and not shows_tools(template):
        conversation = with_tools_as_text(conversation, tools)
        as_text = " (it shows no tools, so they are in the system message; a template that shows them would work)"
    try:
        text = RENDERER.ask(template, conversation, options)
    except TooMuch as error:
        raise ValueError(f"the chat template {error}") from None
    except ValueError as error:  # whatever the checkpoint's template raises
        raise ValueError(f"the chat template does not take these messages{as_text}: {error}") from error
    check(text)
    # The template has written the special tokens already.
    return {"prompt": text, "prompt_token_ids": tokenize(tokenizer, text, add_special_tokens=False)}


@lru_cache(maxsize=16)
def shows_tools(template: str) -> bool:
    """Does a template say anything of tools? What it makes of a short chat is another text then. Said once if not."""
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
    chat = [{"role": "user", "content": "x"}]
    try:
        with_tools, without = (RENDERER.ask(template, chat, {"tools": tools}) for tools in ([tool], None))
    except ValueError:  # it asks for more than this chat has
        return "tools" in template
    if with_tools == without:
        logger.warning(
            "this chat template shows no tools; they are described in the system message, the way Hermes' are"
        )
    return with_tools != without


def plain_messages(messages: Any, knows_developer: bool = False) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: content is text, the arguments of calls are dicts. Raises ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"a conversation is a list of messages, not empty; found {shorten(messages)}")
    plain = []
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            known = "a dict with strings 'role' and 'content'"
            raise ValueError(f"message {index} must be {known}, found {shorten(message)}")
        kept = {name: message[name] for name in KEPT if message.get(name) is not None}
        if not isinstance(kept.get("tool_calls", []), list):
            raise ValueError(f"message {index}: tool_calls must be a list, found {shorten(kept['tool_calls'])}")
        if message.get("tool_calls"):
            kept["tool_calls"] = [_plain_call(call, index) for call in message["tool_calls"]]
        else:
            kept.pop("tool_calls", None)
        if "reasoning" in kept:
            kept["reasoning_content"] = kept["reasoning"]
        plain.append({"role": message["role"], "content": _plain_content(message.get("content"), index), **kept})
    if not knows_developer and any(message["role"] == "developer" for message in plain):
        return _developer_as_system(plain)
    return plain


def _plain_content(content: Any, index: int) -> str:
    """A text, a list of texts and of parts with a text, or None. Raises ValueError for anything else."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, dict) and isinstance(part.get("type", "text"), str):
            part = part.get(TEXT_PARTS.get(part.get("type", "text"), ""), part)
        if not isinstance(part, str):
            known = "a string or a list of strings and of parts of type text (this engine reads no other)"
            raise ValueError(f"message {index}: content must be {known}, found {shorten(content)}")
        texts.append(part)
    return "\n".join(texts)


def _plain_call(call: Any, index: int) -> dict[str, Any]:
    """A tool call whose arguments are a dict. Broken ones become empty, as in vLLM: a model wrote them, no user."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        known = "of type 'function' with a 'function'"
        raise ValueError(f"message {index}: a tool call must be {known}, found {shorten(call)}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        logger.warning("message %d: the arguments of a tool call are not a JSON object; none are shown", index)
        arguments = {}
    return call | {"function": function | {"arguments": arguments}}


def _developer_as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that does not know the role: all system messages in one, at the beginning."""
    roles = ("system", "developer")
    texts = [message["content"] for message in messages if message["role"] in roles and message["content"]]
    others = [message for message in messages if message["role"] not in roles]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]
