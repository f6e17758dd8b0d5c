"""Trees as tar, both ways. Called in a child.

Out: regular files, directories, symlinks and hard links, in PAX format; sockets, fifos, devices
and what is mounted from the kernel (/proc, /sys) are left out. A file that shrinks while it is read
ends the archive with an error: its receiver must not take it for whole.

In: the archive is hostile. What must hold: no entry is made outside of the target directory (a
symlink in it is followed only if it stays inside); nothing but files, directories, symlinks and
hard links within is made; what is there is replaced name by name, a directory never by a file.
Entries belong to the user; set-user-ID and set-group-ID bits are left out.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from typing import Any

from dsec_runtime.files import trees, wire
from dsec_runtime.files.calls import is_kernel_tree
from dsec_runtime.files.link import Link
from dsec_runtime.files.operations import send_file
from dsec_runtime.files.paths import Place, Refusal, open_regular, split
from dsec_runtime.files.trees import about
from dsec_runtime.files.writing import write_all
from dsecfs.kernel.syscalls import RESOLVE_IN_ROOT, RESOLVE_NO_MAGICLINKS, closing, openat2

_BLOCK = tarfile.BLOCKSIZE
_HELD = 64 << 10
"""Bytes of headers and small files that are sent together."""
_LINKS = 100_000
"""Files with several names that are remembered; more become files of their own."""
_READ = 1 << 20
_MAX_NAME = 4095
"""PATH_MAX without the NUL."""
_RESOLVE_BENEATH = 0x08
_ABOUT_NEXT = (
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
)
_MAX_ABOUT = 1 << 20
"""Bytes of a header about the next entry; `tarfile` has them in memory."""


# -- out -------------------------------------------------------------------------------


class _Out:
    """Collects small pieces before they are sent."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._held = bytearray()

    def put(self, data: bytes) -> None:
        self._held += data
        if len(self._held) >= _HELD:
            self.flush()

    def flush(self) -> None:
        if self._held:
            self._link.send(wire.DATA, bytes(self._held))
            self._held.clear()

    def file(self, fd: int, size: int) -> None:
        if size <= _HELD // 2:
            data = os.pread(fd, size, 0)
            while len(data) < size and (more := os.pread(fd, size - len(data), len(data))):
                data += more
            if len(data) < size:
                raise Refusal(wire.CHANGED)
            self.put(data)
        else:
            self.flush()
            send_file(self._link, fd, 0, size)
        self.put(bytes(-size % _BLOCK))


def pack(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    """What is in a directory, named from there; or one file. An empty PART, then DATA."""
    path = place.absolute(request["path"])
    with closing(place.open(path, os.O_PATH)) as seen:
        is_tree = stat.S_ISDIR(os.fstat(seen).st_mode)
    top = place.open_directory(path) if is_tree else open_regular(place, path)
    out = _Out(link)
    count = 0
    with closing(top):
        link.send_json(wire.PART, {})
        if is_tree:
            count = _pack_tree(out, top)
        else:
            found = os.fstat(top)
            out.put(_header(split(place.follow(path))[1], found, tarfile.REGTYPE, found.st_size))
            out.file(top, found.st_size)
            count = 1
    out.put(bytes(2 * _BLOCK))
    out.flush()
    return {"entries": count}


def _pack_tree(out: _Out, top: int) -> int:
    known: dict[tuple[int, int], bytes] = {}
    count = 0
    for step in trees.walk(top):
        found = step.found
        with about(step.path):
            if step.event == trees.ENTER:
                out.put(_header(step.path, found, tarfile.DIRTYPE))
                step.skip = is_kernel_tree(step.fd)
                count += 1
            elif step.event == trees.FILE and stat.S_ISLNK(found.st_mode):
                try:
                    target = os.readlink(step.name, dir_fd=step.above)
                except OSError:
                    continue  # gone, or something else by now
                out.put(_header(step.path, found, tarfile.SYMTYPE, linkname=target))
                count += 1
            elif step.event == trees.FILE and stat.S_ISREG(found.st_mode):
                count += _pack_file(out, step, known)
    return count


def _pack_file(out: _Out, step: trees.Step, known: dict[tuple[int, int], bytes]) -> int:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(step.name, flags, dir_fd=step.above)
    except OSError as e:
        if e.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO):
            return 0  # gone, or something else by now
        raise
    with closing(fd):
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            return 0
        key = (found.st_dev, found.st_ino)
        first = known.get(key)
        if first is not None:
            out.put(_header(step.path, found, tarfile.LNKTYPE, linkname=first))
            return 1
        out.put(_header(step.path, found, tarfile.REGTYPE, found.st_size))
        try:
            out.file(fd, found.st_size)
        except Refusal as e:
            raise Refusal(e.reason, step.path) from None
        if found.st_nlink > 1 and len(known) < _LINKS:
            known[key] = step.path
    return 1


def _header(
    path: bytes, found: os.stat_result, kind: bytes, size: int = 0, linkname: bytes = b""
) -> bytes:
    info = tarfile.TarInfo(os.fsdecode(path))
    info.type = kind
    info.size = size
    info.mode = stat.S_IMODE(found.st_mode)
    info.uid, info.gid = found.st_uid, found.st_gid
    info.mtime = max(0, int(found.st_mtime))
    info.linkname = os.fsdecode(linkname)
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


# -- in --------------------------------------------------------------------------------


class _Member(tarfile.TarInfo):
    """A header that is not what the format says ends the archive with an error: `tarfile` takes one
    in the middle for the end, and believes every size."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError:
            raise Refusal(wire.ARCHIVE) from None

    def _proc_member(self, tar: tarfile.TarFile) -> Any:
        too_long = self.type in _ABOUT_NEXT and self.size > _MAX_ABOUT
        if self.size < 0 or too_long:
            raise Refusal(wire.ARCHIVE, os.fsencode(self.name)[:200])
        return super()._proc_member(tar)  # type: ignore[misc]


def unpack(place: Place, link: Link, request: dict[str, Any]) -> dict[str, Any]:
    """The upload, a tar (plain, gzip, bzip2 or xz), into the directory `path`."""
    path = place.absolute(request["path"])
    if request["make_parents"]:
        place.make_directories(path, 0o755)
    with closing(place.open_directory(path)) as target:
        whole = not path.strip(b"/")
        into = _Into(target, RESOLVE_IN_ROOT if whole else _RESOLVE_BENEATH)
        try:
            return into.take(link)
        finally:
            into.close()


class _Into:
    """The directory that an archive is unpacked into."""

    def __init__(self, target: int, resolve: int) -> None:
        self._target = target
        self._resolve = resolve | RESOLVE_NO_MAGICLINKS
        self._last: tuple[bytes, int] | None = None
        """The directory that was used last: neighbours are neighbours in archives."""
        self._later: dict[bytes, tuple[int, float]] = {}
        """Modes and times of directories, set at the end: they may forbid writing."""
        self._bytes = 0

    def take(self, link: Link) -> dict[str, Any]:
        count = 0
        with tarfile.open(  # type: ignore[call-overload]
            fileobj=link, mode="r|*", bufsize=1 << 18, tarinfo=_Member
        ) as tar:
            while (member := tar.next()) is not None:
                tar.members.clear()  # it would keep all of them
                name = self._checked(member.name)
                with about(name):
                    self._make(tar, member, name)
                count += 1
        while link.upload():
            pass  # padding
        for name, (mode, mtime) in reversed(self._later.items()):
            with about(name), closing(self._open(name, os.O_RDONLY | os.O_DIRECTORY)) as fd:
                os.fchmod(fd, mode)
                os.utime(fd, (mtime, mtime))
        return {"entries": count, "bytes": self._bytes}

    def close(self) -> None:
        if self._last is not None:
            os.close(self._last[1])
            self._last = None

    def _checked(self, text: str) -> bytes:
        """The name without "./"; b"" is the directory itself. Refusal (UNSAFE)."""
        raw = os.fsencode(text)
        parts = [part for part in raw.split(b"/") if part not in (b"", b".")]
        if raw.startswith(b"/") or b".." in parts or b"\0" in raw or len(raw) > _MAX_NAME:
            raise Refusal(wire.UNSAFE, raw[:200])
        return b"/".join(parts)

    def _open(self, path: bytes, flags: int) -> int:
        try:
            return openat2(self._target, path or b".", flags, resolve=self._resolve)
        except OSError as e:
            if e.errno == errno.EXDEV:
                raise Refusal(wire.UNSAFE, path) from None
            raise

    def _directory(self, path: bytes) -> int:
        """A descriptor of a directory, made if it is missing; it stays ours."""
        if self._last is not None:
            if self._last[0] == path:
                return self._last[1]
            self.close()
        try:
            fd = self._open(path, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            at = b""
            for part in path.split(b"/"):
                with closing(self._open(at, os.O_PATH | os.O_DIRECTORY)) as above:
                    try:
                        os.mkdir(part, 0o755, dir_fd=above)
                    except FileExistsError:
                        pass
                at = at + b"/" + part if at else part
            fd = self._open(path, os.O_PATH | os.O_DIRECTORY)
        self._last = (path, fd)
        return fd

    def _make(self, tar: tarfile.TarFile, member: tarfile.TarInfo, name: bytes) -> None:
        mode = member.mode & 0o1777
        mtime = float(min(max(0, member.mtime), 1 << 40))
        if member.isdir():
            self._directory(name)
            if name:
                self._later[name] = (mode, mtime)
            return
        if not name:
            raise Refusal(wire.UNSAFE, b".")
        above, _, last = name.rpartition(b"/")
        fd = self._directory(above)
        if member.issym():
            if "\0" in member.linkname:
                raise Refusal(wire.UNSAFE, name)
            self._clear(fd, last)
            os.symlink(os.fsencode(member.linkname), last, dir_fd=fd)
        elif member.islnk():
            self._link(member, name, fd, last)
        elif member.isfile():
            self._clear(fd, last)
            self._file(tar, member, fd, last, mode, mtime)
        else:
            raise Refusal(wire.UNSAFE, name)

    def _clear(self, fd: int, name: bytes) -> None:
        try:
            os.unlink(name, dir_fd=fd)
        except FileNotFoundError:
            pass

    def _link(self, member: tarfile.TarInfo, name: bytes, fd: int, last: bytes) -> None:
        source = self._checked(member.linkname)
        if not source or source == name:
            raise Refusal(wire.UNSAFE, name)
        above, _, source_name = source.rpartition(b"/")
        with closing(self._open(above, os.O_PATH | os.O_DIRECTORY)) as from_fd:
            self._clear(fd, last)
            os.link(source_name, last, src_dir_fd=from_fd, dst_dir_fd=fd, follow_symlinks=False)

    def _file(
        self,
        tar: tarfile.TarFile,
        member: tarfile.TarInfo,
        fd: int,
        last: bytes,
        mode: int,
        mtime: float,
    ) -> None:
        data = tar.extractfile(member)
        if data is None:
            raise Refusal(wire.ARCHIVE, last)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(last, flags, 0o600, dir_fd=fd)
        try:
            left = member.size
            while left:
                piece = data.read(min(left, _READ))
                if not piece:
                    raise Refusal(wire.ARCHIVE, last)
                write_all(file, piece)
                left -= len(piece)
                self._bytes += len(piece)
            os.fchmod(file, mode)
            os.utime(file, (mtime, mtime))
        finally:
            os.close(file)
