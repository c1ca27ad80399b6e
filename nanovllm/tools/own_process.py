"""A process that is ours alone ends without Python's teardown.

At its end Python takes apart, one by one, the half a million objects that importing torch and transformers has made.
That takes as long as importing torch did.
"""

import atexit
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from nanovllm.checks import callers


def run_as_process(main: Callable[[], int]) -> NoReturn:
    """main() is all that this process does, and returns its exit code.

    Whatever has been registered with atexit is called, and threads are waited for, as ever. Call it early: what was
    registered before is not called.
    """
    callers.keep_imports = True
    process = os.getpid()
    status = 1  # of an exception that comes out of main(): Python prints it before leave() is called

    def leave() -> None:
        if os.getpid() != process:  # a forked child, which has a status of its own
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # closed, or not there
                stream.flush()
        os._exit(status)

    atexit.register(leave)  # the first to be registered is the last to be called
    try:
        status = main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
        raise
    sys.exit(status)
