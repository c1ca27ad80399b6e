"""Which layers fit the regular expressions of an adapter's file. See checks/sandbox.py."""

import re


def answer(patterns: list[str], paths: list[str]) -> list[list[str]]:
    """For each pattern the paths that it fits, as PEFT has it: the whole path, or what follows one of its dots.

    Raises ValueError for a pattern that is none.
    """
    found = []
    for pattern in patterns:
        try:
            match = re.compile(rf"(.*\.)?({pattern})$").match
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{pattern!r:.80} is no regular expression: {error}") from None
        found.append([path for path in paths if match(path)])
    return found
