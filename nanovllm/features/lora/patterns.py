"""The regular expressions of an adapter's file: which layers each of them names (chapter 15).

A short one can take years, and nothing in this process could end it. So another Python matches them, with limits that
the system enforces. It runs this file as a script: nothing is imported here but the standard library.
"""

import json
import re
import subprocess
import sys

LIMIT_S = 2  # of computing, not of waiting: a busy machine changes nothing. Those of a real adapter take 0.1 s
LIMIT_BYTES = 1 << 30


def layers_of(patterns: list[str], paths: list[str], where: str) -> dict[str, set[str]]:
    """{pattern: those of the paths that it fits}, as PEFT has it: the whole path, or what follows one of its dots.

    Raises ValueError, which begins with `where`, for a pattern that is none, or that takes too long.
    """
    if not patterns:
        return {}
    command, timeout = [sys.executable, "-I", "-S", __file__], 10 * LIMIT_S if sys.platform == "win32" else None
    try:
        done = subprocess.run(
            command, input=json.dumps([patterns, paths]), capture_output=True, encoding="utf-8", timeout=timeout
        )
        found, problem = json.loads(done.stdout)
    except (ValueError, subprocess.TimeoutExpired):
        limits = f"{LIMIT_S} s or {LIMIT_BYTES >> 30} GiB"
        problem = f"its regular expressions take more than {limits}; name the layers without repetitions"
    if problem:
        raise ValueError(f"{where}: {problem}")
    return {pattern: set(fits) for pattern, fits in zip(patterns, found, strict=True)}


def _match(patterns: list[str], paths: list[str]) -> tuple[list[list[str]], str]:
    found = []
    for pattern in patterns:
        try:
            match = re.compile(rf"(.*\.)?({pattern})$").match
        except (re.error, RecursionError, OverflowError) as error:
            return [], f"{pattern!r:.80} is no regular expression: {error}"
        found.append([path for path in paths if match(path)])
    return found, ""


if __name__ == "__main__":
    if sys.platform != "win32":  # there the caller waits only so long
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))
    if sys.platform == "linux":  # macOS refuses it
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    print(json.dumps(_match(*json.load(sys.stdin))))
