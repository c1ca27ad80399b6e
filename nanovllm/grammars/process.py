"""The other process of trial.py: does what it is told, each time in a child of its own, which the limits end.

Run as a script: it imports llguidance and nothing of this package, so it is ready in a tenth of a second. Its
arguments: seconds of a processor and bytes of memory that a child may take, and llguidance's limits as JSON.
"""

import json
import os
import resource
import signal
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from


class Bytes:
    """A tokenizer whose tokens are bytes: what llguidance bounds badly does not depend on the tokens."""

    eos_token_id, bos_token_id = 256, None
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]  # noqa: RUF012
    special_token_ids = [256]  # noqa: RUF012

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())


SECONDS, MAX_BYTES, LIMITS = float(sys.argv[1]), int(sys.argv[2]), LLParserLimits(**json.loads(sys.argv[3]))
TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def attempt(kind: str, text: str) -> tuple[str, str]:
    """(result, error)."""
    try:
        if kind == "convert":
            return grammar_from("grammar", text), ""
        matcher = LLMatcher(TOKENIZER, text, log_level=0, limits=LIMITS)
        error = matcher.get_error()
        matcher.compute_bitmask()  # a failure here is one of the first token: it is explained in the other process
        return "", error
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error.__context__ or error, MemoryError):
            os._exit(1)
        return "", str(error) or type(error).__name__


def child(line: str) -> None:
    """Answer with a line on stdout and end. Or be ended by the system: nobody's code is asked."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Rust tells of the memory that it did not get
    os.nice(5)  # those who are being answered come first
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        with open("/proc/self/statm") as file:
            num_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes + MAX_BYTES,) * 2)
    except OSError:  # macOS bounds no memory: there the time has to do
        pass
    answer = attempt(*json.loads(line))
    signal.setitimer(signal.ITIMER_PROF, 0)
    print(json.dumps(answer), flush=True)
    os._exit(0)


print("ready", flush=True)
for line in sys.stdin:
    if (pid := os.fork()) == 0:
        child(line)
    _, status = os.waitpid(pid, 0)
    if status:
        print("null", flush=True)
