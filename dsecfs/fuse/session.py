"""A FUSE session as libfuse has it: mounted, INIT answered, no request read yet.

libfuse keeps what it knows of a session in process memory, and learns it from one request,
INIT. So we mount ourselves, keep INIT with its answer, and let libfuse see it through a socket
in place of the connection: forks of that process can serve the session, and so can any process
that gets the connection and the kept INIT (`renew`). What must hold: no process reads a second
request before it is the worker. Empty handlers would answer ENOSYS, which the kernel
remembers for ever; and the first read would make a pipe that all forks then share.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import socket
import stat
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsecfs.errors import MountError
from dsecfs.fuse.config import FsConfig
from dsecfs.fuse.mountpoint import FUSERMOUNT_S, check_mountable, unmount
from dsecfs.kernel.syscalls import MS_RDONLY
from dsecfs.kernel.syscalls import mount as mount_2

FUSE_NOTIFY_RESEND = 7
"""include/uapi/linux/fuse.h, since 7.40 (Linux 6.9): ask unanswered requests again."""
_OUT_HEADER = struct.Struct("=IiQ")
"""struct fuse_out_header: len, error (the code of a notification), unique (0)."""
_IN_HEADER = struct.Struct("=IIQQIIII")
"""struct fuse_in_header: len, opcode, unique, nodeid, uid, gid, pid, padding."""
_FUSE_INIT = 26
_INIT_IN = struct.Struct("=5I")
"""struct fuse_init_in without its reserve: major, minor, max_readahead, flags, flags2."""
_INIT_OUT = struct.Struct("=4I")
"""The beginning of struct fuse_init_out: major, minor, max_readahead, flags."""
_FLAGS2_AT = 32
_READ_SIZE = (1 << 20) + 4096
"""The kernel refuses reads that the largest request would not fit in (fuse_dev_do_read)."""

INIT_LIMIT_S = 20.0
FSTYPE = "fuse.dsec"
"""What our mounts are in the mount table."""


@dataclass
class Session:
    """A mounted FUSE connection whose INIT is answered."""

    fuse_fd: int
    """The connection; libfuse knows it by this number."""
    shell: Any
    """The pyfuse3.Operations object that pyfuse3.init was given."""
    init: bytes
    """INIT as libfuse has to see it to know what was agreed with the kernel."""


def resend(fuse_fd: int) -> bool:
    """Have the kernel ask all unanswered requests again. False if it does not know how."""
    try:
        os.write(fuse_fd, _OUT_HEADER.pack(_OUT_HEADER.size, FUSE_NOTIFY_RESEND, 0))
    except OSError as e:
        if e.errno == errno.EINVAL:
            return False
        if e.errno not in (errno.ENOTCONN, errno.ENODEV, errno.ECONNABORTED):
            raise
    return True


def mount(config: FsConfig) -> Session:
    """Mount and answer INIT. MountError says what the kernel said."""
    check_mountable()
    where = f"mount FUSE at {config.mountpoint}"
    fuse_fd = _mount(config, where)
    try:
        poll = select.poll()
        poll.register(fuse_fd, select.POLLIN)
        if not poll.poll(INIT_LIMIT_S * 1000):
            raise MountError(f"{where}: no INIT in {INIT_LIMIT_S:.0f} s")
        request = os.read(fuse_fd, _READ_SIZE)
        if len(request) < _IN_HEADER.size or _IN_HEADER.unpack_from(request)[1] != _FUSE_INIT:
            raise MountError(f"{where}: the kernel's first request is not INIT")
        shell, number, answer = _show_to_libfuse(request, where)
        os.write(fuse_fd, answer)
    except BaseException as e:
        os.close(fuse_fd)
        unmount(Path(config.mountpoint), detach=True)
        if isinstance(e, OSError):
            raise MountError(f"{where}: INIT: {e.strerror}") from None
        raise
    os.dup2(fuse_fd, number, inheritable=False)
    os.close(fuse_fd)
    return Session(number, shell, agreed(request, answer))


def renew(fuse_fd: int, init: bytes) -> Session:
    """The session of a mounted connection, in a process that has it from elsewhere."""
    shell, number, _ = _show_to_libfuse(init, "take over a FUSE mount")
    os.dup2(fuse_fd, number, inheritable=False)
    os.close(fuse_fd)
    return Session(number, shell, init)


def agreed(request: bytes, answer: bytes) -> bytes:
    """An INIT that offers just what `answer` accepted of `request`: another version of libfuse
    cannot come to another agreement than the one the kernel acts on."""
    body = bytearray(request[_IN_HEADER.size :])
    major, minor, _, flags, flags2 = _INIT_IN.unpack_from(body)
    out = answer[_OUT_HEADER.size :]
    _, _, readahead, accepted = _INIT_OUT.unpack_from(out)
    accepted2 = struct.unpack_from("=I", out, _FLAGS2_AT)[0]
    _INIT_IN.pack_into(body, 0, major, minor, readahead, flags & accepted, flags2 & accepted2)
    return request[: _IN_HEADER.size] + bytes(body)


def _show_to_libfuse(request: bytes, where: str) -> tuple[Any, int, bytes]:
    """(operations object, the connection's number in libfuse, its answer to INIT)."""
    import pyfuse3
    import trio

    class Shell(pyfuse3.Operations):
        """What pyfuse3 calls. A worker puts its own handlers over these (worker.serve)."""

        enable_writeback_cache = False
        enable_acl = True
        supports_dot_lookup = False
        until_init: trio.CancelScope | None = None

        def init(self) -> None:
            # Called while INIT is answered. The cancelled loop raises at its next wait,
            # before it could read a second request.
            if self.until_init is not None:
                self.until_init.cancel()

    shell = Shell()
    kernel, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with kernel:
        number = ours.detach()
        try:
            # libfuse takes a connection that is open already by this name.
            pyfuse3.init(shell, f"/dev/fd/{number}", {"default_permissions"})

            async def answer_init() -> None:
                with trio.move_on_after(INIT_LIMIT_S), trio.CancelScope() as shell.until_init:
                    await pyfuse3.main(1, 1)

            kernel.send(request)
            trio.run(answer_init)
            shell.until_init = None
            kernel.settimeout(INIT_LIMIT_S)
            answer = kernel.recv(4096)
            length, code, _ = _OUT_HEADER.unpack_from(answer)
            if code or length != len(answer) or length < _OUT_HEADER.size + _FLAGS2_AT + 4:
                raise MountError(f"{where}: libfuse refuses INIT: {os.strerror(-code)}")
        except BaseException as e:
            os.close(number)
            if isinstance(e, RuntimeError | TimeoutError | struct.error):
                raise MountError(f"{where}: {e}", hint="see the log") from None
            raise
    return shell, number, answer


def _mount(config: FsConfig, where: str) -> int:
    """The descriptor of a new connection, mounted."""
    name = f"dsec:{config.tree or 'node'}"
    options = ["default_permissions", *(["allow_other"] if config.allow_other else [])]
    if os.geteuid() == 0:
        fuse_fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
        try:
            mode = stat.S_IFMT(os.stat(config.mountpoint).st_mode)
            fields = [f"fd={fuse_fd}", f"rootmode={mode:o}", "user_id=0", "group_id=0"]
            data = ",".join(fields + options)
            mount_2(name, config.mountpoint, FSTYPE, MS_RDONLY, data)
        except MountError as e:
            os.close(fuse_fd)
            if e.errno != errno.EPERM or shutil.which("fusermount3") is None:
                raise MountError(f"{where}: {os.strerror(e.errno)}", errno=e.errno) from None
        else:
            return fuse_fd
    return _fusermount(config.mountpoint, ["ro", f"fsname={name}", "subtype=dsec", *options], where)


def _fusermount(mountpoint: str, options: list[str], where: str) -> int:
    """Have fusermount3, which is setuid, mount; it sends the descriptor through a socket."""
    program = shutil.which("fusermount3")
    assert program is not None, "check_mountable found it"
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, its:
        try:
            done = subprocess.run(
                [program, "-o", ",".join(options), "--", mountpoint],
                check=False,
                capture_output=True,
                timeout=FUSERMOUNT_S,
                pass_fds=[its.fileno()],
                env={
                    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
                    "LC_ALL": "C",
                    "_FUSE_COMMFD": str(its.fileno()),
                },
            )
        except subprocess.TimeoutExpired:
            raise MountError(f"{where}: fusermount3 did not end in {FUSERMOUNT_S} s") from None
        found: list[int] = []
        if done.returncode == 0:
            ours.settimeout(FUSERMOUNT_S)
            with contextlib.suppress(TimeoutError):
                _, found, _, _ = socket.recv_fds(ours, 1, 1)
    if not found:
        said = done.stderr.decode(errors="replace").strip().replace("\n", "; ")
        raise MountError(
            f"{where}: {said or 'fusermount3 failed'}",
            hint="without root, allow_other needs user_allow_other in /etc/fuse.conf",
        )
    os.set_inheritable(found[0], False)
    return found[0]
