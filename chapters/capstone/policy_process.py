"""The process that a policy runs in: python -I -S policy_process.py, started by remote.py.

It has a few modules of the standard library, the policy's text and the numbers of the moment. There is no trace here,
and no engine. What a policy has no use for (files, processes, the network, the collector's list of objects) is reported
and ends the process: an audit hook sees it before it is done, and no Python code can take such a hook away.
"""

import json
import os
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType
from typing import Any

# A policy may import these. They are loaded before it is, so that nothing has to be opened for them.
LIBRARY = """__future__ abc bisect collections collections.abc contextlib copy dataclasses enum functools heapq
    itertools json math operator random re string textwrap time traceback types typing""".split()
PREFIXES = ("os.", "subprocess.", "socket.", "ctypes.", "gc.", "mmap.", "shutil.", "resource.", "signal.", "sys.set")
MEMORY_BYTES = 1 << 30  # beside what the process has at rest


def load(path: str, name: str) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def watch(say: Callable[..., None], name: str) -> None:
    """From now on, whatever has no place in a policy is said and ends the process."""
    end, library = os._exit, os.path.realpath(sysconfig.get_path("stdlib"))
    absolute, separator = os.path.abspath, os.sep
    binary = os.path.realpath(sysconfig.get_config_var("DESTSHARED") or library)

    def of_the_library(path: Any) -> bool:
        """Where an error's line is read from, to be quoted."""
        full = absolute(path) if isinstance(path, str) else ""
        inside = full.startswith((library + separator, binary + separator)) or full in (library, binary)
        return inside and "site-packages" not in full and "dist-packages" not in full

    def hook(event: str, found: tuple[Any, ...]) -> None:
        what = ""
        if event == "open":
            path, _, flags = found
            writes = flags & 3 if isinstance(flags, int) else 1
            if path != name and (writes or not of_the_library(path)):  # Python looks for it to quote a line
                what = f"it opens {path!r:.200}"
        elif event in ("os.listdir", "os.scandir"):
            if not of_the_library(found[0]):
                what = f"it looks into the folder {found[0]!r:.200}"
        elif event == "import":
            what = f"it imports {found[0]!s:.200}; there are {', '.join(LIBRARY)}"
        elif event.startswith(PREFIXES) or event in ("sys._current_frames", "code.__new__"):
            what = f"it calls {event}"
        elif event == "object.__setattr__" and found[1] == "__code__":
            what = "it puts other code into a function"
        if what:
            say(refused=what)
            end(3)

    sys.addaudithook(hook)


def bound(seconds: int) -> None:
    """No core file, no large files, so much memory, so much time of a processor. Windows has none of these."""
    if sys.platform == "win32":
        return
    import resource

    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 1 << 24, resource.RLIMIT_CPU: seconds}
    limits[resource.RLIMIT_AS] = MEMORY_BYTES
    for which, most in limits.items():
        with suppress(ValueError, OSError):  # macOS bounds no memory
            resource.setrlimit(which, (most, most))
    del sys.modules["resource"]


def main(folder: str) -> None:
    channel, write, dumps = os.dup(1), os.write, json.dumps
    os.dup2(2, 1)  # what the policy prints is no answer

    def say(**message: Any) -> None:
        line = memoryview(f"{dumps(message)}\n".encode())
        while line:
            line = line[write(channel, line) :]

    orders = json.loads(sys.stdin.readline())
    for package in ("chapters", "chapters.capstone"):
        sys.modules[package] = ModuleType(package)
    load(os.path.join(folder, "views.py"), "chapters.capstone.views")
    desk_module = load(os.path.join(folder, "desk.py"), "chapters.capstone.desk")
    submission = load(os.path.join(os.path.dirname(folder), "submission.py"), "submission_tools")
    for module in LIBRARY:
        import_module(module)
    bound(orders["seconds"])
    name = orders["name"]
    watch(say, name)
    try:
        try:
            policy_class = vars(submission.load_submission(orders["source"], name, "policy")).get("Policy")
        except submission.NotLoaded as error:
            return say(problem=str(error))
        if policy_class is None:
            return say(problem="it has no class Policy")
        desk = desk_module.Desk(policy_class, orders["setup"])
        say()
        for line in sys.stdin:
            say(**desk.answer(json.loads(line)))
    except BaseException as error:  # SystemExit, too
        say(problem=f"your policy led to {submission.describe(error, name)}")


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
