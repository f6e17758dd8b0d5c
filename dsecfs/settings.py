"""Every setting of dsec, declared once: name, type, default, unit, range, hot or cold.

Where a value comes from, later ones win:

    default < configuration file < DSEC_<NAME> < command line (--set NAME=VALUE, --store URL)

The file is TOML with one line per setting: $DSEC_CONFIG if that is set ("" for none), else
/etc/dsec/config.toml and then ~/.config/dsec/config.toml. What must hold: unknown names are
refused wherever they stand, values out of range too, in one line that says where they were
found; every value knows where it came from (`dsec config show --origin`).

*hot* settings count from the next operation on, *cold* ones when the node's file system
(`dsec fs`) is started the next time. Written with the standard library: `dsec run` reads
settings on its way to the first system call (docs/dependencies.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dsecfs.errors import BadInput
from dsecfs.nodedirs import NodeDirs

if TYPE_CHECKING:
    from dsecfs.store.base import Store

CONFIG_VARIABLE = "DSEC_CONFIG"
PREFIX = "DSEC_"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "DSEC_QUICKSTART_DIR", "DSEC_BENCH_CACHE"})
"""Variables with our prefix that are no settings."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)?", re.ASCII)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BOOLS = {"true": True, "yes": True, "on": True, "1": True}
_BOOLS |= {"false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True, slots=True)
class Spec:
    """What is declared about a setting besides its name and default."""

    parse: Callable[[str], Any]
    unit: str
    hot: bool
    help: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()


def parse_size(text: str) -> int:
    """Bytes: "20GiB", "1.5 MB", "4096". KiB and K count 1024, KB counts 1000."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise BadInput(f"not a size: {text[:40]!r}", hint="expected e.g. 4096, 512MiB or 20GiB")
    number, prefix, binary = match.groups()
    power = " KMGT".index(prefix) if prefix else 0
    decimal = prefix and not binary and text.strip().endswith("B")
    return int(float(number) * (1000 if decimal else 1024) ** power)


def parse_duration(text: str) -> float:
    """Seconds: "30s", "500ms", "2h", "30"."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise BadInput(f"not a duration: {text[:40]!r}", hint="expected e.g. 500ms, 30s or 2h")
    return float(match[1]) * _SECONDS[match[2] or "s"]


def _parse_bool(text: str) -> bool:
    try:
        return _BOOLS[text.strip().lower()]
    except KeyError:
        raise BadInput(f"not a switch: {text[:40]!r}", hint="expected true or false") from None


def _parse_int(text: str) -> int:
    if not re.fullmatch(r"-?\d{1,18}", text.strip(), re.ASCII):
        raise BadInput(f"not a whole number: {text[:40]!r}")
    return int(text)


def _parse_float(text: str) -> float:
    if not re.fullmatch(r"-?\d{1,18}(\.\d{1,18})?", text.strip(), re.ASCII):
        raise BadInput(f"not a number: {text[:40]!r}")
    return float(text)


def _parse_text(text: str) -> str:
    if "\0" in text:
        raise BadInput("a NUL in the text")
    return text.strip()


def _parse_path(text: str) -> Path:
    path = Path(os.path.expanduser(_parse_text(text)))
    if not path.is_absolute():
        raise BadInput(f"not an absolute path: {str(path)[:120]!r}")
    return path


def _setting(
    default: Any,
    parse: Callable[[str], Any],
    help: str,
    *,
    unit: str = "",
    hot: bool = False,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    spec = Spec(parse, unit, hot, help, low, high, choices)
    if callable(default):
        return field(default_factory=default, metadata={"spec": spec})
    return field(default=default, metadata={"spec": spec})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings with their values. The declarations below are the only list of them."""

    store: str = _setting(
        "",
        _parse_text,
        "where layers are: file:DIR, 3fs:DIR or s3://BUCKET/PREFIX; "
        "empty: file:DATA_DIR/store, made at need",
    )
    s3_endpoint: str = _setting("", _parse_text, "URL of the S3 server; empty: Amazon's")
    s3_region: str = _setting("", _parse_text, "region of the bucket; empty: the client's choice")
    s3_path_style: str = _setting(
        "auto",
        _parse_text,
        "address buckets by path instead of by host name",
        choices=("auto", "true", "false"),
    )
    data_dir: Path = _setting(  # noqa: RUF009
        lambda: NodeDirs.default().data, _parse_path, "cache, metadata and uppers of this node"
    )
    run_dir: Path = _setting(  # noqa: RUF009
        lambda: NodeDirs.default().run, _parse_path, "mounts and sockets of this boot"
    )
    mode: str = _setting(
        "auto",
        _parse_text,
        "how layers are mounted (docs/kernels.md); auto: the fastest that this kernel can",
        hot=True,
        choices=("auto", "kernel", "loop", "fuse"),
    )
    platform: str = _setting(
        "", _parse_text, "platform of layers and environments; empty: this machine's", hot=True
    )
    prefetch: bool = _setting(
        True, _parse_bool, "fetch what earlier runs needed as soon as it is mounted", hot=True
    )
    codec: str = _setting(
        "lz4",
        _parse_text,
        "how chunks are compressed that are published",
        hot=True,
        choices=("lz4", "zstd", "raw"),
    )
    upper: str = _setting(
        "disk",
        _parse_text,
        "where containers write: disk, tmpfs (memory, with a limit) or image (disk, with a limit)",
        hot=True,
        choices=("disk", "tmpfs", "image"),
    )
    cache_max_bytes: int = _setting(
        50 << 30,
        parse_size,
        "most that the chunk cache may take; never more than 80 % of its file system",
        unit="bytes",
        low=64 << 20,
        high=1 << 50,
    )
    cache_high: float = _setting(
        0.95, _parse_float, "share of cache_max_bytes above which chunks go", low=0.1, high=1
    )
    cache_low: float = _setting(
        0.85, _parse_float, "share of cache_max_bytes down to which they go", low=0.05, high=1
    )
    cache_min_free: int = _setting(
        256 << 20,
        parse_size,
        "space that the cache leaves free on its disk",
        unit="bytes",
        low=0,
        high=1 << 50,
    )
    metadata_max_bytes: int = _setting(
        4 << 30,
        parse_size,
        "most that heads, images and names of layers take on this node; the oldest unused go",
        unit="bytes",
        low=1 << 20,
        high=1 << 50,
    )
    scrub_interval_s: float = _setting(
        86400.0,
        parse_duration,
        "how often cached bytes that the kernel reads directly are checked against their digests",
        unit="seconds",
        low=60,
        high=365 * 86400,
    )
    check_rate: int = _setting(
        16 << 20,
        parse_size,
        "bytes a second that are read for such checks, and for those after a boot",
        unit="bytes/s",
        low=64 << 10,
        high=1 << 40,
    )
    fetch_threads: int = _setting(
        32, _parse_int, "range reads from the store at the same time", low=1, high=512
    )
    fetch_ahead: int = _setting(
        32 << 20,
        parse_size,
        "bytes fetched ahead of a large file that is read in order",
        unit="bytes",
        low=0,
        high=1 << 30,
    )
    mount_read_ahead: int = _setting(
        128 << 10,
        parse_size,
        "bytes that the kernel reads ahead in layers whose files arrive on demand",
        unit="bytes",
        hot=True,
        low=0,
        high=1 << 20,
    )
    read_deadline_s: float = _setting(
        30.0,
        parse_duration,
        "a read that takes longer fails with an I/O error",
        unit="seconds",
        low=1,
        high=600,
    )
    request_limit_s: float = _setting(
        120.0,
        parse_duration,
        "a FUSE request that takes longer is answered with an I/O error",
        unit="seconds",
        low=5,
        high=3600,
    )
    node_group: str = _setting(
        "dsec", _parse_text, "group that may use the edge's socket (dsec node); empty: root alone"
    )
    node_listen: str = _setting(
        "",
        _parse_text,
        "HOST:PORT where the edge listens besides its socket; needs node_token_file, and "
        "loopback or node_tls_cert",
    )
    node_token_file: str = _setting(
        "", _parse_text, "file with the token that callers over TCP must send"
    )
    node_url: str = _setting(
        "",
        _parse_text,
        "edge that dsec sandbox and dsec node talk to: http://HOST:PORT or https://…, with the "
        "token in node_token_file; empty: the socket in run_dir",
        hot=True,
    )
    node_tls_cert: str = _setting("", _parse_text, "PEM file: certificate of the edge, with chain")
    node_tls_key: str = _setting("", _parse_text, "PEM file: its key")
    node_host_mounts: str = _setting(
        "", _parse_text, "paths of the node, separated by ':', that sandboxes may mount"
    )
    node_max_sandboxes: int = _setting(
        4096, _parse_int, "sandboxes on the node at a time", low=1, high=65536
    )
    node_overcommit_memory: float = _setting(
        1.0,
        _parse_float,
        "memory that requests may add up to, times what the machine has",
        low=0.01,
        high=100,
    )
    node_overcommit_cpu: float = _setting(
        4.0,
        _parse_float,
        "CPUs that requests may add up to, times what the machine has",
        low=0.01,
        high=1000,
    )
    network_services: str = _setting(
        "", _parse_text, "TOML file with named services for network policies, besides the built-in"
    )

    @property
    def dirs(self) -> NodeDirs:
        return NodeDirs(self.data_dir, self.run_dir)

    @property
    def store_url(self) -> str:
        """The store's URL with the s3_* settings in it: all that a daemon needs to open it."""
        url = self.store or f"file:{self.data_dir / 'store'}"
        if not url.startswith("s3:"):
            return url
        from urllib.parse import parse_qsl, quote

        said = dict(parse_qsl(url.partition("?")[2], keep_blank_values=True))
        wanted = {"endpoint": self.s3_endpoint, "region": self.s3_region}
        if self.s3_path_style != "auto":
            wanted["path_style"] = self.s3_path_style
        for name, value in wanted.items():
            if value and name not in said:
                url += f"{'&' if '?' in url else '?'}{name}={quote(value, safe=':/')}"
        return url

    def open_store(self, give_up_s: float | None = None) -> Store:
        """The store. The default one is made if it is missing; others must exist. Calls fail
        after `give_up_s` of trouble instead of the usual time."""
        from dsecfs.store.open import open_store
        from dsecfs.store.retry import DEFAULT_POLICY, RetryPolicy

        policy = RetryPolicy(give_up_s, give_up_s, give_up_s) if give_up_s else DEFAULT_POLICY
        return open_store(self.store_url, create=not self.store, policy=policy)

    def cache_options(self) -> dict[str, Any]:
        """Keyword arguments of `dsecfs.cache.ChunkCache`, for the node's daemon."""
        limit = self.cache_max_bytes
        if self.data_dir.is_dir():
            disk = os.statvfs(self.data_dir)
            limit = min(limit, disk.f_blocks * disk.f_frsize * 4 // 5)
        return {
            "max_bytes": limit,
            "high": self.cache_high,
            "low": min(self.cache_low, self.cache_high),
            "min_free": self.cache_min_free,
            "threads": self.fetch_threads,
            "deadline_s": self.read_deadline_s,
            "read_ahead": self.fetch_ahead,
        }


    def housekeeping_options(self) -> dict[str, Any]:
        """`FsConfig.housekeeping` for the node's daemons."""
        return {
            "metadata_max_bytes": self.metadata_max_bytes,
            "scrub_interval_s": self.scrub_interval_s,
            "check_rate": self.check_rate,
        }


SPECS: Mapping[str, Spec] = {f.name: f.metadata["spec"] for f in fields(Settings)}


class Loaded(NamedTuple):
    """Settings and where each value was found: "default", a file, "$VARIABLE", an option."""

    settings: Settings
    origins: Mapping[str, str]


def config_files(environ: Mapping[str, str] | None = None) -> list[Path]:
    """Configuration files that count, in the order in which they are read."""
    environ = os.environ if environ is None else environ
    if (named := environ.get(CONFIG_VARIABLE)) is not None:
        return [Path(named)] if named else []
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", "/"), ".config")
    found = [Path("/etc/dsec/config.toml"), Path(home, "dsec/config.toml")]
    return [path for path in found if path.exists()]


def load(
    options: Iterable[tuple[str, str]] = (), environ: Mapping[str, str] | None = None
) -> Loaded:
    """Read settings. `options` are (name, text) pairs of the command line.

    Raises BadInput: which setting, where it stands, what is wrong and what is expected.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    origins = dict.fromkeys(SPECS, "default")

    def take(name: str, text: str, origin: str) -> None:
        values[name] = _checked(name, text, origin)
        origins[name] = origin

    for path in config_files(environ):
        for name, text in _read_file(path):
            take(name, text, str(path))
    for variable in sorted(environ):
        if variable.startswith(PREFIX) and variable not in OTHER_VARIABLES:
            take(variable.removeprefix(PREFIX).lower(), environ[variable], f"${variable}")
    for name, text in options:
        take(name, text, "command line")
    settings = Settings(**values)
    if settings.cache_low > settings.cache_high:
        raise BadInput(
            f"settings: cache_low {settings.cache_low} ({origins['cache_low']}) is more than "
            f"cache_high {settings.cache_high} ({origins['cache_high']})"
        )
    return Loaded(settings, origins)


def _read_file(path: Path) -> list[tuple[str, str]]:
    import tomllib

    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as e:
        raise BadInput(
            f"configuration file {path}: {e.strerror}", hint=f"it is named by ${CONFIG_VARIABLE}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise BadInput(f"configuration file {path}: {e}") from None
    found = []
    for name, value in content.items():
        if isinstance(value, bool):
            value = "true" if value else "false"
        if not isinstance(value, str | int | float):
            raise BadInput(
                f"configuration file {path}: {name} is a {type(value).__name__}",
                hint="expected one line for each setting, e.g. cache_max_bytes = \"20GiB\"",
            )
        found.append((name, str(value)))
    return found


def _checked(name: str, text: str, origin: str) -> Any:
    spec = SPECS.get(name)
    if spec is None:
        import difflib

        near = difflib.get_close_matches(name, SPECS, n=1)
        hint = f"did you mean {near[0]}?" if near else "dsec config show lists them"
        raise BadInput(f"unknown setting {name[:60]!r} ({origin})", hint=hint)
    try:
        value = spec.parse(text)
    except BadInput as e:
        raise BadInput(f"setting {name} ({origin}): {e.message}", hint=e.hint) from None
    if spec.choices and value not in spec.choices:
        raise BadInput(
            f"setting {name} ({origin}): {text[:40]!r} is not allowed",
            hint=f"expected {', '.join(spec.choices[:-1])} or {spec.choices[-1]}",
        )
    if (spec.low is not None and value < spec.low) or (spec.high is not None and value > spec.high):
        unit = f" {spec.unit}" if spec.unit else ""
        raise BadInput(
            f"setting {name} ({origin}): {text[:40]} is out of range",
            hint=f"expected {spec.low} to {spec.high}{unit}",
        )
    return value


def shown(value: object) -> str:
    """A value for people, without credentials that somebody put into a URL."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return re.sub(r"://[^/@\s]*@", "://***@", str(value))
