"""The eager peer: podman pulling from Debian's docker-registry on loopback.

Owns a registry process and a podman storage directory, both temporary. podman 4.3 needs a
private mount namespace on hosts with hybrid cgroups, and few privileges to be taken away;
the flags below are the ones that work everywhere.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 300

_IN_NAMESPACE = (
    'if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi; exec "$@"'
)


class Timed(NamedTuple):
    """One run: seconds to the first line of output, seconds in all, bytes written to disk."""

    first_output_s: float
    total_s: float
    written: int
    output: bytes


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def registry(work: Path) -> Iterator[str]:
    """Run docker-registry over an empty directory; yields HOST:PORT."""
    port = free_port()
    config = work / "registry.yml"
    config.write_text(
        "version: 0.1\n"
        "log: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {work / 'registry'}}}}}\n"
        f"http: {{addr: 127.0.0.1:{port}}}\n"
    )
    process = subprocess.Popen(
        ["docker-registry", "serve", config],
        stdout=subprocess.DEVNULL,
        stderr=(work / "registry.log").open("wb"),
    )
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        else:
            raise SystemExit("docker-registry did not start")
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def push(layout: Path, host: str, name: str) -> str:
    """Copy an OCI layout into the registry; returns the image's name."""
    image = f"{host}/{name}:latest"
    subprocess.run(
        ["skopeo", "copy", "--quiet", "--dest-tls-verify=false", f"oci:{layout}:latest", f"docker://{image}"],
        check=True,
        timeout=LIMIT_S,
    )  # fmt: skip
    return image


class Podman:
    """podman with a storage directory of its own."""

    def __init__(self, work: Path) -> None:
        self._work = work
        self._storage = work / "podman"
        self._policy = work / "policy.json"
        self._policy.write_text('{"default":[{"type":"insecureAcceptAnything"}]}')

    def _command(self, *argv: str) -> list[str]:
        return [
            "unshare", "-m", "--propagation", "private", "sh", "-c", _IN_NAMESPACE, "sh",
            "podman", "--root", str(self._storage), "--runroot", str(self._work / "podman-run"),
            "--runtime", "crun", "--cgroup-manager", "cgroupfs", "--events-backend", "none",
            "--storage-driver", "overlay", *argv,
        ]  # fmt: skip

    def pull(self, image: str) -> float:
        """Seconds that `podman pull` took."""
        start = time.monotonic()
        subprocess.run(
            self._command(
                "pull",
                "--quiet",
                "--tls-verify=false",
                "--signature-policy",
                str(self._policy),
                image,
            ),
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=LIMIT_S,
        )
        return time.monotonic() - start

    def run(self, image: str, *argv: str) -> Timed:
        """Run a command in a container; pulls first if the image is not there."""
        command = self._command(
            "run", "--rm", "--pull=never", "--cgroups", "disabled", "--network", "none",
            "--security-opt", "seccomp=unconfined", "--ulimit", "nofile=1024:1024",
            "--ulimit", "nproc=4096:4096", image, *argv,
        )  # fmt: skip
        return timed(command)

    def cold(self, image: str, *argv: str) -> Timed:
        """Pull and run, timed as one."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock
        pulled = self.pull(image)
        ran = self.run(image, *argv)
        written = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock - before) * 512
        return Timed(pulled + ran.first_output_s, pulled + ran.total_s, written, ran.output)

    def clear(self) -> None:
        """Forget all images."""
        subprocess.run(
            self._command("system", "reset", "--force"),
            check=False, capture_output=True, timeout=LIMIT_S,
        )  # fmt: skip
        shutil.rmtree(self._storage, ignore_errors=True)
        shutil.rmtree(self._work / "podman-run", ignore_errors=True)


def timed(command: list[str], env: dict[str, str] | None = None) -> Timed:
    """Run a command to its end; see Timed. Raises SystemExit if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 65536)
        first_at = time.monotonic() - start
        rest = process.stdout.read()
        code = process.wait(LIMIT_S)
    total = time.monotonic() - start
    if code:
        raise SystemExit(f"{command[0]} … {command[-1]} ended with {code}")
    written = (resource.getrusage(resource.RUSAGE_CHILDREN).ru_oublock - before) * 512
    return Timed(first_at, total, written, first + rest)


def drop_caches() -> None:
    """Write back and drop the page cache, so that reads come from the disk again."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")


def workdir(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A temporary directory on a real disk (not tmpfs)."""
    return tempfile.TemporaryDirectory(prefix=prefix, dir="/var/tmp")
