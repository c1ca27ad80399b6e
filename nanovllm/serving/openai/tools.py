"""Tools of a chat, as a body names them: checked, and what the answer has to fit because of them."""

from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.checks.values import check_switch, shorten
from nanovllm.features.grammar.params import StructuredOutputsParams
from nanovllm.features.tool_calls.forced import forced_format, may_call, must_call, not_held

MAX_TOOLS, MAX_NAME = 1024, 256
ON_SERVER = "tools that run on a server, or take free text, are not here; tools of type function are"


@dataclass(frozen=True, slots=True)
class Tools:
    """given: the tools, as templates take them. choice: "auto", "required", "none" or "function".

    functions: those that may be called, name -> schema. strict: those whose schemas hold in any case. several: calls.
    left_out: tools of other types, as a warning names them.
    """

    given: list[dict[str, Any]] = field(default_factory=list)
    choice: str = "none"
    functions: dict[str, Any] = field(default_factory=dict)
    strict: frozenset[str] = frozenset()
    several: bool = True
    left_out: tuple[str, ...] = ()

    @classmethod
    def of(cls, body: dict[str, Any]) -> "Tools":
        """Raises ValueError."""
        given, choice = body.get("tools") or [], body.get("tool_choice")
        several = check_switch("parallel_tool_calls", body.get("parallel_tool_calls", True))
        if not isinstance(given, list) or len(given) > MAX_TOOLS:
            raise ValueError(f"tools must be a list of at most {MAX_TOOLS} functions, found {shorten(given)}")
        left_out = names_of_others(given)
        functions = dict(_function(tool, index) for index, tool in enumerate(given) if not is_other(tool))
        given = functions_of(given)
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            given, choice = allowed(given, choice.get("allowed_tools", choice))
            functions = {tool["function"]["name"]: functions[tool["function"]["name"]] for tool in given}
        strict = frozenset(tool["function"]["name"] for tool in given if tool["function"].get("strict"))
        if isinstance(choice, dict):
            name = choice["function"].get("name") if isinstance(choice.get("function"), dict) else None
            if choice.get("type") != "function" or not isinstance(name, str):
                known = '{"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}'
                raise ValueError(f"tool_choice, as an object, must be {known}, found {shorten(choice)}; {ON_SERVER}")
            if name not in functions:
                raise ValueError(f"tool_choice names {shorten(name)}, and tools have {shorten(list(functions))}")
            return cls(
                given=given,
                choice="function",
                functions={name: functions[name]},
                strict=strict,
                several=False,
                left_out=left_out,
            )
        choice = ("auto" if given else "none") if choice is None else choice
        if choice not in ("auto", "required", "none"):
            hint = "; what others call 'any' is 'required' here" if choice == "any" else ""
            raise ValueError(f"tool_choice must be auto, required, none or an object, found {shorten(choice)}{hint}")
        if choice == "required" and not given:
            raise ValueError("tool_choice is 'required', and there are no tools: give tools, or leave it out")
        return cls(
            given=given,
            choice=choice if given else "none",
            functions=functions,
            strict=strict,
            several=several,
            left_out=left_out,
        )

    @property
    def are_forced(self) -> bool:
        return self.choice in ("required", "function")

    def not_held(self, format_name: str) -> tuple[str, ...]:
        """What of strict functions' schemas a call that nothing forces need not fit, as a warning names it."""
        is_free = self.choice == "auto" and self.strict
        return not_held(format_name, self.functions, self.strict) if is_free else ()

    def fit(
        self, format_name: str, asked: StructuredOutputsParams | None
    ) -> tuple[StructuredOutputsParams | None, str]:
        """What the answer has to fit: calls, calls or the form that the body asks for, or that form alone; and in what
        format its calls are, "" if none are read.

        Raises ValueError.
        """
        if self.choice == "none":
            return asked, ""
        if self.are_forced:
            if asked is not None:
                other = "response_format or structured_outputs for another form"
                raise ValueError(f"tool_choice {self.choice!r} asks for calls, and {other}: 'auto' allows both")
            return _fitting(must_call(format_name, self.functions, self.several)), forced_format(format_name)
        if asked is None:
            strict = may_call(format_name, self.functions, self.strict, self.several) if self.strict else None
            return None if strict is None else _fitting(strict), format_name
        if asked.json is None and not asked.json_object:
            return asked, format_name
        schema = {"type": "object"} if asked.json is None else asked.json
        answer = {"type": "json_schema", "json_schema": schema, "strict_mode": asked.disable_additional_properties}
        calls = must_call(format_name, self.functions, self.several)
        either = {"format": {"type": "or", "elements": [answer, calls]}}
        fitting = replace(
            asked, json=None, json_object=None, structural_tag=either, disable_additional_properties=False
        )
        return fitting, forced_format(format_name)


def is_other(tool: Any) -> bool:
    """Is it a tool that a server runs, or that takes free text? Agents offer these to all models alike."""
    kind = tool.get("type") if isinstance(tool, dict) else None
    return isinstance(kind, str) and kind != "function"


def functions_of(tools: list[Any]) -> list[Any]:
    """Without those: they are left out."""
    return [tool for tool in tools if not is_other(tool)]


def allowed(functions: list[dict[str, Any]], choice: Any) -> tuple[list[dict[str, Any]], str]:
    """Those of the functions that may be called, and whether one has to be: the tool_choice that is left. The model is
    shown no others.

    choice: the mode and the tools of one of type allowed_tools; OpenAI's chat has a tool's name in its function, its
    response beside its type. Raises ValueError.
    """
    given, mode = (choice.get("tools"), choice.get("mode", "auto")) if isinstance(choice, dict) else (None, None)
    if not isinstance(given, list) or len(given) > MAX_TOOLS or mode not in ("auto", "required"):
        what = f"a list tools, of at most {MAX_TOOLS}, and mode auto or required"
        raise ValueError(f"allowed_tools needs {what}; found {shorten(choice)}")
    inner = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in given]
    names = [tool.get("name") if isinstance(tool, dict) else tool for tool in inner]
    known = [function["function"]["name"] for function in functions]
    if unknown := [name or tool for tool, name in zip(given, names, strict=True) if name not in known]:
        raise ValueError(f"tool_choice allows {shorten(unknown[0])}, and tools has {', '.join(known) or 'none'}")
    return [function for function in functions if function["function"]["name"] in names], mode


def names_of_others(tools: list[Any]) -> tuple[str, ...]:
    """As a warning shows what was left out."""
    return tuple(f"tools[{place}] of type {tool['type'][:40]!a}" for place, tool in enumerate(tools) if is_other(tool))


def _fitting(form: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(structural_tag={"format": form})


def _function(tool: Any, index: int) -> tuple[str, Any]:
    """(name, schema)."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function":
        known = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
        raise ValueError(f"tools[{index}] must be {known}, found {shorten(tool)}")
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise ValueError(f"tools[{index}] must have a name of 1 to {MAX_NAME} characters, found {shorten(name)}")
    if not isinstance(schema, dict | None):
        raise ValueError(f"tools[{index}]: parameters must be a JSON schema, found {shorten(schema)}")
    if function.get("strict") is not None:
        check_switch(f"tools[{index}]: strict", function["strict"])
    return name, schema
