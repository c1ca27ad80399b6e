"""Similar: pairs of submissions that share most of their code, for a person to look at.

copydetect finds them: it takes a file as its tokens, with one name for all names and without comments and layout, and
compares runs of these (winnowing, as MOSS does). What stands in the chapter's exercise.py does not count.
"""

import ast
import io
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import combinations
from typing import Any

RUN = 25  # letters of a file in which each name is one
THRESHOLD = 0.75
MEANING = (
    "Short exercises have few right solutions: those who worked alone may stand here, too. Read both files, and ask "
    "both students."
)


def require_copydetect() -> None:
    """Raises ValueError if it is not installed."""
    if find_spec("copydetect") is None:
        raise ValueError('--similar takes copydetect:  pip install -e ".[teach]"')


def similar_pairs(
    sources: Iterable[tuple[str, bytes]], given: bytes, threshold: float = THRESHOLD
) -> list[tuple[float, str, str]]:
    """(similarity, who, who), the most similar first. sources: (who, file) of one chapter. given: its exercise.py."""
    from copydetect import CodeFingerprint, compare_files

    def fingerprint(source: bytes, boilerplate: Any = None) -> Any:
        text = io.StringIO(source.decode("utf-8", "replace"))
        return CodeFingerprint("exercise.py", RUN, 1, boilerplate, fp=text)

    known = [*fingerprint(given).hashes]
    found = [(who, made) for who, source in sources if (made := fingerprint(source, known)).token_coverage]
    pairs = []
    for (first, a), (second, b) in combinations(found, 2):
        _, shares, _ = compare_files(a, b)
        pairs.append((float(min(shares)), first, second))
    return sorted((pair for pair in pairs if pair[0] >= threshold), reverse=True)


def same_code(sources: Iterable[tuple[str, bytes]], given: bytes) -> dict[str, list[str]]:
    """who -> whose functions have the same code, but for names, comments and layout. sources: of one chapter. given:
    its exercise.py, which has the functions that count."""
    functions = {node.name for node in ast.parse(given).body if isinstance(node, ast.FunctionDef)}
    unwritten = code_of(given, functions)
    by_code: dict[str, list[str]] = {}
    for who, source in sources:
        code = code_of(source, functions)
        if code and code != unwritten:
            by_code.setdefault(code, []).append(who)
    groups = [group for group in by_code.values() if len(group) > 1]
    return {who: [other for other in group if other != who] for group in groups for who in group}


def code_of(source: bytes, functions: set[str]) -> str:
    """What these functions do, and what of the file they use: in no order, and without the names that the file gives,
    imports and docstrings. Empty for what is no Python."""
    try:
        tree = ast.parse(source)
        defined = {name: node for node in tree.body for name in _defined_by(node)}
        used = _used(defined, functions)
        return "\n".join(sorted(_without_names(node, {*defined}) for node in used))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""


def _defined_by(node: ast.stmt) -> Iterable[str]:
    """The names that a statement of a module gives."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return _bound_names(node)


def _used(defined: dict[str, ast.stmt], functions: set[str]) -> set[ast.stmt]:
    """The statements that define these functions, and those that define what they use."""
    names, used = [*functions], set[ast.stmt]()
    while names:
        node = defined.get(names.pop())
        if node is not None and node not in used:
            used.add(node)
            names += [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
    return used


def _without_names(node: ast.stmt, defined: set[str]) -> str:
    """Its code. Names are numbered in it alone: functions in another order have the same code."""
    names = dict.fromkeys(defined, "defined") | {name: f"name {at}" for at, name in enumerate(_bound_names(node))}
    for each in ast.walk(node):
        for field in ("id", "arg", "name"):
            if getattr(each, field, None) in names:
                setattr(each, field, names[getattr(each, field)])
        if isinstance(body := getattr(each, "body", None), list):
            each.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]
    return ast.dump(node)


def _bound_names(tree: ast.AST) -> dict[str, None]:
    """Names that the file itself gives to functions, arguments and variables, in their order."""
    names: dict[str, None] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names[node.id] = None
        elif isinstance(node, ast.arg):
            names[node.arg] = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names[node.name] = None
    return names


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
