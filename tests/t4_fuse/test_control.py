"""The control socket: what it says, and that nothing sent to it hurts the mount."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dsecfs.errors import BadInput, Busy, Conflict, DsecfsError, NotFound
from dsecfs.fuse.config import node_config
from dsecfs.fuse.control import MAX_CALLERS, FsClient
from dsecfs.fuse.daemon import ensure_daemon
from tests.t4_fuse.family import Family, family, wait_for, why_no_resend

pytestmark = pytest.mark.skipif(bool(why_no_resend()), reason=why_no_resend() or "it works")


@pytest.fixture(scope="module")
def served() -> Iterator[Family]:
    with family() as f:
        yield f


@contextlib.contextmanager
def raw(f: Family) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(10)
        s.connect(str(f.config.control))
        yield s


def answer(s: socket.socket) -> dict[str, object]:
    with s.makefile("rb") as lines:
        return dict(json.loads(lines.readline()))


def test_status_and_stats(served: Family) -> None:
    status = served.client.status()
    assert {status["worker"], status["active"], status["standby"]} == served.pids()
    assert status["mountpoint"] == str(served.dirs.fs)
    assert status["resend"] is True
    stats = served.client.stats()
    assert stats["cache"] == {"hits": 1}
    assert set(stats["fuse"]) == {"reads", "waited_reads", "errors"}


def test_modules_in_the_callers_directory_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "logging", "dsecfs"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    with family() as f:
        assert f.client.ping()["worker"] in f.pids()
    assert not (tmp_path / "ran").exists()


def test_prefetch(served: Family) -> None:
    digest = served.add_blob("p", 4096)
    served.client.prefetch("job", [(digest, None), (digest, [0])])
    status = wait_for(
        "the end",
        lambda: (s := served.client.prefetch_status("job"))["finished"] and s,
    )
    assert (status["done"], status["total"], status["error"]) == (2, 2, "")
    with pytest.raises(NotFound):
        served.client.prefetch_status("nothing")
    with pytest.raises(BadInput):
        served.client.call("prefetch", id="x", blobs=[{"digest": "../../etc"}])
    with pytest.raises(BadInput):
        served.client.call("prefetch", id="x", blobs=[{"digest": digest, "chunks": [-1]}])
    with pytest.raises(BadInput):
        served.client.call("prefetch", id="", blobs=[])


def test_errors_come_back_as_they_were(served: Family) -> None:
    with pytest.raises(BadInput, match="unknown operation"):
        served.client.call("dance")
    with pytest.raises(BadInput, match="unknown mode"):
        served.client.call("stop", mode="nicely")
    with served.blob(served.add_blob("held", 4096)).open("rb"), pytest.raises(Busy):
        served.client.call("stop")


def test_several_requests_on_one_connection(served: Family) -> None:
    with raw(served) as s:
        s.sendall(b'{"op": "ping"}\n{"op":"pi')
        with s.makefile("rb") as lines:
            assert json.loads(lines.readline())["ok"]
            s.sendall(b'ng"}\n')
            assert json.loads(lines.readline())["ok"]


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.one_of(
        st.binary(max_size=200).map(lambda b: b.replace(b"\n", b"")),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=20),
            lambda c: st.lists(c, max_size=3)
            | st.dictionaries(
                st.sampled_from(["op", "id", "blobs", "digest", "chunks"]) | st.text(max_size=4),
                c,
                max_size=4,
            ),
            max_leaves=10,
        ).map(lambda v: json.dumps(v).encode()),
        st.builds(
            lambda op, extra: json.dumps({**extra, "op": op}).encode(),
            st.sampled_from(["ping", "status", "prefetch", "prefetch_status", "stats"]),
            st.dictionaries(
                st.sampled_from(["id", "blobs"]),
                st.none() | st.integers() | st.text(max_size=300) | st.lists(st.integers()),
            ),
        ),
    )
)
def test_any_line_gets_one_answer(served: Family, line: bytes) -> None:
    with raw(served) as s:
        s.sendall(line + b"\n")
        reply = answer(s)
    assert isinstance(reply["ok"], bool)
    if not reply["ok"]:
        assert reply["message"] != "internal error, see the log"


def test_endless_deep_and_silent_callers(served: Family) -> None:
    with raw(served) as s, pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(100):
            s.sendall(b"x" * 65536)
    with raw(served) as s:
        s.sendall(b"[" * 500_000 + b"\n")
        assert answer(s)["ok"] is False
    with contextlib.ExitStack() as open_sockets:
        with contextlib.suppress(BlockingIOError):  # the queue is full
            for _ in range(3 * MAX_CALLERS):
                open_sockets.enter_context(raw(served))
        rng = random.Random(1)
        with contextlib.suppress(OSError), raw(served) as s:
            s.sendall(rng.randbytes(1000))
    assert wait_for("it listens again", lambda: _pings(served))
    assert served.status()["deaths"] == 0


def _pings(f: Family) -> bool:
    try:
        return bool(f.client.ping())
    except DsecfsError:
        return False


def test_others_are_not_heard(served: Family) -> None:
    assert stat.S_IMODE(served.config.control.stat().st_mode) == 0o600
    # Even one who gets through the directories and the mode of the socket.
    code = (
        "import os,socket,sys\n"
        "s = socket.socket(socket.AF_UNIX); os.setgid(65534); os.setuid(65534)\n"
        "s.settimeout(10); s.connect(sys.argv[1])\n"
        "try:\n"
        "    s.sendall(b'{\"op\":\"ping\"}\\n'); sys.exit(len(s.recv(100)) > 0)\n"
        "except ConnectionError: pass\n"
    )
    modes = [(p, p.stat().st_mode) for p in (served.top, served.dirs.run, served.config.control)]
    try:
        for path, _ in modes:
            path.chmod(0o777)
        done = subprocess.run(
            [sys.executable, "-c", code, str(served.config.control)], timeout=30, check=False
        )
    finally:
        for path, mode in modes:
            path.chmod(stat.S_IMODE(mode))
    assert done.returncode == 0
    assert "was turned away" in served.log()


def test_another_store_is_a_conflict(served: Family) -> None:
    other = node_config(served.dirs, "file:/elsewhere")
    with pytest.raises(Conflict, match="elsewhere"):
        ensure_daemon(other)


def test_nobody_there() -> None:
    f = Family()
    try:
        with pytest.raises(NotFound):
            f.client.ping()
        with pytest.raises(NotFound):
            FsClient(f.top / "no" / "fs.sock").ping()
    finally:
        f.remove()


def test_a_long_path_of_the_socket() -> None:
    """Longer than the 108 bytes of a socket address."""
    f = Family()
    try:
        deep = f.top / ("d" * 100) / ("e" * 100)
        f.dirs = type(f.dirs)(f.dirs.data, deep / "run")
        f.dirs.create()
        f.config = node_config(f.dirs, "file:/nowhere", entry=f.config.entry)
        f.client = FsClient(f.config.control)
        f.start()
        assert f.client.ping()["worker"] in f.pids()
    finally:
        f.remove()
