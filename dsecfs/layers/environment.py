"""Environments: compositions of layers with process defaults, per platform.

Owns the environment manifest (canonical JSON, docs/formats.md) and what processes in a
sandbox start with. What must hold: the same composition is always the same bytes, and so
the same digest; a newer format and unknown keys are refused; what is read from a manifest
can be passed to execve as it is (no NUL, no "=" in a variable's name).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dsecfs.errors import BadInput, FormatError, NotFound
from dsecfs.layers.digest import Digest, sha256
from dsecfs.layers.manifest import (
    MAX_MANIFEST,
    Fields,
    LayerManifest,
    canonical_json,
    check_variable,
    load_json,
)

ENVIRONMENT_FORMAT = 1

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH of processes when no layer and no default sets one (what Docker and podman use)."""

MAX_LAYERS = 400
"""Layers of one composition; overlayfs takes 500 lowers (OVL_MAX_STACK)."""


@dataclass(frozen=True, slots=True)
class ProcessDefaults:
    """What a process starts with unless the caller says otherwise. Empty: not said."""

    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    user: str = ""
    """As in an OCI image config: NAME, UID, NAME:GROUP or UID:GID."""
    entrypoint: tuple[str, ...] = ()
    cmd: tuple[str, ...] = ()
    shell: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A toolkit in a composition, under the name that can be overridden at create."""

    name: str
    layer: Digest


@dataclass(frozen=True, slots=True)
class Environment:
    """The composition for one platform."""

    platform: str
    """OCI form, e.g. "linux/amd64"."""
    base: Digest
    workspace: Digest | None = None
    toolkits: tuple[Toolkit, ...] = ()
    """Bottom to top; names are unique."""
    snapshots: tuple[Digest, ...] = ()
    """Bottom to top, over everything else."""
    process: ProcessDefaults = field(default_factory=ProcessDefaults)

    @property
    def digest(self) -> Digest:
        """Identity of this composition: that of a manifest that holds it alone."""
        return EnvironmentManifest({self.platform: self}).digest

    def layers_bottom_up(self) -> tuple[Digest, ...]:
        """Base, workspace, toolkits, snapshots."""
        workspace = (self.workspace,) if self.workspace else ()
        return (self.base, *workspace, *(t.layer for t in self.toolkits), *self.snapshots)

    def with_toolkits(self, toolkits: Iterable[Toolkit]) -> Environment:
        """With each of `toolkits` in the place of the one of that name, or on top."""
        chosen = {t.name: t for t in self.toolkits}
        for toolkit in toolkits:
            chosen[toolkit.name] = toolkit
        return replace(self, toolkits=tuple(chosen.values()))

    def with_snapshot(self, layer: Digest) -> Environment:
        """With one more snapshot on top."""
        return replace(self, snapshots=(*self.snapshots, layer))

    def process_environment(
        self, manifests: Iterable[LayerManifest], extra: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """The environment of a process. `manifests` are those of `layers_bottom_up`.

        Each layer's `set`, bottom to top; then the environment's own variables; then each
        layer's `prepend` in front of what there is now, bottom to top (an image sets PATH
        whole, and a toolkit must be found all the same); then the caller's `extra`.
        """
        layers = [m.process_env for m in manifests]
        env: dict[str, str] = {"PATH": DEFAULT_PATH}
        for layer in layers:
            env.update(layer.set)
        env.update(self.process.env)
        for layer in layers:
            for name, entries in layer.prepend.items():
                rest = env.get(name, "")
                env[name] = ":".join((*entries, rest) if rest else entries)
        env.update(extra or {})
        return env


@dataclass(frozen=True, slots=True)
class EnvironmentManifest:
    """An index over platforms; what `envs/DIGEST` holds."""

    platforms: Mapping[str, Environment]
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> Digest:
        return sha256(self.to_json())

    def for_platform(self, platform: str, what: str = "environment") -> Environment:
        """The composition for `platform`. NotFound names those that there are."""
        found = self.platforms.get(platform)
        if found is None:
            raise NotFound(
                f"{what} is not for {platform}",
                hint=f"it is for {', '.join(sorted(self.platforms))}",
            )
        return found

    def layers(self) -> frozenset[Digest]:
        """Every layer of every platform."""
        return frozenset(d for e in self.platforms.values() for d in e.layers_bottom_up())

    def to_json(self) -> bytes:
        """Canonical bytes; `parse_environment` of them gives an equal manifest."""
        return canonical_json(
            {
                "format": ENVIRONMENT_FORMAT,
                "labels": dict(self.labels),
                "platforms": {p: _to_dict(e) for p, e in self.platforms.items()},
            }
        )


def check_layers(env: Environment, manifests: Sequence[LayerManifest]) -> None:
    """Raise BadInput unless the layers are of the kinds and the platform that `env` says.

    `manifests` are those of `layers_bottom_up`: digests alone do not tell what they are.
    """
    kinds = ["base", *(["workspace"] if env.workspace else [])]
    kinds += ["toolkit"] * len(env.toolkits) + ["snapshot"] * len(env.snapshots)
    for kind, layer, found in zip(kinds, env.layers_bottom_up(), manifests, strict=True):
        if found.kind != kind:
            raise BadInput(f"layer sha256:{layer[:12]}… is a {found.kind}, not a {kind}")
        if found.platform != env.platform:
            raise BadInput(
                f"layer sha256:{layer[:12]}… is for {found.platform}, not for {env.platform}",
                hint="choose another platform, or publish the layer for this one",
            )


def parse_environment(data: bytes, what: str = "environment manifest") -> EnvironmentManifest:
    """Parse and check a manifest. Raises FormatError or TooNew, nothing else."""
    if len(data) > MAX_MANIFEST:
        raise FormatError(f"{what}: longer than {MAX_MANIFEST} bytes")
    f = Fields(load_json(data, what), what)
    f.check_format(ENVIRONMENT_FORMAT)
    platforms = f.take("platforms", dict)
    if not platforms:
        raise FormatError(f"{what}: it is for no platform")
    manifest = EnvironmentManifest(
        {p: _parse_platform(p, e, f"{what}: {p[:40]}") for p, e in platforms.items()},
        f.take_strings("labels"),
    )
    f.done()
    try:
        for env in manifest.platforms.values():
            for name, text in env.process.env.items():
                check_variable(name, text, "process")
        canonical = manifest.to_json()
    except BadInput as e:
        raise FormatError(f"{what}: {e.message}") from None
    if canonical != data:
        raise FormatError(f"{what}: not in canonical form")
    return manifest


def _to_dict(env: Environment) -> dict[str, Any]:
    p = env.process
    return {
        "base": env.base,
        "workspace": env.workspace,
        "toolkits": [[t.name, t.layer] for t in env.toolkits],
        "snapshots": list(env.snapshots),
        "process": {
            "env": dict(p.env),
            "cwd": p.cwd,
            "user": p.user,
            "entrypoint": list(p.entrypoint),
            "cmd": list(p.cmd),
            "shell": list(p.shell),
        },
    }


def _parse_platform(platform: str, value: object, what: str) -> Environment:
    f = Fields(value, what)
    workspace = f.take("workspace", (str, type(None)))
    toolkits = []
    for item in f.take("toolkits", list):
        if (
            not isinstance(item, list)
            or len(item) != 2
            or not all(isinstance(part, str) for part in item)
        ):
            raise FormatError(f"{what}: a toolkit must be [name, digest]")
        toolkits.append(Toolkit(item[0], f.digest("toolkits", item[1])))
    if len({t.name for t in toolkits}) != len(toolkits):
        raise FormatError(f"{what}: two toolkits of one name")
    p = Fields(f.take("process", dict), f"{what}: process")
    process = ProcessDefaults(
        p.take_strings("env"),
        p.take("cwd", str),
        p.take("user", str),
        _strings(p, "entrypoint"),
        _strings(p, "cmd"),
        _strings(p, "shell"),
    )
    p.done()
    if "\0" in process.cwd + process.user:
        raise FormatError(f"{what}: a NUL in 'cwd' or 'user'")
    env = Environment(
        platform,
        f.take_digest("base"),
        f.digest("workspace", workspace) if workspace is not None else None,
        tuple(toolkits),
        tuple(f.digest("snapshots", d) for d in _strings(f, "snapshots")),
        process,
    )
    f.done()
    if len(env.layers_bottom_up()) > MAX_LAYERS:
        raise FormatError(f"{what}: more than {MAX_LAYERS} layers", hint="compact its snapshots")
    return env


def _strings(f: Fields, key: str) -> tuple[str, ...]:
    value = f.take(key, list)
    if not all(isinstance(v, str) and "\0" not in v for v in value):
        raise FormatError(f"{f.what}: {key!r} must be a list of strings without NUL")
    return tuple(value)
