"""Cold start: an image of 935 MB that the node has nothing of, from a name to the first output.

Ours comes from SeaweedFS over S3, podman's from Debian's docker-registry, both on loopback.
Each round of ours begins with an empty node on which only the FUSE daemon runs, each of podman's
with an empty storage directory; page caches are dropped before either. Ours is measured twice: the
whole command `dsec run`, and in a process that runs containers already; then as a command once
more when the store has a trace of one run. What goes over the wire is counted by a proxy, in a
round of its own, without a trace.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

from dsec_runtime.run import Runner
from tests.support.seaweed import Seaweed, seaweed
from tools.bench.images import science_image
from tools.bench.node import empty_node, far, first_output, publish, written
from tools.bench.podman import Podman, drop_caches, push, registry, timed
from tools.bench.report import Result, record, spread
from tools.bench.stage import cache_directory, parser

ENVIRONMENT = "science:1"
PROGRAM = ("/usr/bin/python3", "-c", "import numpy, pandas; print('ready', flush=True)")
PREFIX = "cold"
DSEC = (sys.executable, "-c", "from dsecfs.cli.main import main; main()")


def command(server: Seaweed, place: Path, *options: str, url: str = "") -> tuple[float, int]:
    """`dsec run` on an empty node: seconds to the first output, bytes written."""
    with empty_node(place / "node", url or server.url(prefix=PREFIX)) as node:
        before = written(node)
        settings = {
            "DSEC_CONFIG": "",
            "DSEC_STORE": node.settings.store,
            "DSEC_DATA_DIR": str(node.settings.data_dir),
            "DSEC_RUN_DIR": str(node.settings.run_dir),
            "PYTHONPATH": str(Path(__file__).parents[2]),
        }
        drop_caches()
        ran = timed(
            [*DSEC, "run", *options, ENVIRONMENT, "--", *PROGRAM], {**os.environ, **settings}
        )
        if ran.output != b"ready\n":
            raise SystemExit(f"dsec run said {ran.output!r}")
        return ran.first_output_s, ran.written + written(node) - before


def warm_process(server: Seaweed, place: Path) -> float:
    """The same in a process that has run containers before: seconds to the first output."""
    with (
        empty_node(place / "node", server.url(prefix=PREFIX)) as node,
        contextlib.closing(node.layer_mounts()) as mounts,
        Runner(node.dirs, mounts=mounts) as runner,
    ):
        runner.recover()
        runner.prepare()
        drop_caches()
        start = time.monotonic()
        client = node.start_fs()
        prepared = node.prepare(ENVIRONMENT)
        node.warm(client, prepared)
        return first_output(runner, prepared, PROGRAM) - start


def wire(server: Seaweed, place: Path) -> dict[str, int]:
    """What passes between the store and an empty node for one start, prefetch included."""
    passed: dict[str, int] = {}
    with far(server.port, passed, latency_ms=0) as port:
        command(server, place, url=server.url(prefix=PREFIX, port=port))
    return passed


def main() -> None:
    """Measure and record."""
    options = parser(__doc__, repeat=5)
    options.add_argument("--peer-repeat", type=int, default=2, help="rounds of podman")
    given = options.parse_args()
    layout = science_image(cache_directory())
    place = Path(os.path.realpath("/var/tmp"), f"dsec-cold-{os.getpid()}")
    place.mkdir(mode=0o700)
    try:
        with seaweed(place) as server:
            os.environ.update(server.environ)
            compressed = publish(server, layout, PREFIX)
            passed = wire(server, place)
            warm_process(server, place)  # what is imported once is imported now
            commands, warms, peers = [], [], []
            for number in range(max(given.repeat, given.peer_repeat)):
                if number < given.repeat:
                    commands.append(command(server, place))
                    warms.append(warm_process(server, place))
            command(server, place, "--record")
            traced = [command(server, place)[0] for _ in range(given.repeat)]
        with registry(place) as host:
            image = push(layout, host, "science")
            peer = Podman(place)
            for _ in range(given.peer_repeat):
                drop_caches()
                try:
                    peers.append(peer.cold(image, *PROGRAM))
                finally:
                    peer.clear()
    finally:
        shutil.rmtree(place)
    seconds = [one for one, _ in commands]
    ours, warm = spread(seconds), spread(warms)
    theirs = spread([one.first_output_s for one in peers])
    writes = spread([float(count) for _, count in commands])["median"]
    peer_writes = spread([float(one.written) for one in peers])["median"]
    ratio = theirs["median"] / ours["median"]
    recorded = theirs["median"] / spread(traced)["median"]
    in_process = theirs["median"] / warm["median"]
    wire_share = passed["bytes_down"] / compressed
    disk_share = writes / peer_writes
    record(
        Result(
            "cold_start",
            "cold start of the 935 MB image, nothing local: name to first output of "
            "`import numpy, pandas`, from SeaweedFS",
            "podman pull + run from docker-registry, cold",
            "≥10×; wire ≤25 % of the compressed image; disk writes ≤15 % of podman's",
            f"{ratio:.1f}× as a command ({ours['median']:.2f} s), {in_process:.1f}× in a warm "
            f"process ({warm['median']:.2f} s), {recorded:.1f}× once a run was recorded "
            f"({spread(traced)['median']:.2f} s); wire {wire_share:.1%}; writes {disk_share:.1%}",
            ratio >= 10 and wire_share <= 0.25 and disk_share <= 0.15,
            {
                "command_s": ours,
                "warm_process_s": warm,
                "with_a_trace_s": spread(traced),
                "podman_s": theirs,
                "compressed_bytes": compressed,
                "wire": passed,
                "written_bytes": writes,
                "podman_written_bytes": peer_writes,
            },
            note="without a trace the program waits for some 500 reads, one after the other, of a "
            "store whose page cache is cold, too: its own imports decide what comes next",
        )
    )


if __name__ == "__main__":
    main()
