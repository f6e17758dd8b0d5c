"""The `s3:` back end: a bucket, or a prefix of one, on S3 or anything that speaks it.

    s3://BUCKET[/PREFIX][?endpoint=URL][&region=NAME][&path_style=true|false][&reader=NAME]

What must hold:
- only one conditional PUT (If-None-Match: *) decides `put_if_absent`; multipart completion
  is not atomic on every server, so only content-addressed objects use it;
- every PUT that decides carries an id of its caller in the object's metadata: a caller
  whose answer was lost finds its own id there and knows that it won, and nobody else can;
- credentials come from boto3's chain (environment, shared files, role) and appear in no
  URL, error or log: of a server's answer only the status and the error code are repeated;
- one call is one attempt: the retries of boto3 and obstore are off (store/retry.py).

Reading is in store/s3read.py. A store may be opened before fork(2) and used after it:
clients belong to the process that made them.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import re
import threading
import urllib.parse
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO

from dsecfs.errors import BadInput, DsecfsError, FormatError, ShortRead, StoreDenied, StoreError
from dsecfs.store.base import ObjectInfo, Priority, seekable_size
from dsecfs.store.keys import check_key, check_prefix, check_range, is_key
from dsecfs.store.s3errors import boto_errors, explain
from dsecfs.store.s3keys import DEFAULT_REGION, environment_keys
from dsecfs.store.s3read import Reader, make_boto3_reader, make_obstore_reader

CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 15.0
"""Limit of one request of at most PIECE bytes."""

PIECE = 8 << 20
"""Bytes per request when a whole object is read: each has its own time limit."""

PART = 16 << 20
"""Bytes per part of a multipart upload, and the size from which one is made."""
_MAX_PARTS = 9_000  # S3 allows 10,000 (Amazon S3 User Guide, multipart upload limits)
_PARTS_AT_ONCE = 4

PUT_ID = "dsec-put-id"
"""Metadata key (x-amz-meta-dsec-put-id) with the id of the call that created an object."""

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]\Z")
_REMEMBERED = 4096

READERS = ("auto", "obstore", "boto3")


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the objects are. Holds no secrets."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    """http(s)://host[:port] of a server that is not Amazon's."""
    region: str | None = None
    """Default: what the credentials chain says, else us-east-1."""
    path_style: bool | None = None
    """host/bucket/key instead of bucket.host/key. Default: if there is an endpoint."""
    reader: str = "auto"
    """Which library reads: obstore where it is installed, else boto3."""
    connections: int = 128
    """Kept open at most. Threads beyond that make new ones each time."""

    @property
    def url(self) -> str:
        options = {
            "endpoint": self.endpoint,
            "region": self.region,
            "path_style": None if self.path_style is None else str(self.path_style).lower(),
            "reader": None if self.reader == "auto" else self.reader,
        }
        given = {name: value for name, value in options.items() if value is not None}
        query = f"?{urllib.parse.urlencode(given, safe=':/')}" if given else ""
        return f"s3://{self.bucket}{'/' if self.prefix else ''}{self.prefix}{query}"

    @property
    def by_path(self) -> bool:
        return self.endpoint is not None if self.path_style is None else self.path_style


def parse_s3_url(url: str) -> S3Settings:
    """Check a URL. Raises BadInput, which never repeats the part that may be a secret."""
    parts = _split(url)
    if "@" in parts.netloc:
        raise BadInput(
            "an s3: URL with credentials in it",
            hint="leave them out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        )
    bucket, prefix = parts.netloc, parts.path.strip("/")
    if not _BUCKET.match(bucket):
        raise BadInput(f"not a bucket name: {bucket[:80]!r}", hint="expected s3://BUCKET/PREFIX")
    if prefix:
        check_key(prefix)
    if parts.fragment:
        raise BadInput(f"s3://{bucket}: nothing may follow '#'")
    options: dict[str, str] = {}
    for name, value in urllib.parse.parse_qsl(parts.query, keep_blank_values=True):
        if name not in ("endpoint", "region", "path_style", "reader") or name in options:
            raise BadInput(
                f"s3://{bucket}: unknown or repeated option {name[:40]!r}",
                hint="known: endpoint, region, path_style, reader",
            )
        options[name] = value
    endpoint = options.get("endpoint")
    if endpoint is not None:
        endpoint = check_endpoint(endpoint)
    region = options.get("region")
    if region is not None and not re.fullmatch(r"[a-z0-9-]{1,40}", region):
        raise BadInput(f"s3://{bucket}: not a region: {region[:40]!r}")
    style = options.get("path_style")
    if style not in (None, "true", "false"):
        raise BadInput(f"s3://{bucket}: path_style is {style[:20]!r}, expected true or false")
    reader = options.get("reader", "auto")
    if reader not in READERS:
        raise BadInput(f"s3://{bucket}: reader is {reader[:20]!r}, expected {' or '.join(READERS)}")
    path_style = None if style is None else style == "true"
    return S3Settings(bucket, prefix, endpoint, region, path_style, reader)


def check_endpoint(endpoint: str) -> str:
    """Return http(s)://host[:port] without a slash at its end. Raises BadInput."""
    parts = _split(endpoint)
    if parts.username or parts.password:
        raise BadInput("an S3 endpoint with credentials in it", hint="leave them out")
    plain = not parts.query and not parts.fragment and parts.path in ("", "/")
    if parts.scheme not in ("http", "https") or not parts.hostname or not plain:
        raise BadInput(
            f"not an S3 endpoint: {endpoint[:120]!r}", hint="expected http(s)://HOST[:PORT]"
        )
    return f"{parts.scheme}://{parts.netloc}"


def _split(url: str) -> urllib.parse.SplitResult:
    try:
        parts = urllib.parse.urlsplit(url)
        _ = parts.port  # checked only when it is looked at
    except ValueError:
        raise BadInput("not a URL", hint="expected s3://BUCKET/PREFIX?endpoint=URL") from None
    return parts


class S3Store:
    """Objects in a bucket. Thread-safe. Connects on first use."""

    settle_s = 0.0

    def __init__(self, settings: S3Settings) -> None:
        self.settings = settings
        self.url = settings.url
        self.page_size = 1000
        self._base = f"{settings.prefix}/" if settings.prefix else ""
        self._lock = threading.Lock()
        self._pid = 0
        self._session: Any = None
        self._client: Any = None
        self._reader: Reader | None = None
        self._closed = False
        # Size and entity tag of what was read: an immutable object that differs later
        # was replaced, and ranges of both must not be mixed.
        self._seen: OrderedDict[str, tuple[int, str]] = OrderedDict()

    # -- reading ---------------------------------------------------------------

    def get(self, key: str, *, max_size: int = 1 << 30) -> bytes:
        name = self._name(key)
        with self._doing("read", key):
            first = self._read_with().fetch(name, 0, PIECE)
            if first.total > max_size:
                raise FormatError(
                    f"{self.url}: {key} has {first.total} bytes, more than the {max_size} expected"
                )
            pieces = [first.data]
            for at in range(PIECE, first.total, PIECE):
                piece = self._read_with().fetch(name, at, PIECE, if_match=first.etag)
                pieces.append(piece.data)
            data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            if len(data) != first.total:
                raise ShortRead(f"{self.url}: {key}: {len(data)} of {first.total} bytes")
            return data

    def get_range(
        self, key: str, offset: int, length: int, *, priority: Priority = Priority.FOREGROUND
    ) -> bytes:
        check_range(key, offset, length)
        name = self._name(key)
        with self._doing("read", key):
            piece = self._read_with().fetch(name, offset, length)
            self._check_same(key, piece.total, piece.etag)
            if len(piece.data) != length:
                raise ShortRead(
                    f"{self.url}: {key}: {len(piece.data)} of {length} bytes at {offset}"
                )
            return piece.data

    def stat(self, key: str) -> ObjectInfo:
        name = self._name(key)
        with self._doing("stat", key):
            head = self._boto().head_object(Bucket=self.settings.bucket, Key=name)
            return ObjectInfo(key, head["ContentLength"], head["LastModified"].timestamp())

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Sorted by key whatever the server does.

        Amazon sorts whole keys ("a-b" before "a/b"), others walk directories ("a/b" before
        "a-b"). Either way all keys still to come are at least as large as the component below
        `prefix` that was seen last, so what is smaller can go out; the rest, at most one
        subtree, waits in a heap.
        """
        below = check_prefix(prefix)
        held: list[ObjectInfo] = []
        for info in self._pages(below, after):
            seen = below + info.key[len(below) :].partition("/")[0]
            while held and held[0].key < seen:
                yield heapq.heappop(held)
            if info.key > after:
                heapq.heappush(held, info)
        while held:
            yield heapq.heappop(held)

    # -- writing ---------------------------------------------------------------

    def put_if_absent(self, key: str, data: bytes, *, put_id: str = "") -> bool:
        name = self._name(key)
        put_id = put_id or uuid.uuid4().hex
        with self._doing("create", key):
            client = self._boto()
            try:
                client.put_object(
                    Bucket=self.settings.bucket,
                    Key=name,
                    Body=data,
                    IfNoneMatch="*",
                    Metadata={PUT_ID: put_id},
                )
                return True
            except client.exceptions.ClientError as e:
                # 409 is not here: it says that somebody else is at it, not that the key is
                # taken, and Amazon asks to repeat it.
                if e.response["ResponseMetadata"]["HTTPStatusCode"] != 412:
                    raise
            try:
                head = client.head_object(Bucket=self.settings.bucket, Key=name)
            except client.exceptions.ClientError as e:
                if e.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                    return False  # it was there, and was deleted meanwhile
                raise
            return bool(head.get("Metadata", {}).get(PUT_ID) == put_id)

    def put_content(self, key: str, data: bytes | memoryview | BinaryIO) -> None:
        name = self._name(key)
        with self._doing("store", key):
            if isinstance(data, (bytes, memoryview)):
                view = memoryview(data).cast("B")
                if len(view) < PART:
                    self._put(name, bytes(view))
                else:
                    step = _part_size(len(view))
                    parts = (bytes(view[i : i + step]) for i in range(0, len(view), step))
                    self._put_parts(key, name, parts, len(view))
                return
            size = seekable_size(data)
            if size < PART:
                self._put(name, _read_exactly(data, size))
            else:
                step = _part_size(size)
                stream = (_read_exactly(data, min(step, size - i)) for i in range(0, size, step))
                self._put_parts(key, name, stream, size)

    def delete(self, key: str) -> None:
        name = self._name(key)
        with self._doing("delete", key):
            self._boto().delete_object(Bucket=self.settings.bucket, Key=name)

    def load(self) -> None:
        """Make the clients now, which imports their libraries. StoreDenied: no credentials."""
        self._read_with()
        self._boto()

    def close(self) -> None:
        with self._lock:
            client, self._client, self._reader = self._client, None, None
            self._closed = True
        if client is not None and self._pid == os.getpid():
            client.close()

    # -- how -------------------------------------------------------------------

    def _name(self, key: str) -> str:
        return self._base + check_key(key)

    @contextlib.contextmanager
    def _doing(self, verb: str, key: str) -> Iterator[None]:
        if self._closed:
            raise StoreError(f"{self.url}: cannot {verb} {key}: the store is closed")
        try:
            yield
        except DsecfsError:
            raise  # a reader's; what boto3 raises needs to be imported only where it may come
        except boto_errors() as e:
            raise explain(e, self.url, self.settings.bucket, verb, key) from None

    def _check_same(self, key: str, total: int, etag: str) -> None:
        with self._lock:
            before = self._seen.pop(key, None)
            if before is None or before == (total, etag):
                self._seen[key] = (total, etag)
                if len(self._seen) > _REMEMBERED:
                    self._seen.popitem(last=False)
                return
        raise ShortRead(f"{self.url}: {key} changed: {before[0]} bytes before, now {total}")

    def _put(self, name: str, data: bytes) -> None:
        self._boto().put_object(Bucket=self.settings.bucket, Key=name, Body=data)

    def _put_parts(self, key: str, name: str, parts: Iterator[bytes], size: int) -> None:
        """Upload in parts, _PARTS_AT_ONCE in memory; a failed upload leaves no parts behind."""
        client = self._boto()
        where = {"Bucket": self.settings.bucket, "Key": name}
        where["UploadId"] = client.create_multipart_upload(**where)["UploadId"]

        def send(number: int, part: bytes) -> dict[str, Any]:
            answer = client.upload_part(**where, PartNumber=number, Body=part)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        try:
            done: list[dict[str, Any]] = []
            with ThreadPoolExecutor(_PARTS_AT_ONCE, "dsec-s3-part") as pool:
                running: list[Future[dict[str, Any]]] = []
                sent = 0
                for number, part in enumerate(parts, 1):
                    sent += len(part)
                    if len(running) == _PARTS_AT_ONCE:
                        done.append(running.pop(0).result())
                    running.append(pool.submit(send, number, part))
                done.extend(future.result() for future in running)
            if sent != size:
                raise StoreError(f"{self.url}: {key}: source had {sent} bytes, expected {size}")
            client.complete_multipart_upload(**where, MultipartUpload={"Parts": done})
        except BaseException:
            # The first error counts. What cannot be aborted now is removed by the bucket's
            # lifecycle rule (docs/stores.md).
            with contextlib.suppress(*boto_errors()):
                client.abort_multipart_upload(**where)
            raise

    def _pages(self, below: str, after: str) -> Iterator[ObjectInfo]:
        """Everything under `below` in the server's order, from somewhere before `after`."""
        query = {"Bucket": self.settings.bucket, "Prefix": self._base + below}
        if after.startswith(below):
            top = after[len(below) :].partition("/")[0]
            if start := _before(re.split("[-.]", top)[0]):
                query["StartAfter"] = self._base + below + start
        with self._doing("list", below or "it"):
            pages = iter(
                self._boto()
                .get_paginator("list_objects_v2")
                .paginate(**query, PaginationConfig={"PageSize": self.page_size})
            )
        while True:
            with self._doing("list", below or "it"):
                page = next(pages, None)
            if page is None:
                return
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._base)
                if key.startswith(below) and is_key(key):
                    yield ObjectInfo(key, item["Size"], item["LastModified"].timestamp())

    # -- clients ---------------------------------------------------------------

    def _boto(self) -> Any:
        with self._lock:
            self._after_fork()
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _read_with(self) -> Reader:
        reader = self._reader
        if reader is not None and self._pid == os.getpid():
            return reader
        with self._lock:
            self._after_fork()
            if self._reader is None:
                self._reader = self._new_reader()
            return self._reader

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._session = self._client = self._reader = None

    def _boto_session(self) -> Any:
        if self._session is None:
            import boto3

            self._session = boto3.session.Session()
            if self._session.get_credentials() is None:
                self._session = None
                raise StoreDenied(
                    f"{self.url}: no credentials",
                    hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials",
                )
        return self._session

    def _region(self) -> str:
        return self.settings.region or self._boto_session().region_name or DEFAULT_REGION

    def _new_client(self) -> Any:
        from botocore.config import Config

        config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            max_pool_connections=self.settings.connections,
            s3={"addressing_style": "path" if self.settings.by_path else "virtual"},
            # Trailing checksums are refused by many servers that are not Amazon's.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        return self._boto_session().client(
            "s3", endpoint_url=self.settings.endpoint, region_name=self._region(), config=config
        )

    def _new_reader(self) -> Reader:
        if self.settings.reader != "boto3":
            keys = environment_keys(self.settings.region)
            reader = make_obstore_reader(
                self.url,
                bucket=self.settings.bucket,
                base=self._base,
                endpoint=self.settings.endpoint,
                region=keys.region if keys else self._region(),
                by_path=self.settings.by_path,
                credentials=keys or self._boto_session().get_credentials(),
                connect_timeout_s=CONNECT_TIMEOUT_S,
                timeout_s=READ_TIMEOUT_S,
            )
            if reader is not None:
                return reader
            if self.settings.reader == "obstore":
                raise BadInput(f"{self.url}: obstore is not installed", hint="pip install obstore")
        if self._client is None:
            self._client = self._new_client()
        return make_boto3_reader(self.url, self.settings.bucket, self._client, READ_TIMEOUT_S)


def _before(name: str) -> str:
    """A string shortly before `name` in both orders that no key begins with.

    `name` is a component up to its first "-" or "."; only from there on do the orders differ.
    Not `name` itself: SeaweedFS leaves out a whole directory when it is the start.
    """
    if not name:
        return ""
    last = "." if name[-1] == "0" else chr(ord(name[-1]) - 1)
    return f"{name[:-1]}{last}~"


def _part_size(size: int) -> int:
    return max(PART, -(-size // _MAX_PARTS))


def _read_exactly(data: BinaryIO, size: int) -> bytes:
    """`size` bytes; fewer only if the stream ends: read() may give less than asked for."""
    pieces = []
    while size and (piece := data.read(size)):
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
