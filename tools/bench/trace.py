"""Access traces: the cold start of a large image without, with a trace, and after optimize.

The science image is imported into SeaweedFS; a proxy in front of it makes every request of a
node take 10 ms more. A round starts one container per side on a node that has nothing of the
image (its file system is up), and takes the time from the name of the environment to the first
line of output of `import numpy, pandas`. One run, recorded before, is all the trace there is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path
from typing import Any

from dsec_runtime.run import Runner
from dsecfs.layers.profile import optimize_runs
from dsecfs.mount.record import Recorder
from dsecfs.node import Node
from dsecfs.settings import Settings
from tests.support.seaweed import Seaweed, seaweed
from tools.bench.images import science_image
from tools.bench.node import empty_node, far, first_output, publish
from tools.bench.report import Result, record, spread
from tools.bench.stage import alternate, cache_directory, parser

LATENCY_MS = 10
PROGRAM = ("/usr/bin/python3", "-c", "import numpy, pandas; print('ready', flush=True)")


def cold_start(
    server: Seaweed, place: Path, prefix: str, figures: dict[str, list[int]], *, prefetch: bool
) -> float:
    """Seconds from the name to the first output. Bytes and requests go to `figures`."""
    passed: dict[str, int] = {}
    with (
        far(server.port, passed, latency_ms=LATENCY_MS) as port,
        empty_node(place / "node", server.url(prefix=prefix, port=port)) as node,
    ):
        start = time.monotonic()
        prepared = node.prepare("science:1")
        client = node.start_fs()
        if prefetch:
            node.warm(client, prepared)
        with (
            contextlib.closing(node.layer_mounts()) as mounts,
            Runner(node.dirs, mounts=mounts) as runner,
        ):
            seconds = first_output(runner, prepared, PROGRAM) - start
    for name in ("requests", "bytes_down"):
        figures.setdefault(name, []).append(passed[name])
    return seconds


def record_run(server: Seaweed, place: Path, prefix: str) -> dict[str, int]:
    """One recorded run, near the store."""
    with empty_node(place / "node", server.url(prefix=prefix)) as node:
        prepared = node.prepare("science:1")
        with Recorder.start(node.dirs, prepared.digest, prepared.layers) as recorder:
            with (
                contextlib.closing(recorder.mounts()) as mounts,
                Runner(node.dirs, mounts=mounts) as runner,
            ):
                first_output(runner, prepared, PROGRAM)
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
