"""What vLLM's scripts may say here, beyond what this engine has: one rule over the tables in data.py.

An option that asks for something this engine does not do is accepted at the values that ask for nothing (None always
does), and refused at any other. An option that is not in the table either is a mistake. examples/move_to_vllm.md is the
whole list; a test compares it with the code.
"""

from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from nanovllm.checks.values import check_number, reject_unknown, shorten
from nanovllm.compat import data

ANY = object()  # neutral at every value
Table = dict[str, tuple[str, tuple[Any, ...]]]  # name -> what another value would ask for, the neutral values


def entries(text: str) -> dict[str, str]:
    """word -> what stands behind the dashes of its entry."""
    found: dict[str, str] = {}
    for entry in text.strip().replace("\n    ", " ").split("\n"):
        words, _, reason = entry.partition(" -- ")
        found |= dict.fromkeys(words.split(), reason)
    return found


def table_of(text: str) -> Table:
    table: Table = {}
    for word, reason in entries(text).items():
        name, _, values = word.partition("=")
        if reason == "any value":
            table[name] = "", (ANY,)
        elif reason == "on or off":
            table[name] = "something that is neither on nor off", (True, False)
        else:
            table[name] = reason, tuple(map(_literal, values.split("|")))
    return table


def _literal(text: str) -> Any:
    try:
        return literal_eval(text)
    except (ValueError, SyntaxError):
        return text


ENGINE = table_of(data.ENGINE)
SAMPLING = table_of(data.SAMPLING)
CALL = table_of(data.CALL)
ASYNC_CALL = CALL | table_of(data.ASYNC_CALL)
BODY = SAMPLING | table_of(data.BODY)
TABLES: dict[str, Table] = {  # by what such options are given to
    "LLM": ENGINE | table_of(data.NANO_ENGINE),
    "AsyncEngineArgs": ENGINE | table_of("enable_log_requests -- on or off"),
    "nanovllm serve": ENGINE | table_of(data.FLAGS),
    "SamplingParams": SAMPLING,
    "StructuredOutputsParams": table_of(data.STRUCTURED),
    "BeamSearchParams": table_of(data.BEAM_SEARCH),
    "PoolingParams": table_of(data.POOLING),
    "PoolerConfig": table_of(data.POOLER),
    "SpeculativeConfig": table_of(data.SPECULATIVE),
    "LoRARequest": table_of(data.LORA),
    "ProfilerConfig": table_of(data.PROFILER),
    "KVEventsConfig": table_of(data.KV_EVENTS),
    "tokenization_kwargs": table_of(data.TOKENIZATION),
    "a prompt": table_of(data.PROMPT),
    "generate": CALL,
    "chat": CALL,
    "AsyncLLM": table_of(data.ASYNC),
    "AsyncLLM.generate": ASYNC_CALL,
    "body": BODY,
    "body of a response": table_of(data.RESPONSE),
    "body of an embedding": table_of(data.POOLING_BODY),
}
PATHS = entries(data.PATHS)


def _gib(size: Any) -> int:
    return int(check_number("kv_offloading_size", size, Real, 0, 1 << 20) * (1 << 30))


RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {  # another name of an option -> ours, its value there
    "kv_offloading_size": ("cpu_cache_bytes", _gib),
    "kvcache_block_size": ("block_size", lambda size: size),  # this and the next one: nano-vllm's
    "num_kvcache_blocks": ("num_gpu_blocks_override", lambda number: None if number == -1 else number),
}


def accepted_options(given: dict[str, Any], cls: Any) -> dict[str, Any]:
    """What is given to a class of options (checks/names.py), under our names. Raises ValueError as accepted() does."""
    what = next((base.__name__ for base in cls.__mro__ if base.__name__ in TABLES), "LLM")
    known = cls.__dataclass_fields__
    return accepted(in_our_words(given, known), known, what)


def in_our_words(given: dict[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """Options under our names. ValueError where two names of one option say different things."""
    for name, (ours, converted) in RENAMED.items():
        if ours not in known or name not in given:
            continue
        if (value := given.pop(name)) is None:
            continue
        value = converted(value)
        if ours in given and given[ours] != value:
            raise ValueError(f"{name} and {ours} are two names of one option; leave one of them out")
        given[ours] = value
    return given


def accepted(given: Mapping[str, Any], known: Iterable[str], what: str) -> dict[str, Any]:
    """What `given` asks of `what`, one of TABLES: without what asks for nothing.

    ValueError for an option at a value that we cannot honour, and for a name that nobody knows.
    """
    known, table = list(known), TABLES[what]
    reject_unknown((name for name in given if name not in table), known, what)
    for name in table.keys() & given.keys() - set(known):
        reason, neutral = table[name]
        value = given[name]
        if value is not None and ANY not in neutral and not any(_same(value, n) for n in neutral):
            works = " or ".join(f"{name}={n!r}" for n in neutral if n is not None)
            fine = f"Leave it out{f' or say {works}' if works else ''}"
            raise ValueError(f"{what}: {name}={shorten(value)} asks for {reason}; this engine does not do that. {fine}")
    return {name: value for name, value in given.items() if name in known}


def _same(value: Any, neutral: Any) -> bool:
    value = getattr(value, "value", value)  # of an Enum
    return type(value) is type(neutral) and value == neutral
