"""Similar: pairs of submissions that share most of their code, for a person to look at.

A file is its tokens, without comments, docstrings and layout, and with one name for all that it binds itself: to rename
and to reformat changes nothing. Every run of RUN tokens is a shingle, and two files are as similar as they share
shingles (Dice's coefficient), those of the chapter's exercise.py not counted.
"""

import ast
import io
import keyword
import tokenize
from collections.abc import Iterable
from itertools import combinations

RUN = 12  # tokens: a line of code, or a little more
THRESHOLD = 0.8
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}
MEANING = (
    "Short exercises have few right solutions: those who worked alone may stand here, too. Read both files, and ask "
    "both students."
)


def shingles(source: bytes) -> frozenset[int]:
    """Hashes of runs of tokens; none of what is no Python."""
    try:
        tree = ast.parse(source)
        tokens = [token for token in tokenize.tokenize(io.BytesIO(source).readline) if token.type not in LAYOUT]
    except (SyntaxError, ValueError, RecursionError, MemoryError, tokenize.TokenError):
        return frozenset()
    own, texts = bound_names(tree), docstrings(tree)
    words = [_word(token, own) for token in tokens if token.start[0] not in texts]
    return frozenset(hash(tuple(words[i : i + RUN])) for i in range(len(words) - RUN + 1))


def bound_names(tree: ast.AST) -> set[str]:
    """Names that the file itself gives: of functions, arguments and variables."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def docstrings(tree: ast.AST) -> set[int]:
    """Lines on which a text stands that nobody uses."""
    alone = (node for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    return {node.lineno for node in alone}


def _word(token: tokenize.TokenInfo, own: set[str]) -> str:
    if token.type == tokenize.NAME and token.string in own and not keyword.iskeyword(token.string):
        return "name"
    return {tokenize.NUMBER: "0", tokenize.STRING: '""'}.get(token.type, token.string)


def similar_pairs(
    sources: Iterable[tuple[str, bytes]], given: bytes, threshold: float = THRESHOLD
) -> list[tuple[float, str, str]]:
    """(similarity, who, who), the most similar first. sources: (who, file) of one chapter. given: its exercise.py."""
    known = shingles(given)
    found = [(who, own) for who, source in sources if (own := shingles(source) - known)]
    pairs = [(2 * len(a & b) / (len(a) + len(b)), first, second) for (first, a), (second, b) in combinations(found, 2)]
    return sorted((pair for pair in pairs if pair[0] >= threshold), reverse=True)
