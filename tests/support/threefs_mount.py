"""A FUSE mount over a directory with the habits of 3FS's (3FS: src/fuse/FuseConfig.h,
design notes), for tests of the `3fs:` store where no RDMA network is.

- names and attributes are cached by the kernel for NAMES_S, absent names for ABSENT_S:
  what another client makes meanwhile is not seen;
- the length of a file another client writes is seen when that client has closed it;
- extended attributes are refused; locks are the kernel's own and reach no other host;
- rename replaces what is there.

Another client is whoever works in the backing directory itself.

    python -m tests.support.threefs_mount BACKING MOUNTPOINT      until it is unmounted
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

NAMES_S = 30
ABSENT_S = 5


def why_no_fuse() -> str:
    """What is missing for a FUSE mount here; "" if nothing is."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no usable /dev/fuse"
    try:
        import pyfuse3  # noqa: F401
    except ImportError:
        return "pyfuse3 is not installed"
    return ""


@contextlib.contextmanager
def threefs_mount(backing: Path, at: Path) -> Iterator[Path]:
    """Mount, and unmount again whatever happens."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.threefs_mount", str(backing), str(at)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while not os.path.ismount(at):
            if child.poll() is not None or time.monotonic() > deadline:
                raise TimeoutError(f"no FUSE mount at {at} (exit status {child.poll()})")
            time.sleep(0.02)
        yield at
    finally:
        for command in (["fusermount3", "-u", "-z", str(at)], ["umount", "-l", str(at)]):
            if os.path.ismount(at):
                subprocess.run(command, capture_output=True, check=False)
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def serve(backing: str, at: str) -> None:
    import pyfuse3
    import trio

    class Mount(pyfuse3.Operations):
        """Inode numbers are those of the backing file system; paths are remembered."""

        def __init__(self) -> None:
            super().__init__()
            self.paths: dict[int, set[str]] = {pyfuse3.ROOT_INODE: {backing}}

        def path(self, inode: int) -> str:
            for path in self.paths.get(inode, ()):
                if os.path.lexists(path):
                    return path
            raise pyfuse3.FUSEError(errno.ESTALE)

        def below(self, parent: int, name: bytes) -> str:
            return os.path.join(self.path(parent), os.fsdecode(name))

        def attributes(self, path: str) -> pyfuse3.EntryAttributes:
            with translated():
                info = os.lstat(path)
            entry = pyfuse3.EntryAttributes()
            for name in ("st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size",
                         "st_atime_ns", "st_mtime_ns", "st_ctime_ns", "st_blocks"):  # fmt: skip
                setattr(entry, name, getattr(info, name))
            entry.st_blksize = 4096
            entry.st_ino = pyfuse3.ROOT_INODE if path == backing else info.st_ino
            entry.entry_timeout = entry.attr_timeout = NAMES_S
            self.paths.setdefault(entry.st_ino, set()).add(path)
            return entry

        async def lookup(self, parent, name, ctx=None):  # type: ignore[no-untyped-def]
            path = self.below(parent, name)
            if not os.path.lexists(path):
                absent = pyfuse3.EntryAttributes()
                absent.st_ino = 0
                absent.entry_timeout = ABSENT_S
                return absent
            return self.attributes(path)

        async def getattr(self, inode, ctx=None):  # type: ignore[no-untyped-def]
            return self.attributes(self.path(inode))

        async def setattr(self, inode, attr, fields, fh, ctx):  # type: ignore[no-untyped-def]
            path = self.path(inode)
            with translated():
                if fields.update_size:
                    os.truncate(path, attr.st_size)
                if fields.update_mode:
                    os.chmod(path, stat.S_IMODE(attr.st_mode))
                if fields.update_mtime:
                    os.utime(path, ns=(attr.st_mtime_ns, attr.st_mtime_ns))
            return self.attributes(path)

        async def mkdir(self, parent, name, mode, ctx):  # type: ignore[no-untyped-def]
            path = self.below(parent, name)
            with translated():
                os.mkdir(path, mode)
            return self.attributes(path)

        async def rmdir(self, parent, name, ctx):  # type: ignore[no-untyped-def]
            with translated():
                os.rmdir(self.below(parent, name))

        async def unlink(self, parent, name, ctx):  # type: ignore[no-untyped-def]
            with translated():
                os.unlink(self.below(parent, name))

        async def link(self, inode, new_parent, name, ctx):  # type: ignore[no-untyped-def]
            path = self.below(new_parent, name)
            with translated():
                os.link(self.path(inode), path)
            return self.attributes(path)

        async def rename(self, old_parent, old, new_parent, new, flags, ctx):  # type: ignore[no-untyped-def]
            if flags:
                raise pyfuse3.FUSEError(errno.EINVAL)
            source, target = self.below(old_parent, old), self.below(new_parent, new)
            with translated():
                os.rename(source, target)
            for paths in self.paths.values():
                if source in paths:
                    paths.add(target)

        async def opendir(self, inode, ctx):  # type: ignore[no-untyped-def]
            return inode

        async def readdir(self, fh, start, token):  # type: ignore[no-untyped-def]
            base = self.path(fh)
            names: Sequence[str] = sorted(os.listdir(base))
            for i, name in enumerate(names[start:], start + 1):
                try:
                    entry = self.attributes(os.path.join(base, name))
                except pyfuse3.FUSEError:
                    continue
                if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, i):
                    return

        async def create(self, parent, name, mode, flags, ctx):  # type: ignore[no-untyped-def]
            path = self.below(parent, name)
            with translated():
                fd = os.open(path, flags | os.O_CREAT, mode)
            return pyfuse3.FileInfo(fh=fd), self.attributes(path)

        async def open(self, inode, flags, ctx):  # type: ignore[no-untyped-def]
            with translated():
                return pyfuse3.FileInfo(fh=os.open(self.path(inode), flags & ~os.O_CREAT))

        async def read(self, fh, off, size):  # type: ignore[no-untyped-def]
            with translated():
                return os.pread(fh, size, off)

        async def write(self, fh, off, buf):  # type: ignore[no-untyped-def]
            with translated():
                return os.pwrite(fh, buf, off)

        async def fsync(self, fh, datasync):  # type: ignore[no-untyped-def]
            with translated():
                os.fsync(fh)

        async def fsyncdir(self, fh, datasync):  # type: ignore[no-untyped-def]
            return

        async def flush(self, fh):  # type: ignore[no-untyped-def]
            return

        async def release(self, fh):  # type: ignore[no-untyped-def]
            os.close(fh)

        async def setxattr(self, inode, name, value, ctx):  # type: ignore[no-untyped-def]
            raise pyfuse3.FUSEError(errno.ENOTSUP)

        async def getxattr(self, inode, name, ctx):  # type: ignore[no-untyped-def]
            raise pyfuse3.FUSEError(errno.ENOTSUP)

        async def listxattr(self, inode, ctx):  # type: ignore[no-untyped-def]
            raise pyfuse3.FUSEError(errno.ENOTSUP)

        async def statfs(self, ctx):  # type: ignore[no-untyped-def]
            info = os.statvfs(backing)
            out = pyfuse3.StatvfsData()
            for name in ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files",
                         "f_ffree", "f_favail"):  # fmt: skip
                setattr(out, name, getattr(info, name))
            return out

    @contextlib.contextmanager
    def translated() -> Iterator[None]:
        try:
            yield
        except OSError as e:
            raise pyfuse3.FUSEError(e.errno or errno.EIO) from None

    options = set(pyfuse3.default_options) | {"fsname=threefs-imitation"}
    pyfuse3.init(Mount(), at, options)
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
