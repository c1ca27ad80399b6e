"""A conversation as a prompt: one translation for chat(), batch jobs and whatever serves.

Messages may look as OpenAI's API allows; chat templates expect less, and each its own. What a template reads is found
out by rendering (reads.py), and what it has left out, too (twin.py): then the conversation is refused.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from nanovllm.checks.values import check_choice, check_switch, shorten
from nanovllm.features.chat_template.hermes_tools import with_calls_as_text, with_description
from nanovllm.features.chat_template.messages import (
    FORMATS_OF_CONTENT,
    PARTS,
    STRING,
    Message,
    checked_messages,
    developer_as_system,
    fitting_call,
    fitting_content,
    one_call_at_a_time,
    take_images,
)
from nanovllm.features.chat_template.reads import Reads, reads_of
from nanovllm.features.chat_template.renderer import render
from nanovllm.features.chat_template.twin import CALL, TOOL, WORDS, twin_of
from nanovllm.prompts import tokenize

logger = logging.getLogger("nanovllm")

# Arguments of transformers' apply_chat_template() that no template reads -> what render_chat() does; None: nothing.
FIXED = dict.fromkeys(("messages", "conversations", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"))
FIXED |= {"tokenize": True, "padding": False, "truncation": False, "return_assistant_tokens_mask": False}
FORMS = {"string": frozenset([STRING]), "openai": frozenset([PARTS])}  # vLLM's names
# What is told otherwise than it came -> what is said of it, in the log and in an error.
TOLD = {
    "in turn": "it shows one call of a message, so calls that were made together follow one another",
    "calls": "it does not show all calls and their results, so those of this chat are text, the way Hermes' are",
    "system": "it shows no tools, so they are described in the system message, the way Hermes' are; "
    "a template that shows them would work better",
    "user": "it shows neither tools nor system messages, so the tools are described in the first user message, the way "
    "Hermes' are; a template that shows them would work better",
}
LEAVES_TOOLS_OUT = "the chat template leaves the tools out of the prompt; a template that shows them would work"


class ChatPrompt(dict[str, Any]):
    """A prompt's dict.

    template: what it was made with. begun: the part of the prompt that belongs to the answer's message, such as
    "<think>".
    """

    template: str = ""
    begun: str = ""


class LeftOut(ValueError):
    """The template does not show all of the conversation."""


def render_chat(
    tokenizer: Any,
    messages: Any,
    add_generation_prompt: bool = True,
    *,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    chat_template_content_format: str = "auto",
    tools: list[dict[str, Any]] | None = None,
    check: Callable[[str], None] = lambda text: None,
    keep_images: Callable[[list[Any]], Sequence[Any]] | None = None,
    image_token: str | None = None,
) -> ChatPrompt:
    """One conversation as a prompt, by a chat template.

    continue_final_message: the last message is open, the answer goes on with it; not with add_generation_prompt.
    chat_template: instead of the checkpoint's, or the name of one of its templates. Without it, a template named
    "tool_use" is taken for tools, and otherwise the one named "default". chat_template_kwargs: what the template asks
    for by name, such as enable_thinking of Qwen3's; of what is no template's, only what is done anyway.
    chat_template_content_format: "string" hands all contents over as texts, "openai" as lists of parts; "auto": as the
    template reads them. tools: functions that the model may call, as OpenAI's API describes them. check: of the text
    before it is tokenized. keep_images: makes the prompt's multi_modal_data of what the messages name as images; None:
    the model sees none. image_token: what the template writes for an image. Where a message or a tool has it as text,
    it is text in the prompt, too: some tokens that spell it.

    Raises ValueError if the template does not take the messages, or leaves something of them out of the prompt.
    """
    if not (chat_template or tokenizer.chat_template):
        raise ValueError("this checkpoint has no chat template; give chat_template, or use generate() with a prompt")
    check_switch("continue_final_message", continue_final_message)
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message goes on with the last message: it needs add_generation_prompt=False")
    if not isinstance(chat_template, str | None):
        raise ValueError(f"chat_template must be a template's text, found {shorten(chat_template)}")
    if not isinstance(chat_template_kwargs, dict | None):
        raise ValueError(f"chat_template_kwargs must be a dict, found {shorten(chat_template_kwargs)}")
    prompting = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
    own = FIXED | prompting | {"chat_template": chat_template, "tools": tools}
    given = chat_template_kwargs or {}
    for name, value in given.items():
        if name in own and value is not None and value != own[name]:
            raise ValueError(
                f"chat_template_kwargs cannot set {name}; where a request has an option of that name, use it"
            )
    kwargs = {name: value for name, value in given.items() if name not in own}
    check_choice("chat_template_content_format", chat_template_content_format, FORMATS_OF_CONTENT)
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError(f"tools must be a list of dicts, found {shorten(tools)}")
    checked = checked_messages(messages)
    images: Sequence[Any] = ()
    if sources := take_images(checked):
        if keep_images is None:
            raise ValueError("this model sees no images, and the messages have some")
        images = keep_images(sources)
    if continue_final_message and checked[-1]["content"] is None:
        checked[-1]["content"] = ""  # transformers goes on with no other
    template = tokenizer.get_chat_template(chat_template, tools)
    special = tokenizer.special_tokens_map
    stand_in = ""  # for the image token where it is text: the template's own are all that it finds in the prompt
    if image_token is not None:
        stand_in = f"qz{secrets.token_hex(4)}zq"
        checked = _replaced(checked, image_token, stand_in)
        tools = _replaced(tools, image_token, stand_in)
        kwargs = _replaced(kwargs, image_token, stand_in)
    options = {**special, **kwargs, **prompting}
    reads = reads_of(template, special, kwargs)
    attempts = _attempts(checked, tools or None, reads, chat_template_content_format)
    text, begun = _first_that_fits(template, attempts, options, check)
    parts = [text]
    if image_token is not None:
        parts = _parts_around_texts(text, image_token, stand_in)
        begun = begun.replace(stand_in, image_token)
    # The template has written the special tokens already.
    token_ids = [token_id for part in parts for token_id in tokenize(tokenizer, part, add_special_tokens=False)]
    prompt = ChatPrompt(prompt="".join(parts), prompt_token_ids=token_ids)
    prompt.template = template
    prompt.begun = begun
    if images:
        prompt["multi_modal_data"] = {"image": images}
    return prompt


def _replaced(value: Any, old: str, new: str) -> Any:
    """In all texts of a message or a tool."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, list):
        return [_replaced(item, old, new) for item in value]
    if isinstance(value, dict):
        return {_replaced(key, old, new): _replaced(item, old, new) for key, item in value.items()}
    return value


def _parts_around_texts(text: str, image_token: str, stand_in: str) -> list[str]:
    """A prompt's text in parts, to be tokenized one by one: each stand-in has become two halves of the image token.

    So tokens spell it, and the tokenizer, which looks for special tokens before all else, does not find it.
    """
    middle = len(image_token) // 2
    parts = [""]
    for index, plain in enumerate(text.split(stand_in)):
        if index:
            parts[-1] += image_token[:middle]
            parts.append(image_token[middle:])
        parts[-1] += plain
    return parts


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A conversation as the template gets it. indices: of the messages that it was made of; None: of the tools alone.

    tools: for the template. told: what is told otherwise than it came (a key of TOLD), or "".
    """

    conversation: list[Message]
    indices: list[int | None]
    tools: list[dict[str, Any]] | None
    told: str


_Way = tuple[list[Message], list[dict[str, Any]] | None, str]  # see _ways_to_tell_tools()


def _attempts(
    messages: list[Message], tools: list[dict[str, Any]] | None, reads: Reads, content_format: str
) -> Iterator[_Attempt]:
    """The best first: what the template reads, as far as that could be found out."""
    told = [message | {"index": index} for index, message in enumerate(messages)]
    if not reads.developer and any(message["role"] == "developer" for message in told):
        told = developer_as_system(told)
    ways: Iterable[_Way] = _ways_to_tell_tools(told, tools, reads)
    for name in (content_format,) if content_format != "auto" else FORMATS_OF_CONTENT:
        made = list[_Way]()
        for conversation, shown_tools, how in ways:
            made.append((conversation, shown_tools, how))
            fitted = [_fitted(message, reads, name) for message in conversation]
            yield _Attempt(fitted, [message["index"] for message in conversation], shown_tools, how)
        ways = made


def _ways_to_tell_tools(messages: list[Message], tools: list[dict[str, Any]] | None, reads: Reads) -> Iterator[_Way]:
    """(messages, tools for the template, what is told otherwise than it came: a key of TOLD, or "").

    Each is made when the ones before it did not do: making it may log what it cannot show.
    """
    calls = any(message.get("tool_calls") for message in messages)
    results = any(message["role"] == "tool" for message in messages)
    is_unknown = not reads.content  # nothing could be found out
    if not (tools or calls or results):
        yield messages, tools, ""
        return
    if is_unknown:
        yield messages, tools, ""
    elif reads.tools or (reads.calls and not tools):
        if (reads.calls or not calls) and (reads.results or not results):
            yield messages, tools, ""
            if any(len(message.get("tool_calls", [])) > 1 for message in messages):
                yield one_call_at_a_time(messages), tools, "in turn"
        yield with_calls_as_text(messages, results=not reads.results), tools, "calls"
    role = "system" if reads.content.get("system") or is_unknown else "user"
    texts = with_calls_as_text(messages)
    yield (with_description(texts, tools, role) if tools else texts), None, role


def _fitted(message: Message, reads: Reads, content_format: str) -> Message:
    """A checked message in the form in which the template gets it."""
    role, content, calls = message["role"], message["content"], message.get("tool_calls", [])
    forms = FORMS.get(content_format) or reads.forms(role)
    if content is not None or role != "assistant" or bool(calls) not in reads.none:
        content = fitting_content(content, forms)
    fitted = {name: value for name, value in message.items() if name != "index"} | {"content": content}
    if calls:
        fitted["tool_calls"] = [fitting_call(call, reads.arguments, message["index"]) for call in calls]
    return fitted


def _first_that_fits(
    template: str, attempts: Iterator[_Attempt], options: dict[str, Any], check: Callable[[str], None]
) -> tuple[str, str]:
    """The prompt, and its part that belongs to the answer's message. ValueError: what is wrong with the first.

    After an error of the template's own, only calls in turn are tried: some raise one for several calls of a message.
    """
    problem: ValueError | None = None
    for attempt in attempts:
        if problem is not None and not isinstance(problem, LeftOut) and attempt.told != "in turn":
            continue
        try:
            return _rendered(template, attempt, options, check)
        except ValueError as error:
            if problem is not None and str(problem) == LEAVES_TOOLS_OUT:  # and this is what became of them as text
                problem = LeftOut(f"{problem}. {error}")
            problem = problem or error
    assert problem is not None
    raise problem


def _rendered(
    template: str, attempt: _Attempt, options: dict[str, Any], check: Callable[[str], None]
) -> tuple[str, str]:
    twin = twin_of(attempt.conversation, attempt.tools)
    given = options | {"tools": attempt.tools}
    try:
        text = render(template, attempt.conversation, given)
    except ValueError as error:  # whatever the checkpoint's template raises
        about = f" ({TOLD[attempt.told]})" if attempt.told else ""
        raise ValueError(f"the chat template does not take these messages{about}: {error}") from error
    check(text)
    twins_text = None
    with suppress(ValueError):
        twins_text = render(template, twin.messages, given | {"tools": twin.tools})
    for kind, index in twin.left_out(attempt.conversation, text, twins_text):
        if kind == WORDS:
            warn_once(
                template, "the chat template: it shows nothing of what an assistant's message says beside its calls"
            )
        else:
            raise LeftOut(_what_is_left_out(kind, index, attempt))
    if attempt.told:
        warn_once(template, f"the chat template: {TOLD[attempt.told]}")
    is_continued = options["continue_final_message"]
    if not options["add_generation_prompt"] and not is_continued:
        return text, ""
    return text, twin.begun(text if twins_text is None else twins_text, is_continued)


def _what_is_left_out(kind: str, index: int, attempt: _Attempt) -> str:
    place = None if kind == TOOL else attempt.indices[index]
    if place is None:
        return LEAVES_TOOLS_OUT
    role = attempt.conversation[index]["role"]
    what = "a call" if kind == CALL else "the text"
    remedy = "put it into the first user message" if role == "system" else "another template may show it"
    return f"message {place} (role {role}): the chat template leaves {what} out of the prompt, or changes it; {remedy}"


@lru_cache(maxsize=64)
def warn_once(template: str, text: str) -> None:
    """Log this once for each template."""
    logger.warning(text)
