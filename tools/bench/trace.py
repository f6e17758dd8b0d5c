"""Access traces: the cold start of a large image without, with a trace, and after optimize.

The science image is imported into SeaweedFS; a proxy in front of it makes every request of a
node take 10 ms more. A round starts one container per side on a node that has nothing of the
image (its file system is up), and takes the time from the name of the environment to the first
line of output of `import numpy, pandas`. One run, recorded before, is all the trace there is.
"""

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
from typing import Any

from dsec_runtime.run import Runner, RunSpec
from dsecfs.fuse.daemon import stop_daemon
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.kernel.syscalls import umount
from dsecfs.layers.image import import_image
from dsecfs.layers.names import Name
from dsecfs.layers.profile import optimize_runs
from dsecfs.layers.sources.image import open_image
from dsecfs.mount import LayerMounts
from dsecfs.mount.record import Recorder
from dsecfs.node import Node, Prepared
from dsecfs.settings import Settings
from dsecfs.store.open import open_store
from tests.support.seaweed import Seaweed, seaweed
from tools.bench.images import science_image
from tools.bench.report import Result, record, spread
from tools.bench.stage import alternate, cache_directory, parser

LATENCY_MS = 10
PROGRAM = ("/usr/bin/python3", "-c", "import numpy, pandas; print('ready', flush=True)")
LIMIT_S = 120.0


@contextlib.contextmanager
def far(server: Seaweed, passed: dict[str, int]) -> Iterator[int]:
    """The port of a proxy that is 10 ms away; at the end `passed` has what went through."""
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "tests.support.netfault"),
            *("--target", f"127.0.0.1:{server.port}", "--latency-ms", str(LATENCY_MS)),
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


def first_output(node: Node, prepared: Prepared, mounts: LayerMounts) -> float:
    """Run the program; the moment (time.monotonic) of its first line."""
    out, into = os.pipe()
    with Runner(node.dirs, mounts=mounts) as runner, open(out, "rb") as lines:
        spec = RunSpec(
            prepared.top_first,
            PROGRAM,
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


def cold_start(
    server: Seaweed, place: Path, prefix: str, figures: dict[str, list[int]], *, prefetch: bool
) -> float:
    """Seconds from the name to the first output. Bytes and requests go to `figures`."""
    passed: dict[str, int] = {}
    with (
        far(server, passed) as port,
        empty_node(place / "node", server.url(prefix=prefix, port=port)) as node,
    ):
        start = time.monotonic()
        prepared = node.prepare("science:1")
        client = node.start_fs()
        if prefetch:
            node.warm(client, prepared)
        with contextlib.closing(node.layer_mounts()) as mounts:
            seconds = first_output(node, prepared, mounts) - start
    for name in ("requests", "bytes_down"):
        figures.setdefault(name, []).append(passed[name])
    return seconds


def publish(server: Seaweed, layout: Path, prefix: str) -> int:
    """Import the image below `prefix`; the bytes of its compressed layers."""
    store = open_store(server.url(prefix=prefix))
    with open_image(f"oci:{layout}:latest") as image:
        import_image(store, image, Name("env", "science", "1"))
    store.close()
    return sum(f.stat().st_size for f in (layout / "blobs" / "sha256").iterdir())


def record_run(server: Seaweed, place: Path, prefix: str) -> dict[str, int]:
    """One recorded run, near the store."""
    with empty_node(place / "node", server.url(prefix=prefix)) as node:
        prepared = node.prepare("science:1")
        with Recorder.start(node.dirs, prepared.digest, prepared.layers) as recorder:
            with contextlib.closing(recorder.mounts()) as mounts:
                first_output(node, prepared, mounts)
            trace = recorder.save(node.store).trace
    return {"files": len({a.path for a in trace.accesses}), "bytes": trace.total}


def optimized(server: Seaweed, prefix: str, place: Path) -> dict[str, int]:
    """Optimize what was recorded."""
    settings = Settings(store=server.url(prefix=prefix), data_dir=place / "d", run_dir=place / "r")
    node = Node(settings)
    done = optimize_runs(node.store, [node.environment("science:1")]).written
    node.close()
    return {"chunks": done.chunks, "stored": done.stored}


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=5).parse_args()
    layout = science_image(cache_directory())
    place = Path(os.path.realpath("/var/tmp"), f"dsec-trace-{os.getpid()}")
    place.mkdir(mode=0o700)
    sides: dict[str, tuple[str, bool]] = {
        "without": ("plain", False),
        "trace": ("plain", True),
        "optimized": ("hot", True),
    }
    figures: dict[str, dict[str, list[int]]] = {side: {} for side in sides}
    try:
        with seaweed() as server:
            os.environ.update(server.environ)
            for prefix in ("plain", "hot"):
                compressed = publish(server, layout, prefix)
                recorded = record_run(server, place, prefix)
            hot = optimized(server, "hot", place)
            seconds = alternate(
                options.repeat,
                {
                    side: lambda side=side, at=at: cold_start(  # type: ignore[misc]
                        server, place, at[0], figures[side], prefetch=at[1]
                    )
                    for side, at in sides.items()
                },
            )
    finally:
        shutil.rmtree(place)
    medians = {side: spread(values)["median"] for side, values in seconds.items()}
    times = {side: medians["without"] / medians[side] for side in ("trace", "optimized")}
    wire = {side: max(found["bytes_down"]) for side, found in figures.items()}
    share = max(wire["trace"], wire["optimized"]) / compressed
    everything: dict[str, Any] = {
        "latency_ms": LATENCY_MS,
        "compressed_image_bytes": compressed,
        "recorded": recorded,
        "hot_object": hot,
        **{f"{side}_first_output_s": spread(values) for side, values in seconds.items()},
        **{f"{side}_wire_bytes": count for side, count in wire.items()},
        **{f"{side}_requests": max(found["requests"]) for side, found in figures.items()},
    }
    record(
        Result(
            "trace",
            "cold start of the 935 MB image with a trace, and after optimize; 10 ms store latency",
            "the same without",
            "≥2×; wire ≤25 % of the compressed image",
            f"{times['trace']:.1f}× and {times['optimized']:.1f}×; {share:.1%} on the wire",
            times["optimized"] >= 2 and share <= 0.25,
            everything,
            note=f"without: {medians['without']:.1f} s and "
            f"{everything['without_requests']} requests; with a trace: {medians['trace']:.1f} s "
            f"and {everything['trace_requests']}; after optimize: "
            f"{medians['optimized']:.1f} s and {everything['optimized_requests']}",
        )
    )


if __name__ == "__main__":
    main()
