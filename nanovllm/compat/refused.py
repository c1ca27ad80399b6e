"""What scripts import or call and this engine has not, by name and reason. What it has: paths.py."""

from nanovllm.compat import data
from nanovllm.compat.names import entries


class NameRefused(ImportError, ValueError):
    """Raised where a script imports what vLLM or nano-vllm has and this engine has not. It says why."""


class MethodRefused(AttributeError, ValueError):
    """The same, where a script asks an object for a method or an attribute."""


MODULES = {"vLLM": entries(data.MODULES), "nano-vllm": entries(data.NANO_MODULES)}
METHODS = {"vLLM": entries(data.METHODS), "nano-vllm": entries(data.NANO_METHODS)}


def refusal(name: str) -> str | None:
    """Whose `name` is, a dotted path without the package's name, and why it is not here. None: it is nobody's."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        prefix = ".".join(parts[:end])
        for whose, reasons in MODULES.items():
            if prefix in reasons:
                return f"{name} is {whose}'s, and not here: {reasons[prefix]}"
    return None


def refused_method(cls: type, name: str) -> AttributeError:
    """What a class raises, in __getattr__, for a name that it does not have."""
    for whose, reasons in METHODS.items():
        if name in reasons:
            return MethodRefused(f"{cls.__name__} has no {name}, as {whose}'s does: {reasons[name]}")
    return AttributeError(f"{cls.__name__} has no {name!r}")
