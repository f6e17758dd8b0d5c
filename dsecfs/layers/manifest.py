"""The manifest: the part of a layer that says what it is, as canonical JSON.

What must hold: the same manifest is always the same bytes (sorted keys, no white space,
UTF-8), because the layer's digest covers them; a format number that is newer than ours
is refused in one line; unknown keys are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsecfs.errors import BadInput, FormatError, TooNew
from dsecfs.layers.digest import (
    MAX_BLOB_SIZE,
    Digest,
    check_chunk_size,
    chunk_count,
    parse_digest,
)
from dsecfs.layers.names import LAYER_KINDS
from dsecfs.layers.platforms import Platform

MANIFEST_FORMAT = 1
MAX_MANIFEST = 4 * 1024 * 1024


def canonical_json(value: object) -> bytes:
    """The one byte string of a JSON value. Raises BadInput for text that is no Unicode."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    try:
        return text.encode()
    except UnicodeEncodeError as e:
        # A lone surrogate: bytes of a command line, or \ud800 in JSON from outside.
        raise BadInput(
            f"text that is not valid Unicode: {text[max(e.start - 20, 0) : e.end]!r}",
            hint="names, labels and variables must be UTF-8",
        ) from None


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob a layer's files lie in: one device of its EROFS image, in device order."""

    digest: Digest
    size: int
    """Bytes of the uncompressed address space; a multiple of 4096."""
    chunk_size: int

    @property
    def chunks(self) -> int:
        return chunk_count(self.size, self.chunk_size)


@dataclass(frozen=True, slots=True)
class ProcessEnv:
    """What a layer contributes to the environment of processes in a sandbox."""

    set: Mapping[str, str] = field(default_factory=dict)
    prepend: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Variable -> entries put before its value, joined by ':' (PATH, PYTHONPATH)."""


@dataclass(frozen=True, slots=True)
class LayerManifest:
    """What a layer is, apart from its tree."""

    kind: str
    platform: str
    """OCI form, e.g. "linux/amd64" or "linux/arm64/v8"."""
    blobs: tuple[BlobRef, ...]
    process_env: ProcessEnv = field(default_factory=ProcessEnv)
    labels: Mapping[str, str] = field(default_factory=dict)
    inodes: int = 0
    """Number of inodes in the tree."""
    file_bytes: int = 0
    """Sum of the sizes of its regular files, each inode counted once."""

    def to_json(self) -> bytes:
        """Canonical bytes; `parse_manifest` of them gives an equal manifest."""
        return canonical_json(
            {
                "format": MANIFEST_FORMAT,
                "kind": self.kind,
                "platform": self.platform,
                "blobs": [
                    {"digest": b.digest, "size": b.size, "chunk_size": b.chunk_size}
                    for b in self.blobs
                ],
                "process_env": {
                    "set": dict(self.process_env.set),
                    "prepend": {k: list(v) for k, v in self.process_env.prepend.items()},
                },
                "labels": dict(self.labels),
                "inodes": self.inodes,
                "bytes": self.file_bytes,
            }
        )


class Fields:
    """Strict access to a JSON object: every key is taken once, none may be left over."""

    def __init__(self, value: object, what: str) -> None:
        if not isinstance(value, dict):
            raise FormatError(f"{what}: expected a JSON object, found {type(value).__name__}")
        self._left: dict[str, Any] = dict(value)
        self.what = what

    def take(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value of `key`, which must be of `kind`; FormatError says what is wrong."""
        value = self._left.pop(key, default)
        if value is ...:
            raise FormatError(f"{self.what}: {key!r} is missing")
        if value is not default and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is int)
        ):
            raise FormatError(f"{self.what}: {key!r} has the wrong type")
        if isinstance(value, str):
            self._check_text(key, value)
        return value

    def take_digest(self, key: str) -> Digest:
        """A digest as text."""
        return self.digest(key, self.take(key, str))

    def digest(self, key: str, text: str) -> Digest:
        """`text`, which stands under `key`, as a digest: damage where it is none, not a typo."""
        try:
            return parse_digest(text)
        except BadInput as e:
            raise FormatError(f"{self.what}: {key!r}: {e.message}") from None

    def take_count(self, key: str) -> int:
        """A number of things or bytes: 63 bits, not negative; missing means 0."""
        value: int = self.take(key, int, 0)
        if not 0 <= value < 1 << 63:
            raise FormatError(f"{self.what}: {key!r} is no count")
        return value

    def take_strings(self, key: str) -> dict[str, str]:
        """A JSON object of strings; missing means empty."""
        value = self.take(key, dict, {})
        if not all(isinstance(v, str) for v in value.values()):
            raise FormatError(f"{self.what}: {key!r} must map names to strings")
        for name, text in value.items():
            self._check_text(key, name)
            self._check_text(key, text)
        return dict(value)

    def _check_text(self, key: str, text: str) -> None:
        """JSON can hold lone surrogates (\\ud800), which nothing could print or store again."""
        if not text.isascii() and any("\ud800" <= c <= "\udfff" for c in text):
            raise FormatError(f"{self.what}: {key[:40]!r} holds text that is not valid Unicode")

    def done(self) -> None:
        if self._left:
            raise FormatError(f"{self.what}: unknown key {min(self._left)!r}")

    def check_format(self, known: int) -> None:
        """Take `format` and refuse a newer one."""
        number = self.take("format", int)
        if number > known:
            raise TooNew(
                f"{self.what}: format {number} is newer than this program knows ({known})",
                hint="upgrade dsec",
            )
        if number != known:
            raise FormatError(f"{self.what}: format {number} does not exist")


def load_json(data: bytes, what: str) -> object:
    """Parse bytes from outside as JSON in UTF-8; FormatError instead of the parser's errors."""
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError) as e:
        raise FormatError(f"{what}: not valid JSON: {e}") from None


def parse_manifest(data: bytes, what: str = "layer manifest") -> LayerManifest:
    """Parse and check a manifest. Raises FormatError or TooNew; never anything else."""
    f = Fields(load_json(data, what), what)
    f.check_format(MANIFEST_FORMAT)
    kind = f.take("kind", str)
    if kind not in LAYER_KINDS:
        raise FormatError(f"{what}: unknown layer kind {kind[:40]!r}")
    platform = f.take("platform", str)
    blobs = []
    for item in f.take("blobs", list):
        b = Fields(item, f"{what}: blob")
        blob = BlobRef(b.take_digest("digest"), b.take("size", int), b.take("chunk_size", int))
        b.done()
        if not 0 < blob.size <= MAX_BLOB_SIZE or blob.size % 4096:
            raise FormatError(
                f"{what}: blob size {blob.size} is no multiple of 4096 up to {MAX_BLOB_SIZE}"
            )
        blobs.append(blob)
    e = Fields(f.take("process_env", dict, {}), f"{what}: process_env")
    prepend: dict[str, tuple[str, ...]] = {}
    for name, entries in e.take("prepend", dict, {}).items():
        if not isinstance(entries, list) or not all(isinstance(x, str) for x in entries):
            raise FormatError(f"{what}: process_env.prepend.{name} must be a list of strings")
        prepend[name] = tuple(entries)
    process_env = ProcessEnv(e.take_strings("set"), prepend)
    e.done()
    manifest = LayerManifest(
        kind,
        platform,
        tuple(blobs),
        process_env,
        f.take_strings("labels"),
        f.take_count("inodes"),
        f.take_count("bytes"),
    )
    f.done()
    try:
        Platform.parse(platform)
        for blob in blobs:
            check_chunk_size(blob.chunk_size)
        check_process_env(process_env, "process_env")
        canonical = manifest.to_json()
    except BadInput as e:
        raise FormatError(f"{what}: {e.message}") from None
    if canonical != data:
        raise FormatError(f"{what}: not in canonical form")
    return manifest


def check_variable(name: str, value: str, what: str) -> None:
    """Raise BadInput unless NAME=value can be part of a process's environment."""
    if not name or "=" in name or "\0" in name or "\0" in value:
        raise BadInput(
            f"{what}: not a variable: {name[:80]!r}",
            hint="a name is not empty and has no '=' in it, and neither part has a NUL",
        )


def check_process_env(env: ProcessEnv, what: str) -> None:
    """`check_variable` for everything that a layer contributes."""
    for name, value in env.set.items():
        check_variable(name, value, what)
    for name, entries in env.prepend.items():
        check_variable(name, "".join(entries), what)
