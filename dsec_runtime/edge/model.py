"""What the edge's API takes and gives, as pydantic models. Owns names, units, ranges, defaults.

What must hold: unknown fields are refused; a value that passes here is one that the kernel,
the journal and a file name can take; sizes are MiB where a name ends in `_mb`, times are
seconds, times of day are seconds since 1970 (UTC). The API is additive: fields are never
renamed or given another meaning.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

MAX_NAME = 128
MAX_LABELS = 64
DEFAULT_PIDS = 4096
DEFAULT_MEMORY_MB = 4096
DEFAULT_CPUS = 4.0
DEFAULT_DISK_MB = 10240
DEFAULT_IDLE_S = 300.0
"""`ttl_running_stop` of the DSec report, section 2.1."""
REQUEST_SHARE = 16
"""`memory_request_mb` is the limit divided by this, when it is not given."""
DEFAULT_CPU_REQUEST = 0.05
RESULT_EDGE = 1 << 20
"""Bytes of each end of each stream that a result holds."""

SANDBOX_ID = re.compile(r"[a-z0-9]{12}\Z")
EXEC_ID = re.compile(r"[a-z0-9]{16}\Z")

Name = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=MAX_NAME)
]
"""Of a session, a label key, a job: safe in a path, a URL and a log."""
Text = Annotated[str, StringConstraints(max_length=4096, pattern=r"^[^\x00]*$")]
GuestPath = Annotated[str, StringConstraints(max_length=4096, pattern=r"^/[^\x00]*$")]
"""An absolute path in a sandbox."""
Variables = dict[
    Annotated[str, StringConstraints(pattern=r"^[^=\x00]+$", max_length=256)],
    Annotated[str, StringConstraints(pattern=r"^[^\x00]*$", max_length=128 << 10)],
]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class State(StrEnum):
    """Design §7. creating → running ⇄ paused → archived; → stopping → stopped | failed."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSED = "paused"
    ARCHIVED = "archived"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        return self in (State.STOPPED, State.FAILED)


class Outcome(StrEnum):
    """How a command ended."""

    EXITED = "exited"
    SIGNAL = "signal"
    TIMEOUT = "timeout"
    OOM = "oom"
    PIDS = "pids"
    DISK = "disk"
    DENIED = "denied"
    LOST = "lost"
    """Nothing is known about its end. It has no exit code."""


class Fault(StrEnum):
    """Who is to blame for an outcome. A platform fault never carries an exit code."""

    NONE = ""
    AGENT = "agent"
    ENVIRONMENT = "environment"
    CALLER = "caller"
    PLATFORM = "platform"


class Mount(Model):
    """Something mounted at `at`: exactly one of layer, scratch, host."""

    at: GuestPath
    layer: Text = ""
    """Name or digest of a layer, read-only."""
    scratch_mb: int = Field(0, ge=0, le=1 << 24)
    """An empty tmpfs of this size."""
    host: Text = ""
    """A path of the node; must lie in the node's allow list (setting node_host_mounts)."""
    read_only: bool = True
    """Of `host`."""

    @model_validator(mode="after")
    def _one(self) -> Mount:
        if sum(map(bool, (self.layer, self.scratch_mb, self.host))) != 1:
            raise ValueError("give one of layer, scratch_mb, host")
        return self


class Ulimit(Model):
    soft: int = Field(ge=0)
    hard: int = Field(ge=0)


class Limits(Model):
    """What a sandbox may use at most. They are enforced by the kernel."""

    memory_mb: int = Field(DEFAULT_MEMORY_MB, ge=4, le=1 << 24)
    """Swap included."""
    cpus: float = Field(DEFAULT_CPUS, ge=0.01, le=4096)
    pids: int = Field(DEFAULT_PIDS, ge=2, le=4 << 20)
    disk_mb: int = Field(DEFAULT_DISK_MB, ge=4, le=1 << 26)
    """What it may write."""
    open_files: int = Field(65536, ge=16, le=1 << 20)


class Lifetime(Model):
    """When a sandbox ends by itself, and how."""

    idle_timeout_s: float | None = Field(DEFAULT_IDLE_S, gt=0, le=30 * 86400)
    """Without an exec, stream or request to a port. None: it may idle."""
    max_lifetime_s: float | None = Field(None, gt=0, le=366 * 86400)
    """From its creation; paused time does not count."""
    then: Literal["stop", "pause"] = "stop"
    """What happens when either has passed."""
    archive_after_s: float | None = Field(None, gt=0)
    """Paused longer than that, its files go to the store and it leaves the node."""
    keep_on_failure: bool = False
    """A sandbox that fails keeps its files until it is removed."""


class NetworkRule(Model):
    """What may be reached. One of service, host, cidr."""

    service: Text = ""
    """A name of the node's configuration: pypi, npm, apt …"""
    host: Text = ""
    """A host name; "*.example.org" means every name below example.org."""
    cidr: Text = ""
    """An address or range, e.g. 93.184.216.0/24."""
    ports: tuple[Annotated[int, Field(ge=1, le=65535)], ...] = ()
    """Empty: those of the service; 80 and 443 for a host; all for a cidr."""
    protocol: Literal["tcp", "udp"] = "tcp"

    @model_validator(mode="after")
    def _one(self) -> NetworkRule:
        if sum(map(bool, (self.service, self.host, self.cidr))) != 1:
            raise ValueError("give one of service, host, cidr")
        return self


class Network(Model):
    """Default deny. Host, other sandboxes, private ranges and metadata addresses are never
    reachable, whatever the rules say."""

    allow: tuple[NetworkRule, ...] = Field((), max_length=1024)
    internet: bool = False
    """Everything public."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        """The short form {"pypi": true, "npm": false}."""
        if isinstance(value, dict) and value and not set(value) & {"allow", "internet"}:
            if not all(isinstance(v, bool) for v in value.values()):
                raise ValueError('expected {"SERVICE": true} or {"allow": [...]}')
            return {"allow": [{"service": name} for name, on in value.items() if on]}
        return value


class SandboxSpec(Model):
    """What `create` takes."""

    environment: Text
    """Name of an environment or a base, or an environment's digest."""
    toolkits: tuple[Text, ...] = Field((), max_length=64)
    """On top of it: NAME@CHANNEL, NAME:VERSION."""
    backend: Literal["container", "fncall", "microvm", "fullvm"] = "container"
    platform: Text = ""
    name: Name | None = None
    """For people; need not be unique."""
    labels: dict[Name, Text] = Field({}, max_length=MAX_LABELS)
    job: Name | None = None
    key: Annotated[str, StringConstraints(max_length=128)] | None = None
    """Idempotency: a second create with it returns the first one's sandbox."""

    variables: Variables = {}
    """On top of those of the environment; every exec has them."""
    cwd: GuestPath | None = None
    user: Annotated[str, StringConstraints(max_length=128)] = ""
    """Of its execs: NAME, UID, NAME:GROUP. A name that is missing is created (home below /home)."""
    hostname: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?$", max_length=64)
    ] = "sandbox"
    extra_hosts: dict[Name, Text] = Field({}, max_length=256)
    """Host name to address, in /etc/hosts."""
    tmpfs: dict[GuestPath, Annotated[int, Field(ge=1, le=1 << 24)]] = Field({}, max_length=32)
    """Path to MiB."""
    shm_mb: int = Field(64, ge=1, le=1 << 22)
    ulimits: dict[Name, Ulimit] = {}
    """Name as in setrlimit(2), lower case without RLIMIT_: core, nofile, nproc, stack …"""
    mounts: tuple[Mount, ...] = Field((), max_length=64)
    entrypoint: bool = False
    """Run the image's own entrypoint and command as the first exec ("entrypoint")."""
    ready_cmd: str | tuple[str, ...] | None = None
    """The sandbox is running when this exits with 0."""
    ready_timeout_s: float = Field(60, gt=0, le=86400)
    oci_runtime: Literal["crun", "runsc"] = "crun"

    limits: Limits = Limits()
    memory_request_mb: int | None = Field(None, ge=1)
    """What admission counts. Default: the limit divided by 16."""
    cpu_request: float = Field(DEFAULT_CPU_REQUEST, ge=0, le=4096)
    network: Network = Network()
    lifetime: Lifetime = Lifetime()

    @property
    def memory_counted_mb(self) -> int:
        return self.memory_request_mb or max(1, self.limits.memory_mb // REQUEST_SHARE)


class Why(Model):
    """The cause of a sandbox's last change."""

    cause: Text = ""
    """A word: asked, idle, lifetime, exited, oom, lost, reboot, create-failed, drain …"""
    message: str = ""
    fault: Fault = Fault.NONE


class Sandbox(Model):
    """A sandbox as the API shows it."""

    id: str
    state: State
    name: str | None
    environment: str
    """Digest of what it was made from: every layer of it."""
    environment_name: str
    toolkits: tuple[str, ...]
    backend: str
    labels: dict[str, str]
    job: str | None
    user: str
    limits: Limits
    network: Network
    lifetime: Lifetime
    created_at: float
    started_at: float | None
    ended_at: float | None
    paused_at: float | None
    idle_since: float | None
    """None while something is going on."""
    ends_at: float | None
    """When it will be stopped or paused, if nothing happens."""
    why: Why


class ExecSpec(Model):
    """A command to run in a sandbox."""

    command: str | tuple[Text, ...]
    """A text runs in the sandbox's shell, words without one."""
    session: Name | None = None
    """In this shell session, which keeps directory and variables. Made if it is missing."""
    variables: Variables = {}
    cwd: GuestPath | None = None
    user: Annotated[str, StringConstraints(max_length=128)] | None = None
    stdin: bool = False
    """Keep its standard input open for what will be sent; else it is /dev/null."""
    input: str | None = Field(None, max_length=16 << 20)
    """Text for its standard input, which then ends."""
    tty: bool = False
    rows: int = Field(24, ge=1, le=4096)
    columns: int = Field(80, ge=1, le=4096)
    timeout_s: float | None = Field(None, gt=0, le=30 * 86400)
    """Then its process tree is ended: SIGTERM, and SIGKILL after `grace_s`."""
    grace_s: float = Field(5, ge=0, le=600)
    key: Annotated[str, StringConstraints(max_length=128)] | None = None
    """Idempotency within the sandbox: a second start with it gives the first one's exec."""
    label: Text = ""


class Exec(Model):
    """A command that runs or ran."""

    id: str
    sandbox: str
    command: str | tuple[str, ...]
    session: str | None
    label: str
    tty: bool
    started_at: float
    ended_at: float | None
    running: bool


class Output(Model):
    """One stream of a finished command: its first and its last MiB."""

    text: str
    """Decoded as UTF-8 with replacement; a cut is marked by a line."""
    head: bytes
    tail: bytes
    """Empty if everything is in `head`."""
    total: int
    """Bytes written by the command."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, ser_json_bytes="base64", val_json_bytes="base64"
    )


class ExecResult(Model):
    """How a command ended, and what it said."""

    id: str
    sandbox: str
    outcome: Outcome
    fault: Fault
    code: int | None
    """Exit code; 128 + n after signal n. None when nothing is known or the platform failed."""
    signal: int | None
    stdout: Output
    stderr: Output
    truncated: bool
    duration_s: float
    limit: str = ""
    """The limit that was hit: memory, pids, disk, time, output."""
    message: str = ""
    """For people: what happened, and what to do."""


class Stats(Model):
    """What a sandbox uses now."""

    memory_bytes: int
    memory_peak_bytes: int | None
    memory_limit_bytes: int
    cpu_s: float
    """CPU time used since its start."""
    pids: int
    disk_bytes: int
    disk_limit_bytes: int
    execs: int
    network_denied: int = 0


class Event(Model):
    """Something that happened to a sandbox; `seq` grows over the node's life."""

    seq: int
    at: float
    sandbox: str
    kind: Text
    """created, running, paused, resumed, archived, stopping, stopped, failed, expiring, denied,
    limit, snapshot, adopted …"""
    data: dict[str, Any] = {}


class Problem(Model):
    """Body of every error answer."""

    type: str
    """Name of the error's class."""
    message: str
    hint: str = ""
    field: str = ""
    """Of the request, when one field is to blame: "limits.memory_mb"."""
    recoverable: bool = False
    """The same request may succeed later."""
    sandbox_usable: bool | None = None
    """Whether the sandbox can still be worked in; None if that was not the question."""
    retry_after_s: float | None = None
