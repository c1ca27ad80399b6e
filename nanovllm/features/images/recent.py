"""Recent: what was made of the newest images, within a bound of bytes. Any thread may ask."""

from collections import OrderedDict
from threading import Lock
from typing import Generic, TypeVar

Value = TypeVar("Value")


class Recent(Generic[Value]):
    """Values by the content hash of their image. Those that were asked for longest ago leave first."""

    max_bytes = 256 << 20

    def __init__(self) -> None:
        self.num_bytes = 0
        self._kept: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._lock = Lock()

    def get(self, content_hash: str) -> Value | None:
        with self._lock:
            if content_hash not in self._kept:
                return None
            self._kept.move_to_end(content_hash)
            return self._kept[content_hash][0]

    def put(self, content_hash: str, value: Value, num_bytes: int) -> None:
        """Keep a value, at least until the next one comes. num_bytes: of its tensors."""
        with self._lock:
            _, had_bytes = self._kept.pop(content_hash, (None, 0))
            self._kept[content_hash] = value, num_bytes
            self.num_bytes += num_bytes - had_bytes
            while len(self._kept) > 1 and self.num_bytes > self.max_bytes:
                _, (_, freed_bytes) = self._kept.popitem(last=False)
                self.num_bytes -= freed_bytes
