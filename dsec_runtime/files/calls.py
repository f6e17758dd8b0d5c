"""System calls of children that Python has no function for. All raise OSError.

Numbers: include/uapi/linux/{prctl,capability,inotify,fs,magic}.h of Linux 6.12.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_NAME = 15
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4

_CAPABILITY_VERSION_3 = 0x20080522
_ARG_START, _ARG_END = 48, 49
"""Fields of /proc/PID/stat, from 1 (proc_pid_stat(5))."""

_RENAME_NOREPLACE = 1

IN_CLOEXEC = os.O_CLOEXEC
IN_NONBLOCK = os.O_NONBLOCK
IN_MODIFY = 0x2
IN_ATTRIB = 0x4
IN_CLOSE_WRITE = 0x8
IN_MOVED_FROM = 0x40
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
IN_DELETE = 0x200
IN_DELETE_SELF = 0x400
IN_MOVE_SELF = 0x800
IN_UNMOUNT = 0x2000
IN_Q_OVERFLOW = 0x4000
IN_IGNORED = 0x8000
IN_ONLYDIR = 0x1000000
IN_DONT_FOLLOW = 0x2000000
IN_EXCL_UNLINK = 0x4000000
IN_ISDIR = 0x40000000

_KERNEL_TREES = {
    0x9FA0,  # proc
    0x62656572,  # sysfs
    0x27E0EB,  # cgroup
    0x63677270,  # cgroup2
    0x1CD1,  # devpts
    0x64626720,  # debugfs
    0x74726163,  # tracefs
    0x73636673,  # securityfs
    0xCAFE4A11,  # bpf
    0x19800202,  # mqueue
    0x42494E4D,  # binfmt_misc
    0x6E736673,  # nsfs
}
"""File systems whose files are no data."""


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _prctl(what: str, option: int, *args: int) -> None:
    values = [ctypes.c_ulong(value) for value in (*args, 0, 0, 0, 0)[:4]]
    _checked(_libc.prctl(option, *values), what)


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """The kernel forgets it at every change of credentials (prctl(2))."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, number)


def hide_memory() -> None:
    """Nobody without capabilities in the user namespace of our program may look at this process:
    its memory, descriptors, program, environment, root. Children have it too."""
    _prctl("PR_SET_DUMPABLE", _PR_SET_DUMPABLE, 0)


def hide_arguments() -> None:
    """Zeros in /proc/PID/cmdline, which anybody in the same pid namespace may read: it has paths of
    the host. The kernel shows that memory itself; Python has copied it long since."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = (int(fields[number - 3]) for number in (_ARG_START, _ARG_END))
    ctypes.memset(start, 0, end - start)


def set_name(name: bytes) -> None:
    buffer = ctypes.create_string_buffer(name[:15])
    _checked(_libc.prctl(_PR_SET_NAME, buffer, 0, 0, 0), "PR_SET_NAME")


def no_new_privileges() -> None:
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def drop_bounding_set(last: int) -> None:
    """No program executed later can give the capabilities 0 to `last` back."""
    for number in range(last + 1):
        _prctl("PR_CAPBSET_DROP", _PR_CAPBSET_DROP, number)
    _prctl("PR_CAP_AMBIENT", _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)


def drop_capabilities() -> None:
    """Effective, permitted and inheritable ones."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, bytes(24)), "capset")


def rename_noreplace(source_dir: int, source: bytes, target_dir: int, target: bytes) -> None:
    """renameat2(2) with RENAME_NOREPLACE. FileExistsError."""
    _checked(
        _libc.renameat2(source_dir, source, target_dir, target, _RENAME_NOREPLACE), "renameat2"
    )


def is_kernel_tree(fd: int) -> bool:
    """Whether the directory lies in /proc, /sys or their like (fstatfs(2), f_type)."""
    buffer = ctypes.create_string_buffer(256)
    _checked(_libc.fstatfs(fd, buffer), "fstatfs")
    kind: int = struct.unpack_from("@l", buffer)[0]
    return kind & 0xFFFFFFFF in _KERNEL_TREES


def inotify_init() -> int:
    return _checked(_libc.inotify_init1(IN_CLOEXEC | IN_NONBLOCK), "inotify_init1")


def inotify_add_watch(fd: int, path: bytes, mask: int) -> int:
    return _checked(_libc.inotify_add_watch(fd, path, ctypes.c_uint32(mask)), "inotify_add_watch")


def inotify_rm_watch(fd: int, watch: int) -> None:
    _checked(_libc.inotify_rm_watch(fd, watch), "inotify_rm_watch")
