"""A pytest plugin that takes away what only Linux has: `PYTHONPATH=tests pytest -p support.portable tests/unit`.

The unit tests then run as on macOS and Windows: without `os.sched_getaffinity`, `os.pread`, `os.fork`, the modules
`resource` and `fcntl` (for this package: others import them where `sys.platform` is linux), /proc and /sys, signals
beyond those of C, and folders that can be opened.
"""

import builtins
import io
import multiprocessing
import os
import signal
import sys

import torch.distributed.checkpoint  # noqa: F401  torch asks for the platform's name when it is imported

REMOVED = {
    os: ("sched_getaffinity", "pread", "preadv", "fork", "forkpty", "getloadavg", "posix_fadvise"),
    signal: ("SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm", "setitimer", "pthread_kill"),
}
MODULES = ("resource", "fcntl", "pwd", "grp")
LINUX = ("/proc", "/sys")

_open, _io_open, _get_context, _import = os.open, io.open, multiprocessing.get_context, builtins.__import__


def open_no_folder(path, flags, *arguments, **options):
    """As on Windows, where a folder has no descriptor; `shutil.rmtree`, which names `dir_fd`, is left to work."""
    if "dir_fd" not in options and isinstance(path, str | os.PathLike) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return _open(path, flags, *arguments, **options)


def open_no_linux(file, *arguments, **options):
    """What `pathlib` opens; files of the Linux kernel do not exist."""
    if isinstance(file, str | os.PathLike) and os.fspath(file).startswith(LINUX):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return _io_open(file, *arguments, **options)


def import_portable(name, globals=None, *arguments, **options):
    """Refuse the package the modules that are not everywhere."""
    if name in MODULES and str((globals or {}).get("__name__")).partition(".")[0] in ("arpg", "experiments"):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _import(name, globals, *arguments, **options)


def get_context(method=None):
    """Processes are spawned."""
    if method in ("fork", "forkserver"):
        raise ValueError(f"cannot find context for {method!r}")
    return _get_context("spawn")


def take_away():
    """Remove it all; the package must not be imported yet."""
    assert "arpg" not in sys.modules
    for module, names in REMOVED.items():
        for name in names:
            if hasattr(module, name):
                delattr(module, name)
    builtins.__import__ = import_portable
    os.open, io.open, multiprocessing.get_context = open_no_folder, open_no_linux, get_context


take_away()  # pytest imports plugins before it imports conftest.py


def pytest_report_header():
    """Say so at the top of the report."""
    return "portable: without what only Linux has"
