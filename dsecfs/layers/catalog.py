"""Names in a store: refs, channels and environments; resolve, publish, list, remove.

    refs/KIND/NAME/.v/VERSION               canonical JSON: a version's digest; never changes
    channels/KIND/NAME/.c/CHANNEL/SEQUENCE  canonical JSON: entry N; the highest is in force
    envs/xx/DIGEST                          an environment manifest
    trash/REF-KEY/SECONDS                   a removed ref, which can be restored

What must hold: a ref is written last, so a name never leads to something half published;
of two publishers of one version one wins, unless the content is equal; a name that resolved
once is remembered on the node for less time than a removed ref can be restored, channels
never; a digest is not a name, access is by reference.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from dsecfs.errors import BadInput, Conflict, Corrupt, FormatError, NotFound
from dsecfs.layers.digest import Digest, parse_digest, sha256
from dsecfs.layers.environment import Environment, EnvironmentManifest, Toolkit, parse_environment
from dsecfs.layers.manifest import MAX_MANIFEST, Fields, canonical_json, load_json
from dsecfs.layers.names import KINDS, LAYER_KINDS, Name, parse_name
from dsecfs.layers.remembered import Remembered
from dsecfs.store.base import Store, channel_prefix, env_key, head_key, ref_key

if TYPE_CHECKING:
    # Only publishing needs leases, and they bring head, layout and zstandard with them.
    from dsecfs.layers.leases import Lease

REF_FORMAT = CHANNEL_FORMAT = TRASH_FORMAT = 1
MAX_REF = 1 << 20
TRASH_S = 14 * 86400
"""Seconds for which a removed ref can be restored."""
REMEMBER_S = 10 * 86400
"""Seconds for which a node remembers a resolved ref; less than TRASH_S."""

_WORDS = {"env": "environment"}
_SUGGEST_FROM = 20_000
"""Names looked at for a suggestion."""
_CHANNEL_TRIES = 20
_READERS = 16


@dataclass(frozen=True, slots=True)
class Ref:
    """What a version of a name stands for."""

    digest: Digest
    created: int
    """Seconds since 1970 by the publisher's clock."""
    labels: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> bytes:
        return canonical_json(
            {
                "format": REF_FORMAT,
                "digest": self.digest,
                "created": self.created,
                "labels": dict(self.labels),
            }
        )


@dataclass(frozen=True, slots=True)
class ChannelEntry:
    """One movement of a channel. Without a digest it was closed."""

    sequence: int
    digest: Digest | None
    version: str
    """The version it was set from, "" if it was a digest."""
    created: int
    actor: str
    reason: str

    def to_json(self) -> bytes:
        return canonical_json(
            {
                "format": CHANNEL_FORMAT,
                "digest": self.digest,
                "version": self.version,
                "created": self.created,
                "actor": self.actor,
                "reason": self.reason,
            }
        )


class Resolved(NamedTuple):
    """What a text means. `kind` is "" for a digest of a layer, `name` None for any digest."""

    kind: str
    name: Name | None
    digest: Digest


class Use(NamedTuple):
    """Something that refers to a digest."""

    what: str
    """ref, channel or env."""
    name: str
    """The ref or channel as people type it, or an environment's digest."""


def parse_ref(data: bytes, what: str) -> Ref:
    """Parse and check a ref. Raises FormatError or TooNew."""
    f = Fields(load_json(data, what), what)
    f.check_format(REF_FORMAT)
    ref = Ref(f.take_digest("digest"), f.take("created", int), f.take_strings("labels"))
    f.done()
    return ref


def parse_channel_entry(data: bytes, sequence: int, what: str) -> ChannelEntry:
    """Parse and check an entry. Raises FormatError or TooNew."""
    f = Fields(load_json(data, what), what)
    f.check_format(CHANNEL_FORMAT)
    digest = f.take("digest", (str, type(None)))
    entry = ChannelEntry(
        sequence,
        f.digest("digest", digest) if digest is not None else None,
        f.take("version", str),
        f.take("created", int),
        f.take("actor", str),
        f.take("reason", str),
    )
    f.done()
    return entry


class _Closed(NotFound):
    """A channel that somebody ended: nothing else can be meant."""


class Catalog:
    """The names of one store. `cache_dir` is where this node remembers what never changes."""

    def __init__(self, store: Store, cache_dir: Path | None = None) -> None:
        self._store = store
        # Names belong to a store: another store's debian:12 is another one.
        self._refs = self._envs = None
        if cache_dir:
            self._refs = Remembered(cache_dir / sha256(store.url.encode())[:16], REMEMBER_S)
            self._envs = Remembered(cache_dir / "envs", REMEMBER_S)

    # -- refs

    def get_ref(self, name: Name, *, remember: bool = True) -> Ref:
        """The ref of `name`, which has a kind and a version. NotFound without suggestions.

        Without `remember` the store is asked, and nothing is kept on this node.
        """
        key = ref_key(name.kind, name.name, name.version)
        if not remember:
            return parse_ref(self._store.get(key, max_size=MAX_REF), f"ref {name}")
        if self._refs is not None:
            found = self._refs.get(key, lambda data: parse_ref(data, key))
            if found is not None:
                return found
        data = self._store.get(key, max_size=MAX_REF)
        ref = parse_ref(data, f"ref {name}")
        if self._refs is not None:
            self._refs.put(key, data)
        return ref

    def put_ref(
        self,
        name: Name,
        digest: Digest,
        *,
        lease: Lease,
        labels: Mapping[str, str] | None = None,
    ) -> bool:
        """Publish a version; False if it has this digest already. Conflict if another.

        The caller holds a `lease` under which everything `digest` needs is in the store.
        """
        key = ref_key(name.kind, name.name, name.version)
        for removed in self._trash(key):
            if parse_trash(self._store.get(removed, max_size=MAX_REF), removed).digest != digest:
                raise Conflict(
                    f"{name} was removed and had other content",
                    hint="take another version; a name keeps its meaning",
                )
        if lease.put_if_absent(key, Ref(digest, int(time.time()), labels or {}).to_json()):
            return True
        there = parse_ref(self._store.get(key, max_size=MAX_REF), f"ref {name}")
        if there.digest == digest:
            return False
        raise Conflict(
            f"{name} exists already with other content (sha256:{there.digest[:12]}…)",
            hint="publish under another version",
        )

    def ls(self, kinds: Sequence[str] = KINDS, prefix: str = "") -> Iterator[Name]:
        """Every version of every name of `kinds` whose name starts with `prefix`, sorted."""
        for kind in kinds:
            for info in self._store.list(f"refs/{kind}/"):
                name, marker, version = info.key.removeprefix(f"refs/{kind}/").rpartition("/.v/")
                if marker and name.startswith(prefix):
                    yield Name(kind, name, version=version)

    def remove_ref(self, name: Name) -> None:
        """Move a ref to the trash, where it stays for TRASH_S. NotFound if there is none."""
        key = ref_key(name.kind, name.name, name.version)
        data = self._store.get(key, max_size=MAX_REF)
        parse_ref(data, f"ref {name}")
        now = int(time.time())
        removed = f"trash/{key}/{now:012d}"
        self._store.put_if_absent(removed, _trash_json(data, now))
        self._store.delete(key)
        # Who restored it meanwhile found the ref, and took this away.
        self._store.put_if_absent(removed, _trash_json(data, now))
        if self._refs is not None:
            self._refs.forget(key)

    def restore_ref(self, name: Name) -> Ref:
        """Bring a removed ref back. NotFound if it is not in the trash or what it leads to
        has been collected, Conflict as put_ref."""
        key = ref_key(name.kind, name.name, name.version)
        removed = self._trash(key)
        if not removed:
            raise NotFound(
                f"{name} is not in the trash", hint=f"it stays there for {TRASH_S // 86400} days"
            )
        ref = parse_trash(self._store.get(removed[-1], max_size=MAX_REF), removed[-1])
        with self._lease() as lease:
            # At the end of its time in the trash a collection may be about to delete it.
            layers: Iterable[Digest] = [ref.digest]
            if name.kind == "env":
                lease.rely_on(env_key(ref.digest))
                layers = self.get_env(ref.digest).layers()
            lease.rely_on_layers(layers)
            self._restore(name, key, ref, lease)
            for entry in removed:
                self._store.delete(entry)
            # A removal that began before may have taken away the ref that was there: whatever
            # the order of the two, ref or trash stays.
            self._restore(name, key, ref, lease)
        return ref

    def _restore(self, name: Name, key: str, ref: Ref, lease: Lease) -> None:
        if not lease.put_if_absent(key, ref.to_json()):
            there = parse_ref(self._store.get(key, max_size=MAX_REF), f"ref {name}")
            if there.digest != ref.digest:
                raise Conflict(f"{name} exists again, with other content")

    def trash(self) -> Iterator[tuple[Name, int]]:
        """Removed names and when they were removed, in seconds since 1970."""
        for info in self._store.list("trash/refs/"):
            ref, _, seconds = info.key.removeprefix("trash/refs/").rpartition("/")
            path, _, version = ref.rpartition("/.v/")
            kind, _, name = path.partition("/")
            if name and seconds.isdigit():
                yield Name(kind, name, version=version), int(seconds)

    def _lease(self) -> Lease:
        from dsecfs.layers.leases import Lease

        return Lease(self._store, "publish")

    def _trash(self, key: str) -> list[str]:
        return [info.key for info in self._store.list(f"trash/{key}/")]

    # -- environments

    def put_env(
        self,
        manifest: EnvironmentManifest,
        name: Name | None = None,
        *,
        lease: Lease | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> Digest:
        """Store an environment, and publish it as `name` if given; its digest.

        Raises NotFound for a layer that is not in the store, Conflict as `put_ref`.
        """
        with contextlib.ExitStack() as stack:
            if lease is None:
                lease = stack.enter_context(self._lease())
            lease.rely_on_layers(manifest.layers())
            data = manifest.to_json()
            parse_environment(data)
            lease.put_if_absent(env_key(manifest.digest), data)
            if name is not None:
                self.put_ref(name.with_kind("env"), manifest.digest, lease=lease, labels=labels)
        return manifest.digest

    def get_env(self, digest: Digest, *, remember: bool = True) -> EnvironmentManifest:
        """The environment `digest`. NotFound; FormatError, Corrupt if it is damaged."""
        what = f"environment sha256:{digest[:12]}"

        def checked(data: bytes) -> EnvironmentManifest:
            if sha256(data) != digest:
                raise Corrupt(f"{what}: its content has another digest")
            return parse_environment(data, what)

        if self._envs is not None:
            found = self._envs.get(digest, checked)
            if found is not None:
                return found
        data = self._store.get(env_key(digest), max_size=MAX_MANIFEST)
        manifest = checked(data)
        if self._envs is not None and remember:
            self._envs.put(digest, data)
        return manifest

    def environment_for(
        self, text: str, toolkits: Iterable[str] = (), platform: str = "linux/amd64"
    ) -> Environment:
        """The composition that `text` means: an environment, or a bare base as one.

        `toolkits` (names without "+", or digests) replace those of the same name or come on
        top. Raises BadInput, NotFound with a suggestion, and what reading raises. A base's
        platform is checked where its manifest is read (`check_layers`).
        """
        found = self.resolve(text, ("env", "base"))
        if found.kind == "env":
            env = self.get_env(found.digest).for_platform(platform, f"environment {text}")
        else:
            env = Environment(platform, found.digest)
        chosen = []
        for wanted in toolkits:
            toolkit = self.resolve(wanted, ("toolkit",))
            label = toolkit.name.name if toolkit.name else toolkit.digest
            chosen.append(Toolkit(label, toolkit.digest))
        return env.with_toolkits(chosen)

    # -- resolving

    def resolve(self, text: str, kinds: Sequence[str] = KINDS) -> Resolved:
        """What `text` means among `kinds`: a version, a channel, or a digest.

        Without a kind prefix an environment of that name comes first; among layers only one
        kind may have it. Raises BadInput (not a name, ambiguous, another kind) and NotFound,
        with the names that look like it.
        """
        if text.startswith("sha256:"):
            return self._resolve_digest(parse_digest(text), kinds)
        name = parse_name(text)
        if name.kind and name.kind not in kinds:
            raise BadInput(f"{text} is a {_word(name.kind)}", hint=f"expected {_either(kinds)}")
        found: list[Resolved] = []
        for kind in (name.kind,) if name.kind else sorted(kinds, key=_rank):
            full = name.with_kind(kind)
            try:
                found.append(Resolved(kind, full, self._digest_of(full)))
            except _Closed:
                raise
            except NotFound:
                continue
            if kind == "env":
                break
        if not found:
            raise self._not_found(text, name, kinds)
        if len(found) > 1:
            raise BadInput(
                f"{text} is ambiguous",
                hint="say which one: " + ", ".join(str(r.name) for r in found),
            )
        return found[0]

    def _resolve_digest(self, digest: Digest, kinds: Sequence[str]) -> Resolved:
        if "env" in kinds and self._exists(env_key(digest)):
            return Resolved("env", None, digest)
        layers = [k for k in kinds if k != "env"]
        if layers and self._exists(head_key(digest)):
            return Resolved(layers[0] if len(layers) == 1 else "", None, digest)
        raise NotFound(f"no {_either(kinds)} sha256:{digest}", hint="is it another store's?")

    def _exists(self, key: str) -> bool:
        try:
            self._store.stat(key)
        except NotFound:
            return False
        return True

    def _digest_of(self, name: Name) -> Digest:
        if name.version:
            return self.get_ref(name).digest
        entry = self.channel_get(name.kind, name.name, name.channel)
        if entry.digest is None:
            why = f": {entry.reason}" if entry.reason else ""
            hint = "dsec channel log shows what it pointed at; name a version"
            raise _Closed(f"channel {name} was closed{why}", hint=hint)
        return entry.digest

    def _not_found(self, text: str, name: Name, kinds: Sequence[str]) -> NotFound:
        import difflib

        if name.kind:
            kinds = (name.kind,)
        if name.version:
            names = (str(n.with_kind("")) for n in self.ls(kinds))
        else:
            names = (str(n.with_kind("")) for n in self.channels(kinds))
        wanted = str(name.with_kind(""))
        near = difflib.get_close_matches(wanted, dict.fromkeys(islice(names, _SUGGEST_FROM)), n=3)
        listing = "dsec env ls" if "env" in kinds else "dsec layer ls"
        hint = f"did you mean {' or '.join(near)}?" if near else f"{listing} lists what there is"
        return NotFound(f"no {_word(name.kind or kinds[0])} {wanted}", hint=hint)

    # -- channels

    def channel_set(
        self, kind: str, name: str, channel: str, to: str, *, actor: str, reason: str
    ) -> ChannelEntry:
        """Point a channel at `to` (a version of this name, or a digest). The new entry.

        Raises NotFound if there is no such thing; Conflict if others move it all the time.
        """
        self._check_channel(kind, name, channel)
        version = "" if to.startswith("sha256:") else to
        full = to if not version else str(parse_name(f"{kind}/{name}:{to}"))
        found = self.resolve(full, (kind,))
        with self._lease() as lease:
            layers = [found.digest]
            if kind == "env":
                lease.rely_on(env_key(found.digest))
                layers = list(self.get_env(found.digest).layers())
            lease.rely_on_layers(layers)
            return self._append(
                kind, name, channel, found.digest, version, actor, reason, lease.check
            )

    def channel_close(
        self, kind: str, name: str, channel: str, *, actor: str, reason: str
    ) -> ChannelEntry:
        """End a channel: it resolves no more and keeps nothing alive. Its log stays."""
        self._check_channel(kind, name, channel)
        self.channel_get(kind, name, channel)
        return self._append(kind, name, channel, None, "", actor, reason, lambda: None)

    def channel_get(self, kind: str, name: str, channel: str) -> ChannelEntry:
        """The entry in force. NotFound if the channel was never set."""
        key = self._last_entry(kind, name, channel)
        if key is None:
            raise NotFound(f"no channel {Name(kind, name, channel=channel)}")
        return self._entry(key)

    def channel_log(self, kind: str, name: str, channel: str) -> list[ChannelEntry]:
        """Every movement from the first on: the audit trail."""
        prefix = channel_prefix(kind, name, channel)
        return [self._entry(info.key) for info in self._store.list(prefix)]

    def channels(self, kinds: Sequence[str] = KINDS) -> Iterator[Name]:
        """Every channel of `kinds`."""
        for kind in kinds:
            before = ""
            for info in self._store.list(f"channels/{kind}/"):
                path = info.key.removeprefix(f"channels/{kind}/").rpartition("/")[0]
                name, marker, channel = path.rpartition("/.c/")
                if marker and path != before:
                    before = path
                    yield Name(kind, name, channel=channel)

    def _check_channel(self, kind: str, name: str, channel: str) -> None:
        parsed = parse_name(f"{kind}/{name}@{channel}")
        if (parsed.kind, parsed.name) != (kind, name) or kind not in KINDS:
            raise BadInput(f"no channel can be {kind}/{name}@{channel}")

    def _append(
        self,
        kind: str,
        name: str,
        channel: str,
        digest: Digest | None,
        version: str,
        actor: str,
        reason: str,
        check: Callable[[], None],
    ) -> ChannelEntry:
        """Put the next entry; `check` raises when what it leads to may be gone by now."""
        for _ in range(_CHANNEL_TRIES):
            last = self._last_entry(kind, name, channel)
            number = entry_number(last) + 1 if last else 1
            entry = ChannelEntry(number, digest, version, int(time.time()), actor, reason)
            key = f"{channel_prefix(kind, name, channel)}{number:08d}"
            check()
            if self._store.put_if_absent(key, entry.to_json()):
                return entry
        raise Conflict(
            f"channel {Name(kind, name, channel=channel)}: others moved it {_CHANNEL_TRIES} times",
            hint="look at its log",
        )

    def _last_entry(self, kind: str, name: str, channel: str) -> str | None:
        last = None
        for info in self._store.list(channel_prefix(kind, name, channel)):
            last = info.key
        return last

    def _entry(self, key: str) -> ChannelEntry:
        return parse_channel_entry(self._store.get(key, max_size=MAX_REF), entry_number(key), key)

    # -- the other way round

    def used_by(self, digest: Digest) -> list[Use]:
        """What refers to a layer or an environment: refs, channels, environments.

        Reads every one of them: seconds where there are many.
        """

        def ref(name: Name) -> Use | None:
            found = self.get_ref(name, remember=False).digest == digest
            return Use("ref", _full(name)) if found else None

        def channel(name: Name) -> Use | None:
            found = self.channel_get(name.kind, name.name, name.channel).digest == digest
            return Use("channel", _full(name)) if found else None

        def env(key: str) -> Use | None:
            other = parse_digest(key.rpartition("/")[2])
            found = digest in self.get_env(other, remember=False).layers()
            return Use("env", other) if found else None

        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_READERS, "used-by") as pool:
            asked = [pool.submit(ref, name) for name in self.ls()]
            asked += [pool.submit(channel, name) for name in self.channels()]
            asked += [pool.submit(env, info.key) for info in self._store.list("envs/")]
            uses = []
            for answer in asked:
                # What was removed since it was listed refers to nothing.
                with contextlib.suppress(NotFound):
                    if (use := answer.result()) is not None:
                        uses.append(use)
        return uses


def entry_number(key: str) -> int:
    """Which entry of a channel a key is: 8 digits, so that keys sort as numbers do. FormatError."""
    tail = key.rpartition("/")[2]
    if len(tail) != 8 or not (tail.isascii() and tail.isdigit()):
        raise FormatError(f"{key}: not an entry of a channel", hint="remove it from the store")
    return int(tail)


def parse_trash(data: bytes, what: str) -> Ref:
    """The removed ref in a trash entry. Raises FormatError or TooNew."""
    f = Fields(load_json(data, what), what)
    f.check_format(TRASH_FORMAT)
    f.take("removed", int)
    ref = parse_ref(f.take("ref", str).encode(), what)
    f.done()
    return ref


def _trash_json(ref: bytes, now: int) -> bytes:
    return canonical_json({"format": TRASH_FORMAT, "removed": now, "ref": ref.decode()})


def _rank(kind: str) -> int:
    """Environments before layers, layers in the order of LAYER_KINDS."""
    return -1 if kind == "env" else LAYER_KINDS.index(kind)


def _word(kind: str) -> str:
    return _WORDS.get(kind, kind)


def _either(kinds: Sequence[str]) -> str:
    return " or ".join(map(_word, kinds))


def _full(name: Name) -> str:
    return f"env/{name}" if name.kind == "env" else str(name)
