"""Files in a sandbox: every operation as its callers see it, in namespaces of the test's own."""

from __future__ import annotations

import asyncio
import base64
import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator

import pytest

from dsec_runtime.errors import (
    BadRange,
    FileDenied,
    FileExists,
    FileProblem,
    NoSpace,
    NoSuchFile,
    SandboxLost,
)
from dsec_runtime.files.client import Files
from dsec_runtime.files.model import Change
from dsecfs.errors import BadInput, UnsafeArchive
from tests.support.ownspace import FIRST_ID, USER, OwnSpace
from tests.t6_node.filespace import Space, chunks, content, packed, space

pytestmark = [pytest.mark.root, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def shared() -> Iterator[Space]:
    with space() as made:
        yield made


@pytest.fixture
def here(shared: Space) -> Iterator[Space]:
    """An empty /work in it."""
    shared.own.sh("cd /work; rm -rf -- ..?* .[!.]* *; rm -rf /tmp/* /tmp/.[!.]*", user=0)
    yield shared
    assert shared.left() == []


def test_write_read_stat(here: Space) -> None:
    async def check(files: Files, own: OwnSpace) -> None:
        data = os.urandom(3_000_000)
        pieces = [data[at : at + 700_001] for at in range(0, len(data), 700_001)]
        written = await files.write(own.place(), "/work/new", chunks(*pieces))
        entry = written.entry
        assert (entry.size, entry.mode, entry.uid, entry.gid) == (len(data), 0o644, USER, USER)
        assert not written.replaced
        on_disk = (here.work / "new").stat()
        assert (on_disk.st_uid, on_disk.st_gid) == (FIRST_ID + USER, FIRST_ID + USER)
        assert await content(files, own, "/work/new") == data
        assert await content(files, own, "new") == data  # relative to cwd
        assert await content(files, own, "new", first=10, last=19) == data[10:20]
        assert await content(files, own, "new", first=2_999_990) == data[-10:]
        assert await content(files, own, "new", last=7) == data[-7:]
        assert await content(files, own, "new", first=2_999_999, last=1 << 60) == data[-1:]
        with pytest.raises(BadRange):
            await content(files, own, "new", first=len(data))
        assert (await files.stat(own.place(), "/work/new")).size == len(data)
        empty = await files.write(own.place(), "empty", chunks(), mode=0o4711)
        assert (empty.entry.size, empty.entry.mode) == (0, 0o4711)
        assert await content(files, own, "empty") == b""

    here.run(check)


def test_files_of_proc_are_read_to_their_end(here: Space) -> None:
    async def check(files: Files, own: OwnSpace) -> None:
        assert b"processor" in await content(files, own, "/proc/cpuinfo")
        status = await content(files, own, "/proc/self/status")
        lines = [line for line in status.decode().splitlines() if ":\t" in line]
        fields = dict(line.split(":\t", 1) for line in lines)
        for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(fields[name], 16) == 0, name
        assert fields["NoNewPrivs"] == "1" and fields["Threads"] == "1"
        # Seen from its own pid namespace, that of the sandbox.
        assert len(fields["NSpid"].split()) == 1
        assert fields["Uid"].split() == [str(USER)] * 4

    here.run(check)


def test_replacing_keeps_owner_and_mode(here: Space) -> None:
    own = here.own
    own.sh("echo old > /work/f; chmod 4751 /work/f; chgrp 50 /work/f; chown 1000 /work/f", user=0)
    own.sh("echo theirs > /work/theirs; chmod 666 /work/theirs", user=0)
    own.sh("ln -s f /work/link; ln -s /work/later /work/dangling", user=USER)

    async def check(files: Files, own: OwnSpace) -> None:
        member = own.place(groups=(50,))
        before = (here.work / "f").stat()
        written = await files.write(member, "/work/f", chunks(b"new\n"), sync=True)
        after = (here.work / "f").stat()
        assert written.replaced and after.st_ino != before.st_ino
        assert (after.st_uid, after.st_gid) == (FIRST_ID + USER, FIRST_ID + 50)
        assert stat.S_IMODE(after.st_mode) == 0o751  # as after any write: no set-user-ID
        await files.write(member, "/work/f", chunks(b"x"), mode=0o600)
        assert stat.S_IMODE((here.work / "f").stat().st_mode) == 0o600
        # Who is not in its group cannot keep it, and so does not replace it.
        with pytest.raises(FileDenied, match="cannot be kept"):
            await files.write(own.place(), "/work/f", chunks(b"y"))
        with pytest.raises(FileDenied, match="cannot be kept"):
            await files.write(own.place(), "/work/theirs", chunks(b"y"))
        assert (here.work / "theirs").read_text() == "theirs\n"
        # Through symlinks, also to what does not exist yet.
        await files.write(member, "/work/link", chunks(b"through"))
        assert (here.work / "link").is_symlink() and (here.work / "f").read_bytes() == b"through"
        await files.write(own.place(), "/work/dangling", chunks(b"made"))
        assert (here.work / "later").read_bytes() == b"made"

    here.run(check)


def test_a_write_is_whole_or_nothing(here: Space) -> None:
    (here.work / "f").write_bytes(b"old")
    os.chown(here.work / "f", FIRST_ID + USER, FIRST_ID + USER)

    class GoneAway(Exception):
        pass

    async def broken() -> AsyncIterator[bytes]:
        yield b"half" * 100_000
        for _ in range(200):  # it is being written
            if here.left():
                break
            await asyncio.sleep(0.01)
        assert here.left()
        raise GoneAway

    async def check(files: Files, own: OwnSpace) -> None:
        with pytest.raises(GoneAway):
            await files.write(own.place(), "/work/f", broken())
        assert (here.work / "f").read_bytes() == b"old"
        assert await content(files, own, "/work/f") == b"old"

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(1 << 20)

        # /tmp holds 4 MiB: the helper says so while the upload goes on.
        with pytest.raises(NoSpace):
            await files.write(own.place(), "/tmp/big", endless())
        assert own.sh("ls -A /tmp") == ""

        task = asyncio.create_task(files.write(own.place(), "/work/f", endless()))
        while not here.left():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    here.run(check)
    assert (here.work / "f").read_bytes() == b"old"


def test_inodes_can_be_used_up_too(here: Space) -> None:
    here.own.sh("i=0; while touch /tmp/$i 2>/dev/null; do i=$((i+1)); done")

    async def check(files: Files, own: OwnSpace) -> None:
        with pytest.raises(NoSpace):
            await files.write(own.place(), "/tmp/one-more", chunks(b""))
        with pytest.raises(NoSpace):
            await files.mkdir(own.place(), "/tmp/dir")

    here.run(check)


def test_what_is_no_regular_file_is_refused(here: Space) -> None:
    here.own.sh("cd /work; mkfifo fifo; mkdir dir; ln -s fifo to-fifo; ln -s loop loop")

    async def check(files: Files, own: OwnSpace) -> None:
        place = own.place()
        for path in ("/work/fifo", "/work/to-fifo", "/dev/null", "/dev/fuse"):
            with pytest.raises(FileProblem, match="not a regular file"):
                await content(files, own, path)
            with pytest.raises(FileProblem, match="not a regular file"):
                await files.write(place, path, chunks(b"x"))
        for path in ("/work/dir", "/", "."):
            with pytest.raises(FileProblem, match="Is a directory"):
                await content(files, own, path)
        with pytest.raises(FileProblem, match="Is a directory"):
            await files.write(place, "/work/dir", chunks(b"x"))
        with pytest.raises(FileProblem, match="symbolic links"):
            await content(files, own, "/work/loop")
        with pytest.raises(NoSuchFile):
            await content(files, own, "/work/missing/file")
        with pytest.raises(NoSuchFile):
            await files.write(place, "/work/missing/file", chunks(b"x"))
        with pytest.raises(FileDenied):
            await files.write(place, "/etc/x", chunks(b"x"))
        with pytest.raises(FileDenied):
            await content(files, own, "/root/x")
        with pytest.raises(FileProblem, match="too long"):
            await files.stat(place, "/" + "x" * 300)
        for path in ("", "a\0b", "x/" * 2100):
            with pytest.raises(BadInput):
                await files.stat(place, path)
        assert (await files.stat(place, "/work/fifo")).type == "fifo"
        link = await files.stat(place, "/work/to-fifo", follow=False)
        assert (link.type, link.target) == ("symlink", "fifo")

    here.run(check)


def test_odd_names(here: Space) -> None:
    names = [b"new\nline", b"\xff\xfe", "ünï".encode(), b" ", b"-rf", b"a\\b", b"x" * 255]

    async def check(files: Files, own: OwnSpace) -> None:
        for name in names:
            await files.write(own.place(), os.fsdecode(b"/work/" + name), chunks(name))
            assert await content(files, own, os.fsdecode(b"/work/" + name)) == name
        listing = await files.list(own.place(), "/work")
        told = [
            base64.b64decode(e.path_base64) if e.path_base64 else e.path.encode()
            for e in listing.entries
        ]
        assert told == sorted(names)
        odd = next(e for e in listing.entries if e.path_base64)
        assert odd.path == "\ufffd\ufffd"
        await files.move(own.place(), os.fsdecode(b"/work/\xff\xfe"), "/work/plain")
        assert (await files.remove(own.place(), "/work/new\nline")).removed == 1
        assert await content(files, own, "/work/plain") == b"\xff\xfe"

    here.run(check)


def test_listing(here: Space) -> None:
    here.own.sh("cd /work; mkdir -p a/b/c; touch a/1 a/b/2 a/b/c/3 z; ln -s a link; mkdir -m 0 no")

    async def check(files: Files, own: OwnSpace) -> None:
        async def names(path: str, depth: int = 1, limit: int = 1000) -> list[str]:
            found = await files.list(own.place(), path, depth=depth, limit=limit)
            assert found.truncated == (len(found.entries) == limit)
            return [e.path for e in found.entries]

        assert await names("/work") == ["a", "link", "no", "z"]
        assert await names("link/b") == ["2", "c"]
        two = ["a", "link", "no", "z", "a/1", "a/b"]
        assert await names("/work", depth=2) == two
        assert await names(".", depth=64) == [*two, "a/b/2", "a/b/c", "a/b/c/3"]
        assert len(await names("/work", depth=64, limit=3)) == 3
        with pytest.raises(FileProblem, match="Not a directory"):
            await names("/work/z")
        with pytest.raises(FileDenied):
            await names("/work/no")
        with pytest.raises(BadInput):
            await names("/work", depth=65)

    here.run(check)


def test_a_huge_directory_is_listed_up_to_the_limit(here: Space) -> None:
    directory = here.work / "many"
    directory.mkdir()
    for number in range(20_000):
        (directory / f"{number:05d}").touch()
    os.chown(directory, FIRST_ID + USER, FIRST_ID + USER)

    async def check(files: Files, own: OwnSpace) -> None:
        found = await files.list(own.place(), "/work/many", limit=500)
        assert found.truncated and len(found.entries) == 500
        found = await files.list(own.place(), "/work/many", limit=50_000)
        assert not found.truncated
        assert [e.path for e in found.entries] == [f"{n:05d}" for n in range(20_000)]
        removed = await files.remove(own.place(), "/work/many", recursive=True)
        assert removed.removed == 20_001

    here.run(check)


def test_mkdir_move_remove(here: Space) -> None:
    async def check(files: Files, own: OwnSpace) -> None:
        place = own.place()
        made = await files.mkdir(place, "/work/d", mode=0o2750)
        assert made.made and made.entry.mode == 0o2750 and made.entry.uid == USER
        with pytest.raises(FileExists):
            await files.mkdir(place, "/work/d")
        assert not (await files.mkdir(place, "/work/d", parents=True)).made
        assert (await files.mkdir(place, "x/y/../z/", parents=True)).entry.type == "directory"
        assert {e.path for e in (await files.list(place, "x", depth=9)).entries} == {"y", "z"}
        with pytest.raises(NoSuchFile):
            await files.mkdir(place, "/work/no/where")
        await files.write(place, "/work/deep/er/f", chunks(b"1"), make_parents=True)
        moved = await files.move(place, "/work/deep/er/f", "/work/g")
        assert moved.entry.size == 1
        await files.write(place, "/work/h", chunks(b"22"))
        with pytest.raises(FileExists):
            await files.move(place, "/work/g", "/work/h", replace=False)
        assert await content(files, own, "h") == b"22"
        await files.move(place, "/work/g", "/work/h")
        assert await content(files, own, "h") == b"1"
        with pytest.raises(FileProblem):
            await files.move(place, "/work/deep", "/work/deep/er/deep")
        for path in ("/", "/work/.", "/work/..", "/work/d/../.."):
            with pytest.raises(BadInput):
                await files.remove(place, path, recursive=True)
            with pytest.raises(BadInput):
                await files.move(place, path, "/work/q")
            with pytest.raises(BadInput):
                await files.mkdir(place, path)
        with pytest.raises(FileExists):
            await files.remove(place, "/work/deep")
        own.sh("ln -s /work/h /work/deep/link; ln -s /work/deep /work/tree")
        await files.remove(place, "/work/tree", recursive=True)
        assert (await files.remove(place, "/work/deep", recursive=True)).removed == 3
        assert await content(files, own, "h") == b"1"
        with pytest.raises(NoSuchFile):
            await files.remove(place, "/work/deep")
        with pytest.raises(FileDenied):
            await files.remove(place, "/etc", recursive=True)

    here.run(check)


def test_moving_to_another_file_system_copies(here: Space) -> None:
    here.own.sh(
        "cd /work; mkdir -p t/sub; echo 1 > t/f; chmod 640 t/f; ln -s f t/l; echo 2 > t/sub/g;"
        "touch -d 2001-02-03 t/f; chmod 710 t/sub; mkdir odd; mkfifo odd/fifo; mkdir full"
    )
    here.own.sh("yes | head -c 6291456 > /work/full/big")

    async def check(files: Files, own: OwnSpace) -> None:
        place = own.place()
        await files.move(place, "/work/t", "/tmp/t")
        found = {e.path: e for e in (await files.list(place, "/tmp/t", depth=3)).entries}
        assert set(found) == {"f", "l", "sub", "sub/g"}
        assert (found["f"].mode, found["sub"].mode) == (0o640, 0o710)
        assert found["l"].target == "f" and int(found["f"].mtime) == 981158400
        with pytest.raises(NoSuchFile):
            await files.stat(place, "/work/t")
        own.sh("chmod 700 /tmp/t/sub")
        with pytest.raises(FileExists):
            await files.move(place, "/tmp/t/f", "/work/full", replace=False)
        await files.move(place, "/tmp/t/f", "/work/f", replace=False)
        assert await content(files, own, "/work/f") == b"1\n"
        with pytest.raises(FileProblem, match="not a regular file"):
            await files.move(place, "/work/odd", "/tmp/odd")
        with pytest.raises(NoSpace):
            await files.move(place, "/work/full", "/tmp/full")
        assert own.sh("ls -A /tmp") == "t\n"  # nothing half made
        assert own.sh("ls /work/odd /work/full") == "/work/full:\nbig\n\n/work/odd:\nfifo\n"

    here.run(check)


def test_trees_as_tar(here: Space) -> None:
    here.own.sh(
        "cd /work; mkdir -p t/dir/empty; echo one > t/a; ln t/a t/b; ln -s ../a t/dir/link;"
        "mkfifo t/fifo; chmod 750 t/dir; chmod 4755 t/a; touch -d 2001-02-03 t/dir"
    )
    here.own.sh(r"cd /work/t; printf x > $(printf 'odd\377'); printf y > 'new" "\n" "line'")
    long = "n" * 200
    here.own.sh(f"cd /work/t; mkdir {long}; yes | head -c 300000 > {long}/{long}")

    async def check(files: Files, own: OwnSpace) -> None:
        data = await packed(files, own, "/work/t")
        with tarfile.open(fileobj=io.BytesIO(data)) as tar:
            members = {m.name: m for m in tar}
            assert "fifo" not in members and len(data) % 512 == 0
            assert {members["a"].type, members["b"].type} == {tarfile.REGTYPE, tarfile.LNKTYPE}
            assert members["dir/link"].linkname == "../a"
            assert (members["dir"].mode, members["dir"].mtime) == (0o750, 981158400)
            assert members["a"].uid == USER
            assert members[f"{long}/{long}"].size == 300000
            assert os.fsdecode(b"odd\xff") in members and "new\nline" in members
        unpacked = await files.unpack(own.place(), "/work/u/v", chunks(data), make_parents=True)
        assert unpacked.entries == len(members)
        differences = own.sh("diff -r /work/t /work/u/v || true")
        assert differences == "Only in /work/t: fifo\n"
        mode, links, _ = own.sh("cd /work/u/v; stat -c '%a %h %Y' a; ls -ld dir").split()[:3]
        assert (mode, links) == ("755", "2")  # no set-user-ID
        again = await packed(files, own, "/work/u/v/a")
        with tarfile.open(fileobj=io.BytesIO(again)) as tar:
            assert [m.name for m in tar] == ["a"]
        # Over what is there: files are replaced, directories kept.
        own.sh("cd /work/u/v; rm dir/link; echo other > dir/link; echo mine > dir/mine")
        await files.unpack(own.place(), "/work/u/v", chunks(data))
        assert own.sh("cd /work/u/v; readlink dir/link; cat dir/mine") == "../a\nmine\n"

    here.run(check)


def archive(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode, format=tarfile.PAX_FORMAT) as tar:  # type: ignore[call-overload]
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, linkname: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, linkname
    if kind == tarfile.DIRTYPE:
        info.mode = 0o755
    return info


def test_hostile_archives(here: Space) -> None:
    bad: dict[str, tuple[tuple[tarfile.TarInfo, bytes], ...]] = {
        "absolute": ((member("/work/out"), b"x"),),
        "dots": ((member("a/../../out"), b"x"),),
        "device": ((member("dev", tarfile.CHRTYPE), b""),),
        "fifo": ((member("fifo", tarfile.FIFOTYPE), b""),),
        "hard link out": ((member("h", tarfile.LNKTYPE, "../secret"), b""),),
        "absolute hard link": ((member("h", tarfile.LNKTYPE, "/work/secret"), b""),),
        "through a link": ((member("l", tarfile.SYMTYPE, ".."), b""), (member("l/out"), b"x")),
        "through an absolute one": (
            (member("l", tarfile.SYMTYPE, "/work"), b""),
            (member("l/out"), b"x"),
        ),
        "hard link through one": (
            (member("l", tarfile.SYMTYPE, ".."), b""),
            (member("h", tarfile.LNKTYPE, "l/secret"), b""),
        ),
    }
    here.own.sh("echo secret > /work/secret; mkdir /work/in")

    async def check(files: Files, own: OwnSpace) -> None:
        place = own.place()
        for what, members in bad.items():
            own.sh("rm -rf /work/in/*")
            with pytest.raises(UnsafeArchive):
                await files.unpack(place, "/work/in", chunks(archive(*members)))
            assert sorted(os.listdir(here.work)) == ["in", "secret"], what
            assert "h" not in os.listdir(here.work / "in")
        # A link inside is followed, a link that is only made does no harm.
        good = archive(
            (member("d", tarfile.DIRTYPE), b""),
            (member("l", tarfile.SYMTYPE, "d"), b""),
            (member("l/f"), b"in d"),
            (member("out", tarfile.SYMTYPE, "/etc/passwd"), b""),
            (member("out"), b"replaced, not written through"),
        )
        await files.unpack(place, "/work/in", chunks(good))
        assert (here.work / "in/d/f").read_bytes() == b"in d"
        assert not (here.work / "in/out").is_symlink()
        with pytest.raises(FileProblem, match="Is a directory"):
            await files.unpack(place, "/work/in", chunks(archive((member("d"), b"x"))))
        for data in (b"", b"no tar" * 200, good[:700], good[:512] + b"?" * 2048):
            with pytest.raises(BadInput, match="no whole tar"):
                await files.unpack(place, "/work/in", chunks(data))
        pax = bytearray(archive((member("n" * 200), b"")))
        pax[124:136] = b"77777777777\0"  # a header of 8 GiB about the next entry
        chksum = sum(pax[:148]) + sum(pax[156:512]) + 8 * 32
        pax[148:156] = b"%06o\0 " % chksum
        with pytest.raises(BadInput, match="no whole tar"):
            await files.unpack(place, "/work/in", chunks(bytes(pax)))

    here.run(check)


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_compressed_archives(here: Space, kind: str) -> None:
    data = archive((member("big"), bytes(8 << 20)), (member("small"), b"s"), mode=f"w:{kind}")

    async def check(files: Files, own: OwnSpace) -> None:
        pieces = [data[i : i + 99] for i in range(0, len(data), 99)]
        found = await files.unpack(own.place(), "/work", chunks(*pieces))
        assert (found.entries, found.bytes) == (2, (8 << 20) + 1)
        # A bomb meets the quota.
        with pytest.raises(NoSpace):
            await files.unpack(own.place(), "/tmp", chunks(data))

    here.run(check)


def test_watching(here: Space) -> None:
    async def check(files: Files, own: OwnSpace) -> None:
        own.sh("mkdir /work/d")
        told: list[Change] = []

        async with files.watch(own.place(), "/work", recursive=True) as changes:
            own.sh(
                "cd /work; echo 1 > f; mkdir -p new/er; echo 2 > new/er/g; mv f d/f; rm -r new;"
                r"touch $(printf '\377'); echo end > end"
            )
            async for change in changes:
                told.append(change)
                if (change.type, change.path) == ("close-write", "end"):
                    break
        seen = [(c.type, c.path) for c in told]
        for wanted in (
            ("create", "f"),
            ("close-write", "f"),
            ("create", "new"),
            ("create", "new/er"),
            ("create", "new/er/g"),
            ("moved-from", "f"),
            ("moved-to", "d/f"),
            ("delete", "new"),
        ):
            assert wanted in seen, (wanted, seen)
        assert any(c.path_base64 == base64.b64encode(b"\xff").decode() for c in told)
        assert all(c.directory for c in told if c.path == "new" and c.type == "create")

        async with files.watch(own.place(), "/work/d/f") as changes:
            own.sh("echo more >> /work/d/f; rm /work/d/f")
            types = [c.type async for c in changes]
        assert types[0] == "modify" and types[-1] == "gone"

        async with files.watch(own.place(), "/work/d", timeout_s=0.3) as changes:
            assert [c async for c in changes] == []
        with pytest.raises(NoSuchFile):
            async with files.watch(own.place(), "/work/none"):
                pass

    here.run(check)


def test_a_sandbox_that_is_gone(tmp_path: object) -> None:
    with space() as made:
        place = made.own.place()

        async def check(files: Files, own: OwnSpace) -> None:
            os.kill(own.pid, 9)
            for _ in range(100):
                try:
                    await files.stat(place, "/")
                except SandboxLost:
                    break
                await asyncio.sleep(0.05)
            else:
                raise AssertionError("still there")
            # The number of another process.
            from dataclasses import replace

            with pytest.raises(SandboxLost):
                await files.stat(replace(place, pid=os.getpid()), "/")

        made.run(check)
