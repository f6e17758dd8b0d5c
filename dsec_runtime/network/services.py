"""Named services of network policies: the built-in ones and those of the node's configuration.

The file that the setting `network_services` names is TOML, one table for each service; a service
of the same name replaces the built-in one:

    [mirror]
    hosts = ["mirror.example.org", "*.cdn.example.org"]
    ports = [443]          # 80 and 443 if it is left out

What must hold: a service is checked when it is read; a file that breaks a rule is refused whole.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsec_runtime.network.names import pattern
from dsecfs.errors import BadInput

DEFAULT_PORTS = (443, 80)
MAX_HOSTS = 256
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")


@dataclass(frozen=True, slots=True)
class Service:
    """Hosts (patterns in their plain form) and the ports on which they are reached."""

    hosts: tuple[str, ...]
    ports: tuple[int, ...] = DEFAULT_PORTS


def _https(*hosts: str) -> Service:
    return Service(hosts, (443,))


BUILT_IN: Mapping[str, Service] = {
    "pypi": _https("pypi.org", "files.pythonhosted.org"),
    "conda": _https("conda.anaconda.org", "repo.anaconda.com", "api.anaconda.org"),
    "npm": _https("registry.npmjs.org", "registry.yarnpkg.com"),
    "apt": Service(
        (
            "deb.debian.org",
            "security.debian.org",
            "ftp.debian.org",
            "snapshot.debian.org",
            "archive.ubuntu.com",
            "*.archive.ubuntu.com",
            "security.ubuntu.com",
            "ports.ubuntu.com",
        )
    ),
    "apk": Service(("dl-cdn.alpinelinux.org",)),
    "crates": _https("crates.io", "index.crates.io", "static.crates.io"),
    "rustup": _https("static.rust-lang.org", "sh.rustup.rs"),
    "go": _https("proxy.golang.org", "sum.golang.org", "go.dev", "dl.google.com"),
    "maven": _https("repo.maven.apache.org", "repo1.maven.org", "plugins.gradle.org"),
    "rubygems": _https("rubygems.org", "index.rubygems.org"),
    "github": Service(
        (
            "github.com",
            "api.github.com",
            "codeload.github.com",
            "raw.githubusercontent.com",
            "objects.githubusercontent.com",
            "release-assets.githubusercontent.com",
            "media.githubusercontent.com",
            "gist.githubusercontent.com",
        ),
        (443, 80, 22),
    ),
    "gitlab": Service(("gitlab.com",), (443, 80, 22)),
    "huggingface": _https("huggingface.co", "*.huggingface.co", "*.hf.co"),
    "dockerhub": _https(
        "registry-1.docker.io", "auth.docker.io", "production.cloudflare.docker.com"
    ),
}
"""Where the common package managers and forges get things from, as their documents say."""


def load_services(path: str) -> dict[str, Service]:
    """The built-in services and those of a file; "" is no file. BadInput."""
    found = dict(BUILT_IN)
    if not path:
        return found
    what = f"network_services {path}"
    try:
        tables = tomllib.loads(Path(path).read_text())
    except OSError as e:
        raise BadInput(f"{what}: {e.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise BadInput(f"{what}: {e}") from None
    for name, table in tables.items():
        found[name] = _service(f"{what}: {name[:64]!r}", name, table)
    return found


def _service(what: str, name: str, table: object) -> Service:
    if not _NAME.match(name):
        raise BadInput(f"{what}: no name for a service", hint="lower case, digits, - _ and .")
    if not isinstance(table, dict) or set(table) - {"hosts", "ports"} or "hosts" not in table:
        raise BadInput(f"{what}: expected a table with hosts and ports")
    hosts, ports = table["hosts"], table.get("ports", list(DEFAULT_PORTS))
    if not isinstance(hosts, list) or not 0 < len(hosts) <= MAX_HOSTS:
        raise BadInput(f"{what}: hosts is no list of 1 to {MAX_HOSTS} names")
    if not isinstance(ports, list) or not ports or not all(_is_port(port) for port in ports):
        raise BadInput(f"{what}: ports is no list of numbers from 1 to 65535")
    plain = []
    for host in hosts:
        named = pattern(host) if isinstance(host, str) else None
        if named is None:
            raise BadInput(f"{what}: {str(host)[:80]!r} is no host name")
        plain.append(named)
    return Service(tuple(plain), tuple(ports))


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= 65535
