"""Suspicious: what a person should look at before a mark is given. A flag proves nothing, and no flag proves nothing.

A submission runs beside the checks, so code that looks for a mark without an answer finds ways (INSTRUCTOR.md). It
looks where an answer lies: in the engine, in a chapter, in a frame, on the disk or on the network. An honest solution
has no use for any of these words.
"""

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress

from chapters.course import find_chapter
from chapters.submission import readable

MOST_CHARACTERS = 200  # of a flag: it quotes names, which may have any length
FAST_S = 0.005  # checks that all pass take longer, with a process of their own
HARMLESS = {  # of the standard library: an honest solution may compute, print or measure with them
    "__future__", "abc", "array", "base64", "binascii", "bisect", "calendar", "cmath", "collections", "colorsys",
    "contextlib", "copy", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions", "functools", "graphlib",
    "hashlib", "heapq", "hmac", "itertools", "json", "logging", "math", "numbers", "operator", "pprint", "queue",
    "random", "re", "reprlib", "secrets", "statistics", "string", "stringprep", "struct", "textwrap", "time", "timeit",
    "types", "typing", "unicodedata", "uuid", "warnings", "zlib",
}  # fmt: skip
# Through a module that has imported them, also as _os and enum.bltns.
REACHED = {"bltns", "builtins", "codecs", "importlib", "inspect", "io", "os", "sys"}
NETWORK = {
    "aiohttp", "asyncio", "ftplib", "http", "httpx", "imaplib", "openai", "poplib", "requests", "smtplib", "socket",
    "socketserver", "ssl", "telnetlib", "urllib", "urllib3", "webbrowser", "websocket", "websockets", "xmlrpc",
}  # fmt: skip
CALLS = {
    "__import__", "breakpoint", "compile", "delattr", "eval", "exec", "globals", "open", "setattr", "vars",
}  # fmt: skip
FRAMES = {"f_back", "f_locals", "f_globals", "f_builtins", "tb_frame", "tb_next", "gi_frame", "cr_frame", "ag_frame"}
INSIDES = {
    "__globals__", "__code__", "__closure__", "__subclasses__", "__mro__", "__bases__", "__builtins__", "__loader__",
    "__wrapped__", "__class__", "__reduce__", "__reduce_ex__", "__getattribute__", "__dict__", "__func__",
}  # fmt: skip
DEFINED = {
    "__eq__",
    "__ne__",
    "__hash__",
    "__del__",
    "__getattr__",
    "__getattribute__",
    "__reduce__",
    "__instancecheck__",
}
WORDS = {"solution", "unseal", "sealed", "check_integrity", "suspicious", "grading", "grader"}


def flags_of(source: bytes, chapter: int) -> list[str]:
    """What is odd in this file, a few words each. What the chapter's own exercise.py has is not odd."""
    return flags_beside(source, (find_chapter(chapter).folder / "exercise.py").read_bytes())


def flags_beside(source: bytes, given: bytes) -> list[str]:
    """given: what the student was given to begin with."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    known_tree = ast.parse(given)
    modules = {node.module for node in ast.walk(known_tree) if isinstance(node, ast.ImportFrom)}
    known = _found(known_tree, modules)
    return sorted(readable(found, MOST_CHARACTERS) for found in _found(tree, modules) if found not in known)


def _found(tree: ast.AST, modules: set[str | None]) -> dict[str, None]:
    """In no order. Imports of a chapter or of the engine are named in full: exercise.py has some.

    modules: those of the engine among them are imported here, to look its classes up. Whoever imports from others is
    flagged for that.
    """
    found: dict[str, None] = {}
    classes = dict(_engines_classes(tree, modules))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    imported = {(name.asname or name.name).partition(".")[0] for node in imports for name in node.names}
    found |= dict.fromkeys(f"hands on {name}, a class of the engine" for name in _handed_on(tree, classes))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= dict.fromkeys(flag for name in node.names if (flag := _import_flag(name.name)))
        elif isinstance(node, ast.ImportFrom) and (flag := _import_flag(node.module or "", node)):
            found[flag] = None
        elif isinstance(node, ast.Name) and (node.id in CALLS or node.id in INSIDES):
            found[f"uses {node.id}"] = None
        elif isinstance(node, ast.Attribute) and (node.attr in FRAMES or node.attr in INSIDES):
            found[f"{'frames' if node.attr in FRAMES else 'insides'}: {node.attr}"] = None
        elif isinstance(node, ast.Attribute) and node.attr in ("_getframe", "settrace", "setprofile", "modules"):
            found[f"sys: {node.attr}"] = None
        elif isinstance(node, ast.Attribute) and _is_reached(node.attr):
            if _owner(node) in imported:  # torch.utils.os, not block.io
                found[f"reaches {node.attr}"] = None
        elif isinstance(node, ast.FunctionDef) and node.name in DEFINED:
            found[f"defines {node.name}"] = None
        elif isinstance(node, ast.Name) and node.id in DEFINED:
            found[f"defines {node.id}"] = None
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in DEFINED:
            found[f"names {node.value}"] = None
        elif isinstance(node, ast.Call) and _called(node) == "getattr" and len(node.args) > 1:
            if not isinstance(node.args[1], ast.Constant):
                found["getattr with a computed name"] = None
            elif node.args[1].value in WORDS:
                found[f"names {node.args[1].value}"] = None
        elif isinstance(node, ast.Assign) and any(_patches(target) for target in node.targets):
            found["assigns to a class or a module of the engine"] = None
        for method in _methods(node, classes):
            found[f"uses {method}, which is the engine's own"] = None
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in WORDS:
                found[f"names {name}"] = None
    return found


def _owner(node: ast.AST) -> str:
    """The first name of a.b.c, however long that is; empty if it begins with something else."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_reached(name: str) -> bool:
    return name.lstrip("_") in REACHED


def _engines_classes(tree: ast.AST, modules: set[str | None]) -> Iterator[tuple[str, type]]:
    """Names of classes that the file imports from the engine, from these modules."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or node.module not in modules:
            continue
        if (node.module or "").split(".")[0] == "nanovllm":
            for name in node.names:
                with suppress(ImportError, AttributeError):
                    owner = getattr(importlib.import_module(node.module or ""), name.name)
                    if inspect.isclass(owner):
                        yield name.asname or name.name, owner


def _methods(node: ast.AST, classes: dict[str, type]) -> Iterator[str]:
    """Scheduler.schedule, getattr(Scheduler, "schedule") and type(scheduler).schedule: the engine's method stands in
    for the student's function, which the engine calls by this name."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in classes:
        if _is_method(classes[node.value.id], node.attr):
            yield f"{node.value.id}.{node.attr}"
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Call) and _called(node.value) == "type":
        if not node.attr.startswith("__"):
            yield f"type(...).{node.attr}"
    elif isinstance(node, ast.Call) and _called(node) == "getattr" and len(node.args) > 1:
        owner, name = node.args[:2]
        said = name.value if isinstance(name, ast.Constant) else None
        if isinstance(owner, ast.Name) and isinstance(said, str) and _is_method(classes.get(owner.id, object), said):
            yield f"{owner.id}.{said}"


def _handed_on(tree: ast.AST, classes: dict[str, type]) -> set[str]:
    """Classes that get another name: by an assignment, as an argument, in a list, as the base of a class.

    To call one, with map() too, to ask for a member or a type, and to annotate is what an honest file does, too.
    """
    plain = set[ast.AST]()
    for node in ast.walk(tree):
        asked = [getattr(node, "annotation", None), getattr(node, "returns", None), getattr(node, "slice", None)]
        if isinstance(node, ast.Attribute):
            plain.add(node.value)
        elif isinstance(node, ast.Compare):
            plain.update([node.left, *node.comparators])
        elif isinstance(node, ast.Call):
            plain.add(node.func)
            asked += node.args if _called(node) in ("isinstance", "issubclass") else []
            asked += node.args[:1] if _called(node) in ("cast", "map") else []
        elif isinstance(node, ast.MatchClass):
            plain.add(node.cls)
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            plain.update([node.left, node.right])
        plain.update(each for part in asked if part is not None for each in ast.walk(part))
    names = (node for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in plain)
    return {node.id for node in names if node.id in classes}


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_method(owner: type, name: str) -> bool:
    found = inspect.getattr_static(owner, name, None)
    return inspect.isfunction(found) or isinstance(found, staticmethod | classmethod | property)


def _import_flag(module: str, node: ast.ImportFrom | None = None) -> str:
    top = module.split(".")[0]
    if top == "nanovllm":  # the engine has the answers of some chapters
        names = ", ".join(sorted(name.name for name in node.names)) if node else ""
        return f"imports {module}{': ' + names if names else ''}"
    if top == "chapters" or (node is not None and node.level):
        return f"imports {module or 'relatively'}"
    if top in NETWORK:
        return f"imports {top}, for a network"
    if node is not None and (reached := sorted(name.name for name in node.names if _is_reached(name.name))):
        return f"imports {', '.join(reached)} from {module}"
    return f"imports {top}" if top in sys.stdlib_module_names - HARMLESS else ""


def _patches(target: ast.AST) -> bool:
    """X.y = ..., where X is a name that begins like a class's."""
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id[:1].isupper()


def fast_flags(tasks: list[dict[str, object]]) -> list[str]:
    """tasks: as report.record() has them."""
    return [f"{task['task']} passed in {task['seconds']} s" for task in tasks if task["passed"] and _is_fast(task)]


def _is_fast(task: dict[str, object]) -> bool:
    return isinstance(task["seconds"], float) and task["seconds"] < FAST_S
