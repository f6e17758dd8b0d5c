"""A sandbox of the test's own: user, mount and pid namespaces, a root of its own, nothing of ours.

Its root directory has the host's /usr read-only and /dev/fuse, so that hostile programs can be
written in Python and shell; it is owned by a range of ids that nothing else uses.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsec_runtime.edge.backend import Place

FIRST_ID = 1_900_000_000
"""Far above the ranges that sandboxes get."""
IDS = 65536
USER = 1000

_MAKE = r"""
import ctypes, os, sys
root = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
def check(result):
    if result:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
def mount(source, target, kind, flags, data=b""):
    check(libc.mount(source, target, kind, ctypes.c_ulong(flags), data))
BIND, REC, PRIVATE, REMOUNT, RDONLY = 4096, 16384, 1 << 18, 32, 1
NEWNS, NEWUSER, NEWPID = 0x20000, 0x10000000, 0x20000000
check(libc.prctl(1, 9, 0, 0, 0))
check(libc.unshare(NEWUSER | NEWNS | NEWPID))
print("unshared", flush=True)
sys.stdin.readline()
os.setgroups([]); os.setresgid(0, 0, 0); os.setresuid(0, 0, 0)
check(libc.prctl(1, 9, 0, 0, 0))
pid = os.fork()
if pid:
    print(pid, flush=True)
    os.waitpid(pid, 0)
    sys.exit()
check(libc.prctl(1, 9, 0, 0, 0))
top = root.encode()
mount(b"none", b"/", None, REC | PRIVATE)
mount(top, top, None, BIND | REC)
os.chdir(root)
mount(b"/usr", b"usr", None, BIND | REC)
mount(b"/dev/fuse", b"dev/fuse", None, BIND)
mount(b"/dev/null", b"dev/null", None, BIND)
mount(b"proc", b"proc", b"proc", 0)
mount(b"tmpfs", b"tmp", b"tmpfs", 0, b"size=4m,nr_inodes=200,mode=1777")
check(libc.syscall(155, b".", b"."))
check(libc.umount2(b".", 2))
os.chdir("/")
os.write(1, b"ready\n")
null = os.open("/dev/null", os.O_RDWR)
for fd in (0, 1):
    os.dup2(null, fd)
os.execv("/usr/bin/sleep", ["sleep", "600"])
"""


@dataclass
class OwnSpace:
    """What runs; `root` is its root directory as the host sees it."""

    root: Path
    pid: int
    started: int

    def place(self, user: int = USER, *, cwd: str = "/work", groups: tuple[int, ...] = ()) -> Place:
        return Place(self.pid, self.started, user, user, groups, cwd)

    def inside(self, *command: str, user: int = USER) -> list[str]:
        """The command line that runs a command in it."""
        enter = ["nsenter", f"--target={self.pid}", "--user", "--mount", "--pid", "--root"]
        return [*enter, "--wd", f"--setuid={user}", f"--setgid={user}", "--", *command]

    def sh(self, script: str, user: int = USER) -> str:
        """Standard output of a shell script that must succeed."""
        done = subprocess.run(
            self.inside("/bin/sh", "-ec", script, user=user),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    @contextlib.contextmanager
    def running(self, *command: str, user: int = USER) -> Iterator[subprocess.Popen[bytes]]:
        """A command in it, killed at the end of the block."""
        with subprocess.Popen(
            self.inside(*command, user=user), stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        ) as process:
            try:
                yield process
            finally:
                for child in _children(process.pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(child, 9)
                process.kill()

    def python(
        self, script: str, *args: str, user: int = USER
    ) -> contextlib.AbstractContextManager[subprocess.Popen[bytes]]:
        return self.running("/usr/bin/python3", "-Ec", script, *args, user=user)


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def why_no_own_space() -> str:
    """What is missing to make one here; "" if nothing is."""
    for path in ("/usr/bin/nsenter", "/usr/bin/python3", "/dev/fuse"):
        if not Path(path).exists():
            return f"no {path}"
    return ""


@contextlib.contextmanager
def own_space(root: Path) -> Iterator[OwnSpace]:
    """Make one in the directory `root`; it is gone at the end."""
    for name in ("usr", "dev", "proc", "tmp", "work", "etc", "root"):
        (root / name).mkdir()
    for name in ("bin", "lib", "lib64", "sbin"):
        if Path("/", name).is_symlink():
            (root / name).symlink_to(os.readlink(f"/{name}"))
    for name in ("fuse", "null"):
        (root / "dev" / name).touch()
    for path, user in [(root, 0), *((path, 0) for path in root.iterdir())]:
        os.lchown(path, FIRST_ID + user, FIRST_ID + user)
    os.chown(root / "work", FIRST_ID + USER, FIRST_ID + USER)
    (root / "root").chmod(0o700)
    maker = subprocess.Popen(
        [sys.executable, "-c", _MAKE, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with maker:
        try:
            assert maker.stdin is not None and maker.stdout is not None
            assert maker.stdout.readline() == b"unshared\n"
            for kind in ("uid_map", "gid_map"):
                Path(f"/proc/{maker.pid}/{kind}").write_text(f"0 {FIRST_ID} {IDS}")
            maker.stdin.write(b"\n")
            maker.stdin.flush()
            pid = int(maker.stdout.readline())
            assert maker.stdout.readline() == b"ready\n"
            started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
            yield OwnSpace(root, pid, started)
        finally:
            for child in _children(maker.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, 9)
            maker.kill()
