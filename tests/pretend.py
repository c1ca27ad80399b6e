"""What other systems lack, hidden from this project's modules; others (torch, the standard library) see what is here.

pretend("win32") or pretend("darwin"), before any module of the project is imported. What Windows alone has is there as
a stand-in: msvcrt's locks, the call that says how much memory there is. `pyrefly check` finds the same without running.
"""

import builtins
import ctypes
import fcntl
import importlib
import io
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
OURS = ("nanovllm", "chapters", "examples")
FOLDERS = {"win32": ("/proc", "/sys", "/dev/fd", "/dev/shm"), "darwin": ("/proc", "/sys", "/dev/shm")}
MODULES = {"win32": "fcntl resource termios tty pty pwd grp syslog readline curses posix", "darwin": ""}
HIDDEN = {  # as typeshed has it
    "win32": {
        "os": """fork forkpty register_at_fork wait wait3 wait4 waitid WIFSIGNALED WTERMSIG WNOHANG killpg setsid getsid
            setpgid getpgid getuid geteuid getgid nice uname sysconf statvfs sched_getaffinity sched_setaffinity
            pread pwrite preadv posix_fadvise posix_fallocate mkfifo chown fchown chroot getloadavg set_blocking
            O_NONBLOCK O_DIRECTORY O_CLOEXEC O_NOFOLLOW O_SYNC O_NOCTTY memfd_create sendfile""",
        "signal": """SIGKILL SIGALRM SIGUSR1 SIGUSR2 SIGHUP SIGPIPE SIGCHLD SIGSTOP SIGCONT SIGQUIT setitimer getitimer
            ITIMER_PROF ITIMER_REAL alarm pause pthread_sigmask pthread_kill sigwait siginterrupt""",
        "mmap": "MAP_PRIVATE MAP_ANONYMOUS MAP_ANON MAP_SHARED PROT_READ PROT_WRITE MADV_HUGEPAGE MADV_DONTNEED",
        "select": "poll epoll kqueue",
        "socket": "AF_UNIX SO_REUSEPORT socketpair fromfd",
        "time": "clock_gettime clock_settime pthread_getcpuclockid tzset",
        "asyncio": "open_unix_connection start_unix_server",
    },
    "darwin": {
        "os": "sched_getaffinity sched_setaffinity posix_fadvise memfd_create",
        "mmap": "MADV_HUGEPAGE",
        "select": "epoll",
        "signal": "sigwaitinfo sigtimedwait",
    },
}


class SeenFromThere(ModuleType):
    """A module without some of its names. What is written to it is written to the module."""

    def __init__(self, module: ModuleType, hidden: set[str], others: dict[str, Any]) -> None:
        vars(self).update(_module=module, _hidden=hidden, _others=others, __name__=module.__name__)

    def __getattr__(self, name: str) -> Any:
        if name in self._hidden:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r} on this system")
        return self._others[name] if name in self._others else getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._module, name, value)


def pretend(system: str) -> None:
    """From now on, to modules of this project that are imported."""
    seen = {
        name: SeenFromThere(importlib.import_module(name), set(names.split()), {})
        for name, names in HIDDEN[system].items()
    }
    seen["sys"] = SeenFromThere(sys, set(), {"platform": system})
    hidden = set(MODULES[system].split())
    if system == "win32":
        ctypes.windll = FakeKernel()
        sys.modules["msvcrt"] = FakeLocks("msvcrt")
        seen["ctypes"] = SeenFromThere(ctypes, set(), {"CDLL": windows_cdll})
    really_import = builtins.__import__

    def see(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> ModuleType:
        asks, file = (str((globals or {}).get(name, "")) for name in ("__name__", "__file__"))
        in_project = file.startswith(f"{ROOT}{os.sep}") and "site-packages" not in file  # of a .venv in the project
        if asks.split(".")[0] not in OURS and not in_project:
            return really_import(name, globals, locals, fromlist, level)
        if name in hidden and level == 0:
            raise ModuleNotFoundError(f"No module named {name!r} on this system", name=name)
        found = really_import(name, globals, locals, fromlist, level)
        return seen.get(name, found) if level == 0 else found

    builtins.__import__ = see
    hide_folders(FOLDERS[system])


def windows_cdll(name: Any, *arguments: Any, **options: Any) -> ctypes.CDLL:
    if name is None:
        raise TypeError("argument of type 'NoneType' is not iterable")  # as Windows' ctypes says
    return ctypes.CDLL(name, *arguments, **options)


class FakeKernel:
    """ctypes.windll.kernel32.GlobalMemoryStatusEx."""

    def __init__(self) -> None:
        self.kernel32 = self

    def GlobalMemoryStatusEx(self, reference: Any) -> int:
        status = reference._obj
        assert status.length == ctypes.sizeof(status) == 64  # sizeof(MEMORYSTATUSEX)
        status.physical = status.committable = 8 << 30
        status.free_physical, status.free_committable = 4 << 30, 3 << 30
        return 1


class FakeLocks(ModuleType):
    """msvcrt.locking(). A byte that another open file has locked cannot be locked, nor can anybody else read it."""

    LK_UNLCK, LK_LOCK, LK_NBLCK = 0, 1, 2

    def locking(self, fd: int, mode: int, num_bytes: int) -> None:
        assert mode == self.LK_NBLCK and num_bytes == 1
        at = os.lseek(fd, 0, os.SEEK_CUR)
        assert os.fstat(fd).st_size < at < 1 << 31, "position of the lock"
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None


def hide_folders(folders: tuple[str, ...]) -> None:
    really_open, really_list = io.open, os.listdir

    def is_hidden(path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and str(path).startswith(folders)

    def open_unless_hidden(path: Any, *arguments: Any, **options: Any) -> Any:
        if is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return really_open(path, *arguments, **options)

    def list_unless_hidden(path: Any = ".") -> list[str]:
        if is_hidden(path):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return really_list(path)

    builtins.open = io.open = open_unless_hidden
    os.listdir = list_unless_hidden
