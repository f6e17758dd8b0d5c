"""A burst of different images: 64 variants of one base, 8 at a time, 10 ms from the store.

Each variant is one base of some 270 MB and a layer of 40 MB that no other has. Ours: one empty
node, SeaweedFS behind a proxy that delays every request; podman: one empty storage directory,
docker-registry behind the same kind of proxy. Podman's rate does not change over its images,
so it may be given fewer of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dsec_runtime.run import Runner
from tests.support.seaweed import seaweed
from tools.bench.images import base_tar, variant_image
from tools.bench.node import empty_node, far, first_output, publish
from tools.bench.podman import Podman, drop_caches, push, registry
from tools.bench.report import Result, record, spread
from tools.bench.stage import cache_directory, parser

PREFIX = "many"
PROGRAM = ("/usr/bin/python3", "/opt/app/main.py")
LATENCY_MS = 10.0


def burst(
    start: Callable[[int], float], count: int, parallel: int
) -> tuple[list[float], float]:
    """`start(number)` for each number, so many at a time: each one's seconds, and in all."""
    began = time.monotonic()
    with ThreadPoolExecutor(parallel) as pool:
        seconds = list(pool.map(start, range(count)))
    return seconds, time.monotonic() - began


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=1)
    options.add_argument("--images", type=int, default=64, help="different images")
    options.add_argument("--peer-images", type=int, default=16, help="how many podman gets")
    options.add_argument("--parallel", type=int, default=8, help="runs at the same time")
    given = options.parse_args()
    cache = cache_directory()
    base_tar(cache)
    place = Path(os.path.realpath("/var/tmp"), f"dsec-many-{os.getpid()}")
    place.mkdir(mode=0o700)
    passed: dict[str, int] = {}
    peer_passed: dict[str, int] = {}
    try:
        with seaweed(place) as server, registry(place) as host:
            os.environ.update(server.environ)
            for number in range(given.images):
                layout = variant_image(cache, number)
                publish(server, layout, PREFIX, f"variant{number}")
                if number < given.peer_images:
                    push(layout, host, f"variant{number}")
                shutil.rmtree(layout)
            with (
                far(server.port, passed, latency_ms=LATENCY_MS) as port,
                empty_node(place / "node", server.url(prefix=PREFIX, port=port)) as node,
                contextlib.closing(node.layer_mounts()) as mounts,
                Runner(node.dirs, mounts=mounts) as runner,
            ):
                runner.recover()
                runner.prepare()
                client = node.start_fs()
                drop_caches()

                def ours(number: int) -> float:
                    begin = time.monotonic()
                    prepared = node.prepare(f"variant{number}:1")
                    node.warm(client, prepared)
                    return first_output(runner, prepared, PROGRAM) - begin

                mine, mine_all = burst(ours, given.images, given.parallel)
            peer_port = int(host.rpartition(":")[2])
            with far(peer_port, peer_passed, latency_ms=LATENCY_MS) as port:
                podman = Podman(place)
                drop_caches()

                def peer(number: int) -> float:
                    image = f"127.0.0.1:{port}/variant{number}:latest"
                    return podman.cold(image, *PROGRAM).first_output_s

                try:
                    theirs, theirs_all = burst(peer, given.peer_images, given.parallel)
                finally:
                    podman.clear()
    finally:
        shutil.rmtree(place)
    of_ours, of_theirs = spread(mine), spread(theirs)
    p50 = of_theirs["median"] / of_ours["median"]
    p99 = of_theirs["p99"] / of_ours["p99"]
    record(
        Result(
            "many_images",
            f"{given.images} different images of 310 MB, {given.parallel} at a time, "
            f"{LATENCY_MS:.0f} ms from the store: time to first output",
            "podman from a registry behind the same latency",
            "≥5×",
            f"p50 {p50:.1f}× ({of_ours['median']:.1f} s), p99 {p99:.1f}× ({of_ours['p99']:.1f} s); "
            f"{passed['requests'] / given.images:.0f} requests, "
            f"{passed['bytes_down'] / given.images / 1e6:.1f} MB a sandbox",
            min(p50, p99) >= 5,
            {
                "ours_s": of_ours,
                "ours_all_s": mine_all,
                "ours_wire": passed,
                "podman_s": of_theirs,
                "podman_all_s": theirs_all,
                "podman_wire": peer_passed,
                "podman_images": given.peer_images,
            },
            note=f"podman was given {given.peer_images} of the images",
        )
    )


if __name__ == "__main__":
    main()
