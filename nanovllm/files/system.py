"""What operating systems do each in their own way: memory, locks of files. No torch.

Tests run Windows' branches on stand-ins (tests/pretend.py); nobody has run them on Windows.
"""

import ctypes
import os
import sys
import time

MAPPED_BYTES = 16 << 20  # of a mapped file of weights: so many stay in memory after they have been read
LOCKED_BYTE = (1 << 31) - 2  # far beyond what is read: Windows lets nobody else read bytes that are locked
RETRY_S = 0.1


class MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows' sysinfoapi.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("length", "load_percent")),
        *((name, ctypes.c_uint64) for name in ("physical", "free_physical", "committable", "free_committable")),
        *((name, ctypes.c_uint64) for name in ("addresses", "free_addresses", "reserved")),
    )


def installed_bytes() -> int:
    """Bytes of memory that the machine has."""
    if sys.platform == "win32":
        return _memory_status().physical
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_bytes() -> int:
    """Memory available without swapping; half of the installed memory where the system does not report it (macOS)."""
    if sys.platform == "win32":
        status = _memory_status()
        return min(status.free_physical, status.free_committable)
    try:
        with open("/proc/meminfo", encoding="utf-8") as meminfo:
            fields = dict(line.split(":") for line in meminfo)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return installed_bytes() // 2


def _memory_status() -> MemoryStatus:
    status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
    if sys.platform == "win32" and not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise OSError("Windows does not say how much memory there is")
    return status


def peak_memory_bytes() -> int:
    """The most that this process has had at a time; 0 on Windows."""
    if sys.platform == "win32":
        return 0
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
