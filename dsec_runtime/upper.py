"""Where a sandbox writes: the upper of its overlay.

    data/uppers/<id>/           of one sandbox: `upper` and `work`, or `disk.ext4`
    data/uppers/<id>/claim      path of the sandbox's claim, which is in the run directory
    data/uppers/blank-<n>.ext4  an empty file system of n bytes, copied for each `image` upper

Kinds:
    disk   a directory on the node's disk; as large as the disk
    tmpfs  in memory, with a limit; counts as memory of the node, not of the sandbox's cgroup
    image  a sparse ext4 image through a loop device: on disk, with a limit

What must hold: everything in an upper belongs to the sandbox's own range of ids, so its root
owns it and no other sandbox's does; what a sandbox made cannot hinder its removal (depth,
names, permissions).
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from dsecfs.errors import BadInput, MountError, NotFound, Unsupported
from dsecfs.kernel.loop import attach_loop, find_loop
from dsecfs.kernel.namespaces import IdRange
from dsecfs.kernel.syscalls import (
    MOUNT_ATTR_NODEV,
    MOUNT_ATTR_NOEXEC,
    MOUNT_ATTR_NOSUID,
    MOUNT_ATTR_RDONLY,
    FsContext,
    closing,
    open_tree,
    share_blocks,
)
from dsecfs.locks import locked_file
from dsecfs.mount.overlay import UPPER, WORK
from dsecfs.nodedirs import NodeDirs, age_s

UpperKind = Literal["disk", "tmpfs", "image"]

DEFAULT_LIMIT = 4 << 30
"""Bytes of a `tmpfs` or `image` upper when the caller names none."""
MIN_LIMIT = 4 << 20
_MKFS_S = 60.0
_CLAIM = "claim"
_DISK = "disk.ext4"
_STARTING_S = 60.0
"""An upper without a word of its claim may be so young that the word is still to come."""


def open_upper(
    dirs: NodeDirs, sandbox: str, kind: UpperKind, limit: int | None, ids: IdRange, root: int
) -> int:
    """A descriptor of an unattached mount whose root has the directories of an overlay upper.

    `root` is a directory whose mode and times the tree's root shall have (that of the top
    layer: in an overlay the upper's root is the root). `limit` in bytes; BadInput for `disk`.
    What it makes on disk goes with `remove_upper`.
    """
    if limit is not None and (kind == "disk" or limit < MIN_LIMIT):
        raise BadInput(
            f"limit of {limit} bytes for a {kind} upper: not possible",
            hint=f"use tmpfs or image, and at least {MIN_LIMIT} bytes",
        )
    place = dirs.uppers / sandbox
    if kind == "tmpfs":
        fd = _tmpfs(limit or DEFAULT_LIMIT)
    else:
        place.mkdir(mode=0o700, parents=True)
        (place / _CLAIM).write_bytes(os.fsencode(dirs.sandboxes / f"{sandbox}.json"))
        if kind == "disk":
            fd = open_tree(place)
        else:
            fd = _image(dirs, place / _DISK, limit or DEFAULT_LIMIT)
    try:
        _fill(fd, ids, root)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _fill(fd: int, ids: IdRange, root: int) -> None:
    """Make `upper` and `work` in the mount `fd`, owned by the sandbox's root."""
    like = os.fstat(root)
    for name in (UPPER, WORK):
        os.mkdir(name, 0o700, dir_fd=fd)
    os.chown(WORK, ids.start, ids.start, dir_fd=fd)
    os.chown(UPPER, like.st_uid, like.st_gid, dir_fd=fd)
    os.chmod(UPPER, stat.S_IMODE(like.st_mode), dir_fd=fd)
    os.utime(UPPER, ns=(like.st_atime_ns, like.st_mtime_ns), dir_fd=fd)


def _tmpfs(limit: int) -> int:
    with FsContext("tmpfs", "mount a tmpfs upper") as fs:
        fs.set("source", "dsec-upper")
        fs.set("size", str(limit))
        fs.set("mode", "700")
        return fs.mount(MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID)


def _image(dirs: NodeDirs, path: Path, limit: int) -> int:
    _copy_sparse(_blank(dirs, limit), path)
    with (
        closing(attach_loop(path, direct_io=False, writable=True)) as device,
        FsContext("ext4", f"mount upper {path}") as fs,
    ):
        fs.set("source", f"/proc/self/fd/{device}")
        # Thrown away with the sandbox: freed blocks need not reach the disk in order.
        fs.flag("discard")
        return fs.mount(MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID)


def _blank(dirs: NodeDirs, limit: int) -> Path:
    """An empty ext4 file system of `limit` bytes, made once per node and size."""
    limit -= limit % 4096
    path = dirs.uppers / f"blank-{limit}.ext4"
    if path.exists():
        return path
    program = shutil.which("mke2fs", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise Unsupported("make an upper with a limit: no mke2fs", hint="apt-get install e2fsprogs")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_file(path.with_suffix(".lock"), f"upper {path.name}", wait_s=_MKFS_S):
        if not path.exists():
            new = path.with_suffix(".new")
            with new.open("wb") as file:
                file.truncate(limit)
            options = ["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"]
            options += ["-O", "^has_journal,^resize_inode"]
            try:
                done = subprocess.run(
                    [program, *options, "-E", "nodiscard,lazy_itable_init=1", str(new)],
                    capture_output=True,
                    timeout=_MKFS_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise MountError(f"format {new}: mke2fs did not end in {_MKFS_S:g} s") from None
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip().replace("\n", "; ")
                raise MountError(f"format {new}: {said}")
            new.rename(path)
    return path


def _copy_sparse(source: Path, target: Path) -> None:
    """Copy a file with its holes; shared blocks where the file system can."""
    with source.open("rb") as old, target.open("xb") as new:
        size = os.fstat(old.fileno()).st_size
        new.truncate(size)
        at = 0
        while at < size:
            try:
                start = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError as e:
                if e.errno == errno.ENXIO:
                    return  # only holes from here on
                raise
            at = os.lseek(old.fileno(), start, os.SEEK_HOLE)
            while start < at:
                count = os.copy_file_range(old.fileno(), new.fileno(), at - start, start, start)
                if count == 0:
                    raise MountError(f"copy {source}: it became shorter")
                start += count


# -- looking at one from outside -----------------------------------------------------------


def live_upper(dirs: NodeDirs, sandbox: str) -> int:
    """A descriptor of the directory that has what a sandbox wrote, for reading only: it shows
    changes as they happen. Of `image` uppers.

    The image is mounted a second time through its loop device: the kernel gives the same file
    system, under a mount of our own that is attached nowhere and goes with the descriptor.
    Nothing has to be kept for it while the sandbox lives. NotFound when there is no such upper.
    """
    image = dirs.uppers / sandbox / _DISK
    try:
        device = find_loop(image)
    except OSError as e:
        raise NotFound(f"upper of sandbox {sandbox}: {e.strerror}") from None
    if device is None:
        raise NotFound(f"upper of sandbox {sandbox}: it is not mounted")
    with closing(device):
        return _upper_of(device, f"mount upper of sandbox {sandbox}", read_only=False)


def can_clone(dirs: NodeDirs) -> bool:
    """Whether `cloned_upper` is possible here (XFS and btrfs, not ext4)."""
    with contextlib.ExitStack() as files:
        fds = []
        for _ in range(2):
            try:
                fd = os.open(dirs.uppers, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            except OSError:
                return False  # a full disk, or a file system without such files
            files.callback(os.close, fd)
            fds.append(fd)
        try:
            os.ftruncate(fds[0], 4096)
            return share_blocks(*fds)
        except OSError:
            return False


def cloned_upper(dirs: NodeDirs, sandbox: str) -> int | None:
    """The same of a copy that nothing changes any more, made by sharing blocks: a matter of
    milliseconds, whatever its size. None where the file system of the data directory cannot.

    To be called when nothing writes to the upper and it was synced. The copy has no name and is
    gone when the descriptor is closed, or with this process.
    """
    with closing(os.open(dirs.uppers / sandbox / _DISK, os.O_RDONLY | os.O_CLOEXEC)) as image:
        try:
            copy = os.open(dirs.uppers, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as e:
            if e.errno in (errno.EOPNOTSUPP, errno.EISDIR):
                return None
            raise
        with closing(copy):
            if not share_blocks(image, copy):
                return None
            with closing(attach_loop(Path(f"/proc/self/fd/{copy}"), direct_io=False)) as device:
                what = f"mount a copy of the upper of sandbox {sandbox}"
                return _upper_of(device, what, read_only=True)


def _upper_of(device: int, what: str, *, read_only: bool) -> int:
    """The directory of the upper on a device, on a read-only mount. `read_only`: of a file system
    that is, too (it must be said as it was mounted before)."""
    flags = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NOEXEC
    with FsContext("ext4", what) as fs:
        fs.set("source", f"/proc/self/fd/{device}")
        if read_only:
            fs.flag("ro")
        found = fs.mount(flags)
    with closing(found):
        return os.open(UPPER, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=found)


def is_claimed(upper: Path) -> bool:
    """Whether the upper of a sandbox is in use by whoever uses this data directory with whatever
    run directory."""
    with contextlib.suppress(FileNotFoundError):
        if claim := (upper / _CLAIM).read_bytes():
            return Path(os.fsdecode(claim)).exists()
    with contextlib.suppress(FileNotFoundError):
        return age_s(upper.stat()) < _STARTING_S
    return False


def remove_upper(dirs: NodeDirs, sandbox: str) -> None:
    """Remove what a sandbox's upper has on disk. No error if there is nothing."""
    remove_tree(dirs.uppers / sandbox)


def remove_tree(path: Path) -> None:
    """Remove a directory and all below it, whatever a sandbox made there.

    Never follows a symlink and keeps two directories open at most, however deep the tree is:
    every subdirectory is first moved to the top.
    """
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    with closing(top):
        waiting = _unlink_files(top)
        number = 0
        while waiting:
            name = waiting.pop()
            with _opened(top, name) as fd:
                for inner in _unlink_files(fd):
                    number += 1
                    # A sandbox may have made a name like this, to be in the way.
                    while _exists(top, f".dsec-{number}"):
                        number += 1
                    os.rename(inner, f".dsec-{number}", src_dir_fd=fd, dst_dir_fd=top)
                    waiting.append(f".dsec-{number}")
            os.rmdir(name, dir_fd=top)
    path.rmdir()


def _exists(at: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _opened(at: int, name: str) -> Iterator[int]:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    with closing(fd):
        yield fd


def _unlink_files(fd: int) -> list[str]:
    """Remove everything in the open directory but directories; the names of these."""
    directories = []
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if is_directory:
            directories.append(name)
        else:
            os.unlink(name, dir_fd=fd)
    return directories
