"""LoRARequest: which adapter a request chooses (chapter 15)."""

from dataclasses import dataclass, field

from nanovllm.checks.names import check_options, names_checked
from nanovllm.checks.values import MAX_INT32, shorten


@names_checked("LoRARequest")
@dataclass(frozen=True)
class LoRARequest:
    """An adapter in PEFT's format. Raises ValueError.

    lora_name:   what to call it
    lora_int_id: its number, from 1 on; a part of the hash of every block of K/V that is computed with it
    lora_path:   its directory or hub id

    load_inplace: its files are read anew, and what they hold takes the place of what the number has stood for.
    """

    lora_name: str
    lora_int_id: int = field(metadata={"low": 1, "high": MAX_INT32})
    lora_path: str = ""
    load_inplace: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            value = getattr(self, name)
            if not value or not (isinstance(value, str) or (name == "lora_path" and hasattr(value, "__fspath__"))):
                raise ValueError(f"{name} must be text that is not empty, found {shorten(value)}")
            object.__setattr__(self, name, str(value))
        check_options(self)
