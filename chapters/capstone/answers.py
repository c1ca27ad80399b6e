"""What a policy answered, judged: whatever is not what its method may return is Refused, with what was found."""

from collections.abc import Iterable
from typing import Any

from chapters.capstone.views import Setup
from chapters.submission import kind_of, readable


class Refused(Exception):
    """The policy did what no policy does. The message says what was found."""


def read_ids(found: dict[str, Any], method: str, waiting: Iterable[int]) -> list[int]:
    """Each of a request that waits, none twice."""
    ids, known = found.get(method), set(waiting)
    if not isinstance(ids, list):
        raise Refused(f"{method}() returns a list of ids, found {readable(ids, 100)}")
    for index in ids:
        _check_type(index, method, int)
        if index not in known:
            raise Refused(f"{method}() names request {readable(index, 100)} twice, or one that does not wait")
        known.remove(index)
    return ids


def read_budget(found: dict[str, Any], setup: Setup) -> int:
    budget: Any = found.get("token_budget")
    most = setup.max_num_batched_tokens
    _check_type(budget, "token_budget", int)
    if not 1 <= budget <= most:
        raise Refused(f"token_budget() is a whole number from 1 to {most:,}, found {readable(budget, 100)}")
    return budget


def read_draft_counts(found: dict[str, Any], setup: Setup, answered: Iterable[int]) -> dict[int, int]:
    """answered: ids of running requests that have a token."""
    pairs, known = _pairs(found.get("num_draft_tokens"), "num_draft_tokens"), set(answered)
    for index, num in pairs:
        _check_type(index, "num_draft_tokens", int)
        _check_type(num, "num_draft_tokens", int)
        if index not in known:
            raise Refused(
                f"num_draft_tokens() names request {readable(index, 100)}, which does not run or has no token"
            )
        if not 0 <= num <= setup.max_draft_tokens:
            most = setup.max_draft_tokens
            raise Refused(f"num_draft_tokens() gives 0 to {most} draft tokens to a request, found {readable(num, 100)}")
    return dict(pairs)


def read_worths(found: dict[str, Any], num_blocks: int) -> list[float]:
    worths = found.get("worth")
    for worth in worths if isinstance(worths, list) else ():
        _check_type(worth, "worth", float, int)
    if not isinstance(worths, list) or len(worths) != num_blocks or not all(map(_is_number, worths)):
        wrong = [worth for worth in worths if not _is_number(worth)][:3] if isinstance(worths, list) else worths
        raise Refused(f"worth() is a finite number, found {readable(wrong, 100)}")
    return worths


def read_snapshots(found: Any, num_tokens: int, block_size: int) -> dict[int, bool]:
    pairs = _pairs(found, "snapshots")
    for position, is_wanted in pairs:
        _check_type(position, "snapshots", int)
        _check_type(is_wanted, "snapshots", bool)
        if not 0 < position < num_tokens or position % block_size != 0:
            what = f"{{multiple of {block_size} below {num_tokens}: True or False}}"
            raise Refused(f"snapshots() is {what}, found {readable([position, is_wanted], 100)}")
    return dict(pairs)


def _is_number(value: Any) -> bool:
    return abs(value) < 1e300  # neither NaN nor infinite


def _check_type(value: Any, method: str, *kinds: type) -> None:
    """NumPy's numbers look like Python's in every other message."""
    if type(value) not in kinds:
        what = f"found {readable(value, 100)} of type {kind_of(value)}"
        raise Refused(f"{method}(): {what}: return Python's {kinds[0].__name__}")


def _pairs(found: Any, method: str) -> list[tuple[Any, Any]]:
    if not isinstance(found, dict):
        raise Refused(f"{method}() returns a dictionary, found {readable(found, 100)}")
    return [*found.items()]
