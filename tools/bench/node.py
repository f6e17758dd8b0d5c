"""A node with nothing on it, near or far from its store, for benchmarks of starts."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from dsec_runtime.run import Runner, RunSpec
from dsecfs.fuse.daemon import stop_daemon
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.syscalls import umount
from dsecfs.layers.image import import_image
from dsecfs.layers.names import Name
from dsecfs.layers.sources.image import open_image
from dsecfs.node import Node, Prepared
from dsecfs.settings import Settings
from dsecfs.store.open import open_store
from tests.support.seaweed import Seaweed

LIMIT_S = 120.0
"""How long a program may take."""


def publish(server: Seaweed, layout: Path, prefix: str, name: str = "science") -> int:
    """Import an OCI layout below `prefix` as NAME:1; the bytes of its compressed layers."""
    with (
        contextlib.closing(open_store(server.url(prefix=prefix))) as store,
        open_image(f"oci:{layout}:latest") as image,
    ):
        import_image(store, image, Name("env", name, "1"))
    return sum(f.stat().st_size for f in (layout / "blobs" / "sha256").iterdir())


@contextlib.contextmanager
def far(port: int, passed: dict[str, int], *, latency_ms: float) -> Iterator[int]:
    """The port of a proxy in front of `port` of this machine, where every request takes
    `latency_ms` more; at the end `passed` has what went through."""
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.netfault"),
            *("--target", f"127.0.0.1:{port}", "--latency-ms", str(latency_ms)),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as proxy:
        assert proxy.stdin is not None and proxy.stdout is not None
        try:
            yield int(proxy.stdout.readline())
        finally:
            proxy.stdin.close()
            passed.update(json.loads(proxy.stdout.readline()))
            proxy.wait(10)


@contextlib.contextmanager
def empty_node(place: Path, url: str) -> Iterator[Node]:
    """A node with nothing on it but a running FUSE daemon; gone at the end."""
    node = Node(Settings(store=url, data_dir=place / "data", run_dir=place / "run"))
    try:
        node.start_fs()
        yield node
    finally:
        stop_daemon(node.fs_config(), mode="force")
        node.close()
        unpin_namespaces(node.dirs.namespace.parent)
        for mount in reversed(mounts_here()):
            if mount.point.is_relative_to(place):
                umount(mount.point, detach=True)
        shutil.rmtree(place)


def first_output(runner: Runner, prepared: Prepared, program: tuple[str, ...]) -> float:
    """Run a program that says "ready"; the moment (time.monotonic) when it does."""
    out, into = os.pipe()
    with open(out, "rb") as lines:
        spec = RunSpec(
            prepared.top_first,
            program,
            env=prepared.process_environment(),
            stdout=into,
            timeout_s=LIMIT_S,
        )
        try:
            running = runner.start(spec)
        finally:
            os.close(into)
        line = lines.readline()
        moment = time.monotonic()
        ended = running.wait()
    if line != b"ready\n" or ended.exit_code:
        raise SystemExit(f"the program said {line!r} and ended with {ended.exit_code}")
    return moment


def written(node: Node) -> int:
    """Bytes that the worker of a node's daemon had the kernel write to disks, now or later."""
    pid = node.start_fs().call("status")["worker"]
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
