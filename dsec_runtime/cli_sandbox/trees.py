"""Local directories as tar streams, both ways, for `dsec sandbox cp`.

What must hold: an archive comes from a sandbox, so everything in it is hostile: nothing is
written outside the target directory, no symlink is followed on the way, no device, FIFO or
set-user-ID bit is made; whoever copies owns what is made. Packing reads each file once, and says
so when one became shorter meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dsecfs.errors import BadInput, Busy, UnsafeArchive
from dsecfs.store.beneath import open_beneath

_PIECE = 1 << 18
_BLOCK = tarfile.BLOCKSIZE
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def pack(top: Path, tell: Callable[[str], None]) -> Iterator[bytes]:
    """The tree below the directory `top` as tar; names are relative to it. `tell` is told what
    is left out: sockets, FIFOs and devices."""
    with tarfile.open(fileobj=io.BytesIO(), mode="w") as headers:  # for its memory of hard links
        for path in _walk(top):
            info = headers.gettarinfo(path, os.path.relpath(path, top))
            kind = stat.S_IFMT(os.lstat(path).st_mode)
            if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                tell(f"left out: {path}: {'a socket' if kind == stat.S_IFSOCK else 'a device'}")
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
            if info.isreg():
                yield from _content(path, info.size)
    yield bytes(2 * _BLOCK)


def _walk(top: Path) -> Iterator[str]:
    def failed(error: OSError) -> None:
        raise error

    yield str(top)
    for place, directories, files in os.walk(top, onerror=failed):
        directories.sort()
        for name in sorted(files) + directories:
            yield os.path.join(place, name)


def _content(path: str, size: int) -> Iterator[bytes]:
    left = size
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        while left:
            data = file.read(min(left, _PIECE))
            if not data:
                raise Busy(f"{path}: became shorter while it was copied", hint="copy it again")
            left -= len(data)
            yield data
    if size % _BLOCK:
        yield bytes(_BLOCK - size % _BLOCK)


class _Pieces(io.RawIOBase):
    """What comes piece by piece, as a file."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._held = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        """Exactly `count` bytes, fewer at the end."""
        parts, left = [], count
        while left:
            if not self._held:
                self._held = memoryview(next(self._pieces, b""))
                if not self._held:
                    break
            part = self._held[:left]
            self._held = self._held[len(part) :]
            parts.append(bytes(part))
            left -= len(part)
        return b"".join(parts)


def unpack(pieces: Iterable[bytes], target: Path, tell: Callable[[str], None]) -> int:
    """Make the tree of a tar stream in the directory `target`; how many files were made.

    UnsafeArchive at the first name that would lead elsewhere; what came before it stays.
    """
    count = 0
    modes: list[tuple[str, int]] = []
    root = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with tarfile.open(fileobj=_Pieces(pieces), mode="r|") as archive:
            for info in archive:
                name = _checked(info.name)
                if not name:
                    continue
                with_parent, _, last = name.rpartition("/")
                parent = _directories(root, with_parent)
                try:
                    if _make(archive, info, root, parent, last, tell):
                        count += 1
                    if info.isdir():
                        modes.append((name, info.mode & 0o777))
                finally:
                    os.close(parent)
        for name, mode in reversed(modes):
            fd = open_beneath(root, name, _DIRECTORY)
            os.fchmod(fd, mode)
            os.close(fd)
    except tarfile.TarError as e:
        raise BadInput(f"archive from the sandbox: {e}") from None
    except OSError as e:
        if e.errno in (errno.ELOOP, errno.ENOTDIR):
            name = os.fsdecode(e.filename or "")[:120]
            raise UnsafeArchive(f"{target}: {name!r} is in the way, and no directory") from None
        raise
    finally:
        os.close(root)
    return count


def _checked(name: str) -> str:
    """A relative name without "." parts; "" for the top. UnsafeArchive."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if name.startswith("/") or ".." in parts or "\0" in name:
        raise UnsafeArchive(f"archive from the sandbox: entry {name[:120]!r}")
    return "/".join(parts)


def _directories(root: int, name: str) -> int:
    """The directory `name`, made if it is missing, as a descriptor."""
    at = os.dup(root)
    for part in filter(None, name.split("/")):
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=at)
            below = os.open(part, _DIRECTORY, dir_fd=at)
        finally:
            os.close(at)
        at = below
    return at


def _make(
    archive: tarfile.TarFile,
    info: tarfile.TarInfo,
    root: int,
    parent: int,
    name: str,
    tell: Callable[[str], None],
) -> bool:
    """Make one entry; whether it is a file, link or symlink."""
    if info.isdir():
        try:
            os.mkdir(name, 0o755, dir_fd=parent)
        except FileExistsError:
            os.close(os.open(name, _DIRECTORY, dir_fd=parent))  # or it is none
        return False
    if not (info.isreg() or info.issym() or info.islnk()):
        tell(f"left out: {info.name}: a device or FIFO")
        return False
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=parent)
    if info.issym():
        os.symlink(info.linkname, name, dir_fd=parent)
        return True
    if info.islnk():
        of = _checked(info.linkname)
        above, _, last = of.rpartition("/")
        source = _directories(root, above)
        try:
            os.link(last, name, src_dir_fd=source, dst_dir_fd=parent, follow_symlinks=False)
        finally:
            os.close(source)
        return True
    content = archive.extractfile(info)
    assert content is not None  # it is a regular file
    with open(os.open(name, _NEW, 0o600, dir_fd=parent), "wb") as file:
        while data := content.read(_PIECE):
            file.write(data)
        file.flush()
        os.fchmod(file.fileno(), info.mode & 0o777)
        os.utime(file.fileno(), (info.mtime, info.mtime))
    return True
