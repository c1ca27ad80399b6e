"""What `nanovllm serve` may be told, beside the engine's options. Nothing of a server is imported here."""

from dataclasses import dataclass, fields
from numbers import Integral, Real

from nanovllm.checks.values import Bounds, check_field
from nanovllm.sampling_params import option

BOUNDS: dict[str, Bounds] = {
    "port": (Integral, 0, 65_535),
    "max_waiting": (Integral, 1),
    "request_timeout": (Real, 0.001, 1e6),
    "shutdown_timeout": (Real, 0, 1e6),
    "max_body_bytes": (Integral, 1),
}


@dataclass(frozen=True)
class ServeOptions:
    """Options of `nanovllm serve`, beside the engine's."""

    host: str = option("127.0.0.1", "address to listen at; the default is for programs on this machine only")
    port: int = option(8000, "0 takes any that is free")
    api_key: tuple[str, ...] = option(
        (),
        "who asks for /v1 must send one of these (may be given several times); tenants with different keys never share "
        "a prefix",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "names under which requests may ask for the model, the first one is shown (default: MODEL; of a checkpoint on "
        "this machine, its folder's name)",
    )
    lora_modules: tuple[str, ...] = option((), "adapters, NAME=PATH, that requests may ask for by their names")
    max_waiting: int = option(256, "sequences that may wait; requests beyond them are answered by 429")
    request_timeout: float | None = option(
        None, "seconds that a request may take, waiting included; then it is dropped, and answered by 504"
    )
    shutdown_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C")
    max_body_bytes: int = option(2_000_000, "of a request")
    allowed_origins: tuple[str, ...] = option(
        (), "web pages elsewhere that may use this server, such as http://localhost:3000, or *"
    )
    classroom: bool = option(False, "the page at / may pause the engine, step it and slow it down")

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in ("api_key", "served_model_name", "lora_modules", "allowed_origins"):
                value = tuple(value)
            object.__setattr__(self, f.name, check_field(f.name, value, f.type, BOUNDS))
        if not all(key.isascii() and key.isprintable() and " " not in key for key in self.api_key):
            raise ValueError("an --api-key travels in a header: it must be printable ASCII without spaces")
