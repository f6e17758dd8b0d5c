"""From what the user configured to a store.

    file:/srv/dsec   /srv/dsec   3fs:/3fs/cluster/dsec   s3://bucket/prefix?endpoint=…

Back ends are imported when they are asked for.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

from dsecfs.errors import BadInput, Unsupported
from dsecfs.store.base import Backend, Store
from dsecfs.store.retry import DEFAULT_POLICY, RetryingStore, RetryPolicy

SCHEMES = ("file:DIRECTORY", "3fs:DIRECTORY", "s3://BUCKET/PREFIX")


def open_store(
    url: str,
    *,
    create: bool = False,
    load: bool = False,
    endpoint: str | None = None,
    region: str | None = None,
    path_style: bool | None = None,
    policy: RetryPolicy = DEFAULT_POLICY,
    wrap: Callable[[Backend], Backend] | None = None,
) -> RetryingStore:
    """Open a store, with retries. Raises BadInput, NotFound or StoreDenied in one line.

    `create` makes the directory of a `file:` or `3fs:` store. `load` imports client libraries
    now, in this process, and not when the first request needs them. `endpoint`, `region` and
    `path_style` are defaults for an s3: URL that does not say them. `wrap` puts something
    (faults, counters) between the back end and the retries.
    """
    backend = open_backend(
        url, create=create, load=load, endpoint=endpoint, region=region, path_style=path_style
    )
    return RetryingStore(wrap(backend) if wrap else backend, policy)


def open_backend(
    url: str,
    *,
    create: bool = False,
    load: bool = False,
    endpoint: str | None = None,
    region: str | None = None,
    path_style: bool | None = None,
) -> Backend:
    """The bare back end, whose calls are single attempts."""
    scheme, colon, rest = url.partition(":")
    if url.startswith(("/", "./", "../")):
        scheme, rest = "file", url
    elif not colon:
        raise BadInput(f"not a store: {url[:120]!r}", hint=f"expected {', '.join(SCHEMES)}")
    if scheme in ("file", "3fs"):
        if rest.startswith("//") and scheme == "file":
            rest = rest.removeprefix("//")  # file:///srv/dsec
        if not rest or "\0" in rest:
            raise BadInput(f"{scheme}: names no directory", hint=f"expected {scheme}:/DIRECTORY")
        if scheme == "file":
            from dsecfs.store.directory import DirectoryStore

            return DirectoryStore(rest, create=create)
        from dsecfs.store.threefs import ThreeFsStore

        return ThreeFsStore(rest, create=create)
    if scheme == "s3":
        from dsecfs.store.s3 import S3Store, check_endpoint, parse_s3_url

        settings = parse_s3_url(url)
        if settings.endpoint is None and endpoint is not None:
            settings = replace(settings, endpoint=check_endpoint(endpoint))
        if settings.region is None:
            settings = replace(settings, region=region)
        if settings.path_style is None:
            settings = replace(settings, path_style=path_style)
        store = S3Store(settings)
        if load:
            store.load()
        return store
    raise BadInput(
        f"unknown kind of store {scheme[:20]!r}", hint=f"known: {', '.join(SCHEMES)}"
    )


def check_store(store: Store) -> None:
    """Try out what everything relies on, with one small object that is removed again.

    Raises Unsupported if the server does not keep the promises of store/base.py, and what
    the store raises if it cannot be written. For `dsec store init` and `dsec doctor`.
    """
    key = f"probe/{uuid.uuid4().hex}"
    try:
        if not store.put_if_absent(key, b"first") or store.put_if_absent(key, b"second"):
            raise Unsupported(
                f"{store.url}: creates a key that exists (conditional writes do not work)",
                hint="an S3 server must support If-None-Match on PUT",
            )
        if store.get_range(key, 1, 3) != b"irs" or store.get(key) != b"first":
            raise Unsupported(f"{store.url}: does not give back what was put")
        if [info.key for info in store.list("probe") if info.key == key] != [key]:
            raise Unsupported(f"{store.url}: does not list what was put")
    finally:
        store.delete(key)
