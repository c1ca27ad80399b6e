"""KVEventsConfig: whom an engine tells what becomes of its cached blocks, checked before any work."""

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.checks.names import check_options, names_checked
from nanovllm.checks.values import check_choice, shorten
from nanovllm.files.system import open_for_owner

if TYPE_CHECKING:
    from nanovllm.config import EngineConfig

NO_SOCKETS = (
    "publisher 'zmq', which is vLLM's where none is named, needs ZeroMQ, and this engine opens no sockets; "
    "say 'jsonl', with a path, or 'null': LLM.on_kv_events is called in both cases"
)


@names_checked("KVEventsConfig")
@dataclass(frozen=True)
class KVEventsConfig:
    """LLM(kv_events_config=...), with vLLM's names. Raises ValueError.

    enable_kv_cache_events  nothing is told without it
    publisher               "jsonl": a line of JSON for each step that changed something, at the end of a file;
                            "null": nobody is told but LLM.on_kv_events
    path                    of the file; a line begins it anew for each engine
    """

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    path: str | None = None

    def __post_init__(self) -> None:
        check_options(self)
        if self.publisher is None and not self.enable_kv_cache_events:
            object.__setattr__(self, "publisher", "null")
        if self.publisher in (None, "zmq"):
            raise ValueError(f"kv_events_config: {NO_SOCKETS}")
        check_choice("kv_events_config: publisher", self.publisher, ("jsonl", "null"))
        if (self.publisher == "jsonl") != (self.path is not None):
            found = f"publisher={self.publisher!r} and path={shorten(self.path)}"
            raise ValueError(f"kv_events_config: path is the file of publisher 'jsonl', found {found}")
        if self.path is not None:
            if not isinstance(self.path, str | os.PathLike) or not str(self.path):
                raise ValueError(f"kv_events_config: path must be a file's, found {shorten(self.path)}")
            object.__setattr__(self, "path", str(self.path))


def check_kv_events(config: "EngineConfig") -> None:
    """Raises ValueError for events that cannot be told."""
    if not config.enable_prefix_caching:
        raise ValueError("kv_events_config: without enable_prefix_caching there is nothing to tell of")
    path = config.kv_events_config.path  # pyrefly: ignore[missing-attribute]
    try:
        open(path or os.devnull, "ab", opener=open_for_owner).close()
    except OSError as error:
        raise ValueError(f"kv_events_config: {path} cannot be written to: {error.strerror}") from None
