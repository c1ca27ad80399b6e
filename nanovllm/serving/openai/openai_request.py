"""What a body of OpenAI's API asks for: one translation for batch jobs and for the server."""

from collections.abc import Iterable
from dataclasses import fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm import LLM, SamplingParams
from nanovllm.checks.names import known_names
from nanovllm.checks.values import check_number, check_switch, check_text, shorten
from nanovllm.features.chat_template.chat import OPTIONS as CHAT_OPTIONS
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.features.reasoning.think import Reasoning
from nanovllm.features.tool_calls.parse import MARKERS, format_of, schemas_of
from nanovllm.prompts import check_generates, tokenize
from nanovllm.request import Request
from nanovllm.serving.openai.reading import PLAIN, Parsers, Reading
from nanovllm.serving.openai.shown import CHAT, COMPLETIONS, SWITCHES, scoring
from nanovllm.serving.openai.tools import Tools, functions_of
from nanovllm.serving.openai.unread import unread_fields

if TYPE_CHECKING:
    from nanovllm.features.lora.adapter import Adapter

# Parameters handed on under their own names, and what else a body may hold.
READ_HERE = {"logprobs", "prompt_logprobs", "structured_outputs"}
NOT_OVER_HTTP = {"detokenize", "logits_processors", "extra_args", "output_kind"}
PASSED_ON = {f.name for f in fields(SamplingParams)} - READ_HERE - NOT_OVER_HTTP
KNOWN = {*PASSED_ON, *READ_HERE, *SWITCHES, "model", "cache_salt", "response_format", "priority"}
OF_CHATS = {"messages", "top_logprobs", "max_completion_tokens", "add_generation_prompt", "tool_choice"}
OF_CHATS |= {"parallel_tool_calls", "reasoning_effort", "include_reasoning"}
OPTIONS_OF_BODY = [name for name in CHAT_OPTIONS if name != "chat_template_content_format"]  # which is the server's
KNOWN_BY_URL = {CHAT: KNOWN | OF_CHATS | set(OPTIONS_OF_BODY), COMPLETIONS: KNOWN | {"prompt"}}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_SAMPLES = 1024  # of one request, which must not eat the memory of all
# How much a body may bring of what it may repeat. Words and ids are looked for at every token.
MAX_ENTRIES = dict.fromkeys(("stop", "bad_words"), 64) | dict.fromkeys(("stop_token_ids", "logit_bias"), 1024)
MAX_ENTRIES |= dict.fromkeys(("messages", "tools", "chat_template_kwargs"), 4096)
MAX_CHARS_OF_WORDS = 4096
MAX_LOGPROBS = 20  # OpenAI's and vLLM's limit
MAX_LOGPROBS_OF_LINE = 2_000_000  # some 400 MB of Python objects until the line is answered


class UnknownModel(ValueError):
    """The body names a model that is not the one that runs."""


class Translated(NamedTuple):
    """What a body asks for. model: its name in the answer. adapter: if that is one's. reading: how to read answers."""

    prompts: list[Any]
    params: SamplingParams
    model: str
    adapter: "Adapter | None"
    reading: Reading


class SampleFailed(RuntimeError):
    """A sample has ended with finish_reason "error" (outputs.py)."""


def translate(
    llm: LLM,
    url: str,
    body: dict[str, Any],
    served_names: tuple[str, ...],
    max_samples: int = MAX_SAMPLES,
    max_logprobs: int = MAX_LOGPROBS,
    parsers: Parsers = Parsers(),
) -> Translated:
    """max_samples: of all prompts together. max_logprobs: of one position; -1: of all words.

    Raises ValueError for what cannot be honoured.
    """
    body = known_names({k: v for k, v in body.items() if v is not None}, sorted(KNOWN_BY_URL[url]), "body")
    check_generates(llm.engine)
    model, adapter = model_of(llm, body, served_names)
    check_lengths(body, MAX_ENTRIES | {"allowed_token_ids": llm.engine.model_config.vocab_size})
    given = {name: body[name] for name in PASSED_ON & body.keys()}
    given["structured_outputs"] = _structured_outputs(body)
    if url == CHAT:
        # A chat answer ends where the model ends it, if nobody says otherwise.
        limit = llm.engine.model_config.generation.get("max_tokens")
        given["max_tokens"] = body.get("max_completion_tokens", body.get("max_tokens", limit))
        prompts, reading = _chat(llm, body, given, parsers)
    else:
        given.setdefault("max_tokens", 16)  # OpenAI's default, whatever generation_config.json says
        prompts, reading = prompts_of(body, max_samples), PLAIN
    given |= scoring(url, body, max_logprobs, llm.engine.model_config.vocab_size)
    if (is_special := body.get("add_special_tokens", url == COMPLETIONS)) != (url == COMPLETIONS):
        prompts = [_tokenized(llm, prompt, is_special) for prompt in prompts]
    params = replace(llm.get_default_sampling_params(), **given)
    for name in ("stop", "bad_words"):
        if sum(map(len, getattr(params, name))) > MAX_CHARS_OF_WORDS:
            raise ValueError(f"{name} may have {MAX_CHARS_OF_WORDS} characters in all, found more")
    num_samples = params.n * len(prompts)
    check_number("the number of samples (prompts times n)", num_samples, Integral, 1, max_samples)
    if params.logprobs is not None or params.logprob_token_ids:
        is_open = num_samples == 1 and not {"max_tokens", "max_completion_tokens"} & body.keys()
        params = _with_bounded_logprobs(params, num_samples, llm.engine.scheduler.max_model_len, is_open)
    return Translated(prompts, params, model, adapter, reading)


def _with_bounded_logprobs(
    params: SamplingParams, num_samples: int, max_model_len: int, is_open: bool
) -> SamplingParams:
    """The parameters, with which an answer has no more logprobs than it may. Raises ValueError.

    is_open: nobody has said how long the answer may be: it ends where it has as many, with finish_reason "length".
    """
    most_tokens = max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len)
    num_of_token = 1 + (params.logprobs or len(params.logprob_token_ids or ()))
    bound = MAX_LOGPROBS_OF_LINE // num_of_token
    if is_open and max(1, params.min_tokens) <= bound < most_tokens:
        return replace(params, max_tokens=bound)
    what = "the number of logprobs in the answer (samples times max_tokens times those of a token)"
    check_number(what, num_samples * most_tokens * num_of_token, Integral, 0, MAX_LOGPROBS_OF_LINE)
    return params


def _chat(
    llm: LLM, body: dict[str, Any], given: dict[str, Any], parsers: Parsers
) -> tuple[list[dict[str, Any]], Reading]:
    """The prompt, and how to read what follows it; in given, what that has to fit."""
    add_generation_prompt = check_switch("add_generation_prompt", body.get("add_generation_prompt", True))
    shows_reasoning = check_switch("include_reasoning", body.get("include_reasoning", True))
    tools = Tools.of(body)
    options = chat_options(body, parsers)
    if tools.choice == "none" and parsers.exclude_tools_when_none:
        options.pop("tools", None)
    elif "tools" in options:
        options["tools"] = tools.given
    messages: Any = body.get("messages")
    prompt = llm.chat_prompt(messages, add_generation_prompt, body.get("cache_salt"), is_trusted=False, **options)
    tokenizer = llm.get_tokenizer()
    format_name = parsers.tool_call or "hermes"
    if tools.given and not parsers.tool_call:
        format_name = format_of(prompt.template, tokenizer.special_tokens_map)
    reasoning = Reasoning.of(parsers.reasoning, prompt.template, prompt.begun)
    asked = given["structured_outputs"]
    fitting, form = tools.fit(format_name, asked)
    if fitting is not None and reasoning is not None and fitting.reasoning is None:
        fitting = replace(fitting, reasoning=("" if reasoning.is_open else reasoning.opening, reasoning.closing))
    given["structured_outputs"] = fitting
    tags = MARKERS.get(form, ()) + (() if reasoning is None else (reasoning.opening, reasoning.closing))
    if tags and any(token.special and token.content in tags for token in tokenizer.added_tokens_decoder.values()):
        given["skip_special_tokens"] = False  # the text has to show them
    named = tools.choice == "function"
    return [prompt], Reading(
        format=form,
        ids=format_name,
        functions=schemas_of(tools.given) if form else {},
        reasoning=reasoning,
        shows_reasoning=shows_reasoning,
        several=tools.several or named,
        are_forced=tools.are_forced,
        ends_with_calls=not named,
        left_out=(
            *unread_fields(messages, options.get("tools", []), prompt.template, prompt["prompt"]),
            *tools.left_out,
            *(tools.not_held(format_name) if asked is None else ()),
        ),
    )


def chat_options(body: dict[str, Any], parsers: Parsers) -> dict[str, Any]:
    """A body's options of a chat. The server's template_kwargs yield to reasoning_effort and the body's own."""
    options = {name: body[name] for name in OPTIONS_OF_BODY if name in body}
    if isinstance(options.get("tools"), list):
        options["tools"] = functions_of(options["tools"])
    options["chat_template_content_format"] = parsers.content_format
    kwargs, own = parsers.template_kwargs | _thinking(body), body.get("chat_template_kwargs", {})
    if kwargs and isinstance(own, dict):  # otherwise the template's check says what is wrong
        options["chat_template_kwargs"] = kwargs | own
    return options


def refuse_template(body: dict[str, Any]) -> None:
    """Of a client that is not trusted with it. Raises ValueError."""
    if "chat_template" in body:
        raise ValueError("chat_template is a program, and a request may not bring one; leave it out")


def _thinking(body: dict[str, Any]) -> dict[str, Any]:
    """reasoning_effort, as templates ask for it. "none" asks for no reasoning at all, any other for some: many
    templates think only if they are told to.
    """
    if (effort := body.get("reasoning_effort")) is None:
        return {}
    if effort not in EFFORTS:
        raise ValueError(f"reasoning_effort must be one of {', '.join(EFFORTS)}, found {shorten(effort)}")
    return {"reasoning_effort": effort, **dict.fromkeys(("enable_thinking", "thinking"), effort != "none")}


def model_of(llm: LLM, body: dict[str, Any], served_names: tuple[str, ...]) -> tuple[str, "Adapter | None"]:
    """The model that a body names, or else the first of served_names; the adapter that this stands for now, if it is
    one's. "" and null name none.

    Raises UnknownModel, or ValueError.
    """
    given = body.get("model")
    model = ("" if given is None else check_text("model", given)) or next(iter(served_names), "")
    known = llm.engine.known_adapters
    adapter = None if model in served_names else known.resolve(model)
    if served_names and model not in served_names and adapter is None:
        adapters = "".join(f", with adapter {name}" for name in known.names)
        raise UnknownModel(
            f"body.model is {model!r:.80}, and this is {served_names[0]}{adapters}: leave body.model out, or let "
            "--served-model-name say that they are the same"
        )
    return model, adapter


def check_answers(requests: Iterable[Request]) -> None:
    """Raise SampleFailed, or ValueError for a grammar, if a sample has ended with finish_reason "error"."""
    for sample in (sample for request in requests for sample in request.samples):
        if sample.error:
            grammar = sample.seq.parts.get("grammar")
            raise (ValueError if grammar is not None and grammar.error else SampleFailed)(sample.error)


def _structured_outputs(body: dict[str, Any]) -> StructuredOutputsParams | None:
    """From OpenAI's response_format, or from vLLM's structured_outputs."""
    asked, given = body.get("response_format", {"type": "text"}), body.get("structured_outputs")
    kind = asked.get("type") if isinstance(asked, dict) else None
    if kind in ("json_object", "json_schema") and given is None:
        holder = asked.get("json_schema", asked)  # llama.cpp's clients put the schema beside the type
        schema = holder.get("schema") if isinstance(holder, dict) else None
        if schema is None and kind == "json_schema":
            raise ValueError("response_format of type json_schema needs a json_schema with a schema")
        given = {"json_object": True} if schema in (None, {}) else {"json": schema}
    elif kind == "structural_tag" and given is None:
        given = {"structural_tag": {name: value for name, value in asked.items() if name != "type"}}
    elif kind != "text":
        known = "of type text, json_object, json_schema or structural_tag (and then without structured_outputs)"
        raise ValueError(f"response_format must be {known}, found {shorten(asked)}")
    if not isinstance(given, dict | None):
        raise ValueError(f"structured_outputs must be an object, found {shorten(given)}")
    return None if given is None else StructuredOutputsParams(**given)


def check_lengths(body: dict[str, Any], most_entries: dict[str, int]) -> None:
    """Raise ValueError for a list or an object that is too long, before anything is done with it."""
    for name, most in most_entries.items():
        value = body.get(name)
        num = len(value) if isinstance(value, list | dict) else 0
        if num <= most and isinstance(value, list):  # parts and calls of messages count, too
            lists = (item.get(key) for item in value if isinstance(item, dict) for key in ("content", "tool_calls"))
            num += sum(len(inner) for inner in lists if isinstance(inner, list))
        if num > most:
            raise ValueError(f"{name} may have {most} entries, found {num}")


def _tokenized(llm: LLM, prompt: dict[str, Any], is_special: bool) -> dict[str, Any]:
    """A prompt with special tokens or without, otherwise than is usual. One of token ids stays as it is."""
    if not isinstance(text := prompt.get("prompt"), str):
        return prompt
    llm.engine.check_length(text)
    return prompt | {"prompt_token_ids": tokenize(llm.get_tokenizer(), text, add_special_tokens=is_special)}


def prompts_of(body: dict[str, Any], max_samples: int) -> list[dict[str, Any]]:
    """Those of a completion. Raises ValueError."""
    if body.get("prompt") is None:
        raise ValueError("body has no prompt")
    prompts = split_prompt(body["prompt"])
    check_number("the number of prompts", len(prompts), Integral, 1, max_samples)
    salt = {"cache_salt": body["cache_salt"]} if "cache_salt" in body else {}
    return [prompt | salt for prompt in prompts]


def split_prompt(given: Any) -> list[dict[str, Any]]:
    """A text or a list of token ids is one prompt, a list of those is several."""
    is_several = isinstance(given, list) and bool(given) and all(isinstance(each, str | list) for each in given)
    prompts = given if is_several else [given]
    return [{"prompt_token_ids" if isinstance(each, list) else "prompt": each} for each in prompts]
