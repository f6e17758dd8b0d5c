"""A small blocking client of the edge's API, for commands. Owns connections and error answers.

Only the standard library, and no models: bodies are plain JSON values (model.py says which), so
that a command starts quickly. What must hold: every error answer becomes the error that the edge
raised, by its name; an edge that is not there, and a connection that breaks, is `NoEdge`; nothing
is sent twice unless the caller says that it may be (`again_s`).
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode, urlsplit

from dsec_runtime import errors as runtime_errors
from dsec_runtime.errors import NoEdge, SandboxError
from dsecfs import errors as layer_errors
from dsecfs.errors import BadInput, DsecfsError

if TYPE_CHECKING:
    from dsecfs.settings import Settings

CONNECT_S = 10.0
"""Longest wait for a connection."""
ANSWER_S = 120.0
"""Longest wait for an answer, where a call says nothing else."""
FRESH_S = 2.0
"""A connection that was idle for longer is not used again: the server closes it after 5 s
(uvicorn's timeout_keep_alive), perhaps just while we send."""
STDOUT, STDERR = 1, 2
_UCRED = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""
_FRAME = struct.Struct(">BQI")
"""Stream, offset, length: what stands before each piece of output (api/execs.py)."""
_PIECE = 1 << 16
_MAX_ERROR = 1 << 20

Query = Mapping[str, Any]


class EdgeClient:
    """One caller of one edge. Not for several threads at a time: `another` makes one for each."""

    def __init__(
        self, *, path: Path | None = None, url: str = "", token: str = "", ca: str = ""
    ) -> None:
        """Over the Unix socket `path`, or over TCP to `url` (http://HOST:PORT or https://…).

        `ca` is a PEM file with the certificate that is expected; "": the system's authorities.
        """
        self._path, self._url, self._token, self._ca = path, url, token, ca
        self._connection: http.client.HTTPConnection | None = None
        self._used = 0.0
        if path is None:
            _split(url)

    @staticmethod
    def of(settings: Settings) -> EdgeClient:
        """The edge that the settings name: node_url, else this node's socket."""
        if not settings.node_url:
            return EdgeClient(path=settings.dirs.edge)
        token = ""
        if settings.node_token_file:
            try:
                token = Path(settings.node_token_file).read_text().strip()
            except (OSError, UnicodeDecodeError) as e:
                raise BadInput(f"node_token_file {settings.node_token_file}: {e}") from None
        return EdgeClient(url=settings.node_url, token=token, ca=settings.node_tls_cert)

    def another(self) -> EdgeClient:
        """A client of the same edge with a connection of its own."""
        return EdgeClient(path=self._path, url=self._url, token=self._token, ca=self._ca)

    @property
    def name(self) -> str:
        """The edge's address, for people."""
        return self._url or str(self._path)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def peer_pid(self) -> int:
        """Process id of the edge that listens on the Unix socket (SO_PEERCRED, unix(7)). NoEdge;
        BadInput over TCP."""
        if self._path is None:
            raise BadInput(f"edge at {self._url}: not on this machine", hint="go to its machine")
        with contextlib.closing(_UnixConnection(self._path, CONNECT_S)) as connection:
            self._connect(connection)
            found = connection.sock.getsockopt(
                socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size
            )
        return int(_UCRED.unpack(found)[0])

    # -- calls ---------------------------------------------------------------------------

    def get(self, path: str, query: Query | None = None, **more: Any) -> Any:
        return self.call("GET", path, query, **more)

    def post(self, path: str, body: object = None, query: Query | None = None, **more: Any) -> Any:
        return self.call("POST", path, query, body=body, **more)

    def put(self, path: str, body: object, **more: Any) -> Any:
        return self.call("PUT", path, body=body, **more)

    def delete(self, path: str, **more: Any) -> Any:
        return self.call("DELETE", path, **more)

    def call(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        body: object = None,
        wait_s: float = ANSWER_S,
        again_s: float = 0.0,
    ) -> Any:
        """Ask and get JSON; None for an empty answer. `body` is bytes, or a value for JSON.

        With `again_s` a call that found no edge, or whose connection broke, is made again for
        so long. Errors: what the edge raised, NoEdge.
        """
        deadline = time.monotonic() + again_s
        while True:
            try:
                return self._once(method, path, query, body, wait_s)
            except NoEdge:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.2)

    def _once(
        self, method: str, path: str, query: Query | None, body: object, wait_s: float
    ) -> Any:
        connection = self._kept(wait_s)
        try:
            data, kind = _encoded(body)
            with self._errors(f"{method} {path}"):
                connection.request(method, _target(path, query), data, self._headers(kind))
                answer = connection.getresponse()
                text = answer.read() if answer.status < 400 else answer.read(_MAX_ERROR)
            if answer.status >= 400:
                raise error_of(answer.status, text)
            if answer.will_close:
                self.close()
            self._used = time.monotonic()
            if not text:
                return None
            try:
                return json.loads(text)
            except ValueError:
                raise SandboxError(f"{self.name}: answer to {method} {path} is no JSON") from None
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def stream(
        self,
        method: str,
        path: str,
        query: Query | None = None,
        *,
        body: Iterable[bytes] | None = None,
        wait_s: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Ask on a connection of its own; the answer is read by the caller (`pieces`, `frames`,
        `lines`). `body` is sent in chunks. `wait_s` is the longest wait for each piece; None:
        a peer that is gone is noticed by TCP keep-alive."""
        with contextlib.closing(self._open(wait_s)) as connection:
            with self._errors(f"{method} {path}"):
                headers = self._headers("application/octet-stream" if body is not None else "")
                try:
                    connection.request(
                        *(method, _target(path, query), body, headers),
                        encode_chunked=body is not None,
                    )
                except (BrokenPipeError, ConnectionResetError):
                    # The edge refused before it had read everything; its answer may be here.
                    if body is None:
                        raise
                answer = connection.getresponse()
                if answer.status >= 400:
                    raise error_of(answer.status, answer.read(_MAX_ERROR))
            yield answer

    def pieces(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        """The body as it comes. NoEdge if the connection breaks before its end."""
        while True:
            with self._errors("an answer"):
                data = answer.read1(_PIECE)
                if not data and (answer.length or 0) > 0:
                    raise http.client.IncompleteRead(b"", answer.length)
            if not data:
                return
            yield data

    def frames(self, answer: http.client.HTTPResponse) -> Iterator[tuple[int, int, bytes]]:
        """(stream, offset in it, bytes) from the output of a command (api/execs.py has the
        format)."""
        held = bytearray()
        for piece in self.pieces(answer):
            held += piece
            at = 0
            while len(held) - at >= _FRAME.size:
                stream, start, size = _FRAME.unpack_from(held, at)
                if len(held) - at - _FRAME.size < size:
                    break
                at += _FRAME.size + size
                yield stream, start, bytes(held[at - size : at])
            del held[:at]
        if held:
            raise NoEdge(f"{self.name}: the output ends in the middle of a frame")

    def lines(self, answer: http.client.HTTPResponse) -> Iterator[Any]:
        """JSON values, one a line, as they come."""
        held = b""
        for piece in self.pieces(answer):
            *whole, held = (held + piece).split(b"\n")
            for line in whole:
                if line:
                    yield json.loads(line)

    # -- connections ---------------------------------------------------------------------

    def _kept(self, wait_s: float) -> http.client.HTTPConnection:
        """The connection of the last call if it is still good, else a new one."""
        kept = self._connection
        if kept is not None and kept.sock is not None:
            stale = time.monotonic() - self._used > FRESH_S
            if stale or select.select([kept.sock], [], [], 0)[0]:
                self.close()
            else:
                kept.sock.settimeout(wait_s)
                return kept
        self._connection = self._open(wait_s)
        return self._connection

    def _open(self, wait_s: float | None) -> http.client.HTTPConnection:
        made: http.client.HTTPConnection
        if self._path is not None:
            made = _UnixConnection(self._path, CONNECT_S)
        else:
            scheme, host, port = _split(self._url)
            if scheme == "https":
                import ssl

                try:
                    context = ssl.create_default_context(cafile=self._ca or None)
                except OSError as e:
                    raise BadInput(f"node_tls_cert {self._ca}: {e}") from None
                made = http.client.HTTPSConnection(host, port, timeout=CONNECT_S, context=context)
            else:
                made = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
        self._connect(made)
        if self._path is None:
            made.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.sock.settimeout(wait_s)
        return made

    def _connect(self, connection: http.client.HTTPConnection) -> None:
        try:
            connection.connect()
        except PermissionError:
            connection.close()
            raise NoEdge(
                f"{self.name}: permission denied",
                hint="use root, or join the group in the setting node_group",
            ) from None
        except OSError as e:
            connection.close()
            missing = isinstance(e, FileNotFoundError | ConnectionRefusedError)
            why = "none answers" if missing else str(e.strerror or e)
            raise NoEdge(
                f"no edge at {self.name}: {why}", hint="dsec node start starts one"
            ) from None

    @contextlib.contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise NoEdge(
                f"{self.name}: no answer to {what} in time", hint="dsec node log may say why"
            ) from None
        except (http.client.HTTPException, OSError) as e:
            if isinstance(e, OSError) and e.filename is not None:
                raise  # a file that is being sent, not the connection
            raise NoEdge(
                f"{self.name}: the connection broke during {what}: {e or type(e).__name__}",
                hint="dsec node status says whether it runs",
            ) from None

    def _headers(self, kind: str) -> dict[str, str]:
        found = {"content-type": kind} if kind else {}
        return found | ({"authorization": f"Bearer {self._token}"} if self._token else {})


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        # By descriptor: the path may be too long for an address (108 bytes, unix(7)).
        place = os.open(self._path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.sock.connect(f"/proc/self/fd/{place}/{self._path.name}")
        finally:
            os.close(place)


def error_of(status: int, body: bytes) -> DsecfsError:
    """The error that an answer tells of. Anything that is no `Problem` is a SandboxError."""
    try:
        found = json.loads(body)
        kind, message = str(found["type"]), str(found["message"])
        hint, recoverable = str(found.get("hint") or ""), bool(found.get("recoverable"))
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body[:200].decode(errors="replace")
        return SandboxError(f"the edge answered with status {status}: {text}")
    error = _class_of(kind)(message, hint=hint)
    error.recoverable = recoverable
    if (after := found.get("retry_after_s")) is not None:
        error.retry_after_s = float(after)  # type: ignore[attr-defined]  # where it has one
    return error


def _class_of(name: str) -> type[DsecfsError]:
    for module in (runtime_errors, layer_errors):
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, DsecfsError):
            return found
    return SandboxError


def sandbox_path(sandbox: str, *parts: str) -> str:
    """/v1/sandboxes/SANDBOX/…; BadInput for a text that can be no id or name."""
    if not sandbox or len(sandbox) > 128 or "/" in sandbox or sandbox.startswith("."):
        raise BadInput(f"{sandbox[:80]!r} is no sandbox", hint="dsec sandbox ls lists them")
    return "/v1/sandboxes/" + "/".join(quote(part, safe="") for part in (sandbox, *parts))


def _split(url: str) -> tuple[str, str, int]:
    """Scheme, host and port of a node_url. BadInput."""
    try:
        found = urlsplit(url)
        if found.scheme in ("http", "https") and found.hostname and found.path in ("", "/"):
            return found.scheme, found.hostname, found.port or (443 if found.scheme[4:] else 80)
    except ValueError:
        pass  # the port
    raise BadInput(f"node_url {url[:80]!r}", hint="expected http://HOST:PORT or https://HOST:PORT")


def _target(path: str, query: Query | None) -> str:
    given = {key: value for key, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given, True, errors='surrogateescape')}" if given else path


def _encoded(body: object) -> tuple[bytes | None, str]:
    if body is None:
        return None, ""
    if isinstance(body, bytes):
        return body, "application/octet-stream"
    return json.dumps(body).encode(), "application/json"
