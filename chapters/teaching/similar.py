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
MUCH = 4000  # characters of codes_of(), some 20 lines: there are not many ways to write less
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
    """who -> whose functions have the same code, but for names, annotations, comments and layout: all that both have
    written or, with their names, some that are MUCH together. sources: of one chapter. given: its exercise.py, which
    has the functions that count."""
    functions = [node.name for node in ast.parse(given).body if isinstance(node, ast.FunctionDef)]
    unwritten = codes_of(given, functions)
    written = [
        (who, {name: code for name, code in codes_of(source, functions).items() if code and code != unwritten[name]})
        for who, source in sources
    ]
    found: dict[str, list[str]] = {}
    for (one, a), (other, b) in combinations(written, 2):
        same = [name for name in a if a[name] == b.get(name)]
        is_all = a == b != {}
        if is_all or sum(map(len, set[str]().union(*(a[name] for name in same)))) >= MUCH:
            which = "" if is_all else f" ({', '.join(same)})"
            found.setdefault(one, []).append(f"{other}{which}")
            found.setdefault(other, []).append(f"{one}{which}")
    return found


def codes_of(source: bytes, functions: Iterable[str]) -> dict[str, set[str]]:
    """What each function does, and what of the file it uses: statements without the names that the file gives, imports,
    annotations and docstrings. Empty for what is no Python."""
    try:
        tree = _Plain().visit(ast.parse(source))
        defined = {name: node for node in tree.body for name in _defined_by(node)}
        used = {function: _used(defined, function) for function in functions}
        code = {node: _without_names(node, {*defined}) for node in set[ast.stmt]().union(*used.values())}
        return {function: {code[node] for node in nodes} for function, nodes in used.items()}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}


class _Plain(ast.NodeTransformer):
    """Takes away what does nothing: annotations, texts that are statements, and pass."""

    def visit_Pass(self, node: ast.Pass) -> None:
        return None

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return node.value and self.generic_visit(ast.Assign(targets=[node.target], value=node.value))

    def visit_arg(self, node: ast.arg) -> ast.AST:
        return ast.arg(arg=node.arg)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _defined_by(node: ast.stmt) -> Iterable[str]:
    """The names that a statement of a module gives."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    return _bound_names(node)


def _used(defined: dict[str, ast.stmt], function: str) -> set[ast.stmt]:
    """The statements that define this function, and those that define what it uses."""
    names, used = [function], set[ast.stmt]()
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
