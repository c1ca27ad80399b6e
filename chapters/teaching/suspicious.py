"""Suspicious: what a person should look at before a mark is given. A flag proves nothing, and no flag proves nothing.

The student's process is asked for results only, so most ways to a mark without an answer are closed (wire.py). What is
left is code that looks for an answer where one lies: in the engine, in a chapter, in a frame. An honest solution has no
use for any of these words.
"""

import ast

from chapters.teaching.similar import shingles

FAST_S = 0.005  # checks that all pass take longer, with a process that is asked
MODULES = {  # of the standard library
    "atexit", "builtins", "ctypes", "faulthandler", "gc", "importlib", "inspect", "marshal", "multiprocessing", "os",
    "pickle", "pkgutil", "runpy", "shutil", "signal", "socket", "subprocess", "sys", "threading", "traceback",
    "unittest",
}  # fmt: skip
CALLS = {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "open", "vars"}
FRAMES = {"f_back", "f_locals", "f_globals", "f_builtins", "tb_frame", "tb_next", "gi_frame", "cr_frame", "ag_frame"}
INSIDES = {
    "__globals__", "__code__", "__closure__", "__subclasses__", "__mro__", "__bases__", "__builtins__", "__loader__",
    "__wrapped__", "__class__", "__reduce__", "__reduce_ex__", "__getattribute__", "_far", "_wire",
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


def flags_of(source: bytes, given: bytes) -> list[str]:
    """What is odd in this file, a few words each. given: the chapter's exercise.py, whose own imports are not odd."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    known = _found(ast.parse(given))
    return sorted(found for found in _found(tree) if found not in known)


def _found(tree: ast.AST) -> dict[str, None]:
    """In no order. Imports of a chapter or of the engine are named in full: exercise.py has some."""
    found: dict[str, None] = {}
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
        elif isinstance(node, ast.FunctionDef) and node.name in DEFINED:
            found[f"defines {node.name}"] = None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "getattr"):
            if len(node.args) > 1 and not isinstance(node.args[1], ast.Constant):
                found[f"{node.func.id} with a computed name"] = None
        elif isinstance(node, ast.Assign) and any(_patches(target) for target in node.targets):
            found["assigns to a class or a module of the engine"] = None
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in WORDS:
                found[f"names {name}"] = None
    return found


def _import_flag(module: str, node: ast.ImportFrom | None = None) -> str:
    top = module.split(".")[0]
    if top == "nanovllm":  # the engine has the answers of some chapters
        names = ", ".join(sorted(name.name for name in node.names)) if node else ""
        return f"imports {module}{': ' + names if names else ''}"
    if top == "chapters" or (node is not None and node.level):
        return f"imports {module or 'relatively'}"
    return f"imports {top}" if top in MODULES else ""


def _patches(target: ast.AST) -> bool:
    """X.y = ..., where X is a name that begins like a class's."""
    return isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id[:1].isupper()


def fast_flags(tasks: list[dict[str, object]]) -> list[str]:
    """tasks: as report.record() has them."""
    return [f"{task['task']} passed in {task['seconds']} s" for task in tasks if task["passed"] and _is_fast(task)]


def _is_fast(task: dict[str, object]) -> bool:
    return isinstance(task["seconds"], float) and task["seconds"] < FAST_S


def equal_sources(sources: list[tuple[str, bytes]], given: bytes) -> dict[str, list[str]]:
    """who -> whose file has the same code but for names, comments and layout. sources: of one chapter."""
    known = shingles(given)
    by_code: dict[frozenset[int], list[str]] = {}
    for who, source in sources:
        if own := shingles(source) - known:
            by_code.setdefault(own, []).append(who)
    return {
        who: [other for other in group if other != who]
        for group in by_code.values()
        for who in group[:]
        if len(group) > 1
    }
