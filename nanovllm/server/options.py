"""What `nanovllm serve` may be told, beside the engine's options. Nothing of a server is imported here."""

from dataclasses import dataclass, fields
from numbers import Integral, Real

from nanovllm.validation import Bounds, check_field

BOUNDS: dict[str, Bounds] = {
    "port": (Integral, 0, 65_535),
    "max_waiting": (Integral, 1),
    "request_timeout": (Real, 0.001, 1e6),
    "shutdown_timeout": (Real, 0, 1e6),
    "max_body_bytes": (Integral, 1),
}


@dataclass(frozen=True)
class ServeOptions:
    """Options of `nanovllm serve`, beside the engine's.

    host:              address to listen at; the default is for programs on this machine only
    port:              0 takes any that is free
    api_key:           who asks for /v1 must send one of these (may be given several times); tenants with different keys
                       never share a prefix
    served_model_name: names under which requests may ask for the model, the first one is shown (default: MODEL)
    lora_modules:      adapters, NAME=PATH, that requests may ask for by their names
    max_waiting:       sequences that may wait; requests beyond them are answered by 429
    request_timeout:   seconds that a request may take, waiting included; then it is dropped, and answered by 504
    shutdown_timeout:  seconds that running requests get to finish after SIGTERM or Ctrl-C
    max_body_bytes:    of a request
    allowed_origins:   web pages elsewhere that may use this server, such as http://localhost:3000, or *
    classroom:         the page at / may pause the engine, step it and slow it down
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: tuple[str, ...] = ()
    served_model_name: tuple[str, ...] = ()
    lora_modules: tuple[str, ...] = ()
    max_waiting: int = 256
    request_timeout: float | None = None
    shutdown_timeout: float = 30.0
    max_body_bytes: int = 2_000_000
    allowed_origins: tuple[str, ...] = ()
    classroom: bool = False

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("api_key", "served_model_name", "lora_modules", "allowed_origins"):
                value = tuple(value)
            object.__setattr__(self, f.name, check_field(f.name, value, f.type, BOUNDS))
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self.api_key):
            raise ValueError("an --api-key travels in a header: it must be printable ASCII without spaces")
