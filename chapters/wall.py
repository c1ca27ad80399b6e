"""Wall: what a submission may still do to the machine where a class is graded. Standard library only.

Linux has Landlock: a thread says where it will write and whom it will signal, and neither it nor what it starts can
take that back. Where there is none (other systems, older kernels) a submission has its grader's rights.
"""

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

assert sys.platform != "win32", "see examine.py"

MOST_MEMORY = 4 << 30  # bytes above what the process has when the engine is loaded
MOST_IN_A_FILE = 256 << 20  # bytes

# linux/landlock.h; the three calls have these numbers on every processor.
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
GET_VERSION, PATH_BENEATH, NO_NEW_PRIVILEGES = 1, 1, 38
OF_FILES = 1 << 1 | 1 << 14  # write into one, cut one off
OF_FOLDERS = OF_FILES | sum(1 << bit for bit in range(4, 14))  # remove, make and move what is in it
READS_FILE = 1 << 2
READS = READS_FILE | 1 << 3  # and list a folder
SIGNALS = 1 << 1  # only to what is behind the wall, too
WITH_TRUNCATE, WITH_SIGNALS = 3, 6  # versions


def wall_in(folder: str, may_read: Iterable[str] = ()) -> None:
    """This thread, and all that it will start, may use so much, and, where the system can do that, writes only here.

    may_read: files and folders; if any is named, it reads nothing else.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_IN_A_FILE, MOST_IN_A_FILE))
    if sys.platform == "linux":
        in_use = int(Path("/proc/self/statm").read_text("utf-8").split()[5]) * resource.getpagesize()
        with suppress(ValueError):  # there is a lower limit already
            resource.setrlimit(resource.RLIMIT_DATA, (in_use + MOST_MEMORY, in_use + MOST_MEMORY))
    if (version := landlock_version()) >= WITH_TRUNCATE:
        rights = {folder: OF_FOLDERS, "/dev/shm": OF_FOLDERS, "/dev/null": OF_FILES}
        if may_read:
            rights = dict.fromkeys(may_read, READS) | {path: right | READS for path, right in rights.items()}
        _restrict(rights, version, OF_FOLDERS | (READS if may_read else 0))


def landlock_version() -> int:
    """0 where there is none."""
    return max(_call(CREATE_RULESET, None, 0, GET_VERSION), 0) if sys.platform == "linux" else 0


def _restrict(allowed: dict[str, int], version: int, handled_rights: int) -> None:
    """Take these rights, and give those of each of these paths back."""
    if sys.platform != "linux":
        raise OSError("Landlock is Linux's")
    handled = struct.pack("Q", handled_rights) + (struct.pack("QQ", 0, SIGNALS) if version >= WITH_SIGNALS else b"")
    rules = _call(CREATE_RULESET, handled, len(handled), 0)
    for path, rights in allowed.items():
        if os.path.exists(path):
            if not os.path.isdir(path):
                rights &= OF_FILES | READS_FILE
            fd = os.open(path, os.O_PATH)
            _call(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", rights, fd), 0)
            os.close(fd)
    ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    _call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def _call(*numbers: int | bytes | None) -> int:
    return ctypes.CDLL(None, use_errno=True).syscall(*numbers)
