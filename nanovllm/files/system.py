"""What operating systems do each in their own way: memory, locks of files. No torch.

Tests run Windows' branches on stand-ins (tests/pretend.py); nobody has run them on Windows.
"""

import ctypes
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # of the file system; made once, as each step asks
MAPPED_BYTES = 16 << 20  # of a mapped file of weights: so many stay in memory after they have been read
LOCKED_BYTE = (1 << 31) - 2  # far beyond what is read: Windows lets nobody else read bytes that are locked
RETRY_S = 0.1
# Version of cgroups -> files: a limit in bytes, and the bytes in use; and of memory.stat, what of them is cached files.
MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


class MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows' sysinfoapi.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("length", "load_percent")),
        *((name, ctypes.c_uint64) for name in ("physical", "free_physical", "committable", "free_committable")),
        *((name, ctypes.c_uint64) for name in ("addresses", "free_addresses", "reserved")),
    )


def installed_bytes(root: Path = ROOT) -> int:
    """Bytes of memory that the machine has, or that the cgroup of this process (a container) may take if less."""
    if sys.platform == "win32":
        return _memory_status().physical
    else:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min([physical, *(limit for limit, _ in _cgroup_memory(root))])


def available_bytes(root: Path = ROOT) -> int:
    """Memory available without swapping, in the machine and in the cgroup of this process.

    Half of the installed memory where the system does not report it (macOS).
    """
    if sys.platform == "win32":
        status = _memory_status()
        return min(status.free_physical, status.free_committable)
    try:
        with open(root / "proc/meminfo", encoding="utf-8") as meminfo:
            fields = dict(line.split(":") for line in meminfo)
        available = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return installed_bytes(root) // 2
    return min([available, *(max(0, limit - used) for limit, used in _cgroup_memory(root))])


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use) of each cgroup around this process that limits memory.

    Cached files that nobody has read again are not counted: the kernel drops them before it kills anybody.
    """
    for version, folder in cgroup_folders("memory", root):
        limit_file, usage_file, cached = MEMORY_FILES[version]
        with suppress(OSError, ValueError):  # no such file; "max": no limit
            limit = int((folder / limit_file).read_text("utf-8"))
            usage = int((folder / usage_file).read_text("utf-8"))
            stat = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
            yield limit, usage - int(stat.get(cached, 0))


def cgroup_folders(controller: str, root: Path) -> Iterator[tuple[int, Path]]:
    """(version of cgroups: 1 or 2, folder) of this process's cgroup and of each above it. controller: "cpu", "memory".

    Some of the folders may not exist: a container sees its own group at the top, and is told its path outside.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text("utf-8").splitlines()
    except OSError:  # there are no cgroups
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        names = path.strip("/").split("/")
        for depth in range(len(names) + 1):
            folder = (root / "sys/fs/cgroup" / controllers).joinpath(*names[:depth])
            yield (1 if controllers else 2), folder


def _memory_status() -> MemoryStatus:
    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    if sys.platform == "win32" and not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("Windows does not say how much memory there is")
    return status


def peak_memory_bytes() -> int:
    """The most that this process has had at a time; 0 on Windows."""
    if sys.platform == "win32":
        return 0
    else:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def open_for_owner(path: str, flags: int) -> int:
    """open()'s opener: a file that is made is its owner's alone."""
    return os.open(path, flags, 0o600)


def lock_file(fd: int, wait: bool = True) -> None:
    """Keep other processes out of here until the file is closed. BlockingIOError if one is in, unless this may wait."""
    if sys.platform != "win32":
        import fcntl

        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise BlockingIOError("another process has locked the file") from error
    else:
        import msvcrt

        position = os.lseek(fd, 0, os.SEEK_CUR)
        while True:
            os.lseek(fd, LOCKED_BYTE, os.SEEK_SET)
            try:
                return msvcrt.locking(fd, msvcrt.LK_NBLCK, 1)
            except PermissionError as error:
                if not wait:
                    raise BlockingIOError("another process has locked the file") from error
            finally:
                os.lseek(fd, position, os.SEEK_SET)
            time.sleep(RETRY_S)
