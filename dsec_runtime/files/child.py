"""A child's life: become the user, read the request, do it, answer, end. Owns `Link`, its side of
the socket, and which error becomes which answer.

What must hold: `live` never returns; whatever happens, what is half written is removed before the
end if the kernel lets us; a client that goes away ends the operation.
"""

from __future__ import annotations

import os
import signal
import socket
import tarfile
from collections.abc import Callable
from typing import Any, NoReturn

from dsec_runtime.files import archive, calls, enter, operations, watching, wire, writing
from dsec_runtime.files.link import Link, LinkLost
from dsec_runtime.files.paths import Place, Refusal
from dsecfs.errors import MountError

Operation = Callable[[Place, Link, dict[str, Any]], dict[str, Any]]

OPERATIONS: dict[str, Operation] = {
    "stat": operations.stat_,
    "list": operations.list_,
    "mkdir": operations.mkdir,
    "move": operations.move,
    "remove": operations.remove,
    "read": operations.read,
    "write": writing.write,
    "pack": archive.pack,
    "unpack": archive.unpack,
    "watch": watching.watch,
}


class Aborted(Exception):
    """SIGTERM: nobody wants it any more, or it took too long."""


def live(
    who: enter.Who, cwd: str, pidfd: int, sock: socket.socket, null: int, last_capability: int
) -> NoReturn:
    """Never returns."""
    try:
        calls.die_with_parent()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, _abort)
        sock.setblocking(True)
        link = Link(sock)
        try:
            error = _work(who, cwd, pidfd, link, null, last_capability)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if error is not None:
                link.send_json(wire.ERROR, error)
        except LinkLost:
            pass
    finally:
        os._exit(0)


def _abort(number: int, at: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Aborted


def _work(
    who: enter.Who, cwd: str, pidfd: int, link: Link, null: int, last_capability: int
) -> dict[str, Any] | None:
    """Do what is asked. None if it was answered, else the error to tell."""
    try:
        root = enter.become(who, pidfd, link.fileno(), null, last_capability)
        request = link.request()
        operation = OPERATIONS[request["op"]]
        link.send_json(wire.RESULT, operation(Place(root, cwd), link, request))
    except Refusal as e:
        return {"reason": e.reason} | _entry(e.entry)
    except (OSError, MountError) as e:
        return {"errno": e.errno} | _entry(getattr(e, "entry", None))
    except tarfile.TarError:
        return {"reason": wire.ARCHIVE}
    except RecursionError:
        return {"reason": wire.DEEP}
    except MemoryError:
        return {"reason": wire.MEMORY}
    except Aborted:
        return {"reason": wire.ABORTED}
    except LinkLost:
        raise
    except Exception as e:
        return {"reason": wire.INTERNAL, "entry": _where(e)}
    return None


def _entry(name: bytes | None) -> dict[str, str]:
    return {} if name is None else {"entry": os.fsdecode(name[-4096:])}


def _where(error: Exception) -> str:
    """Without its source, which `traceback` would look for in the sandbox."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    line = f" {at.tb_frame.f_code.co_name}:{at.tb_lineno}" if at is not None else ""
    return f"{type(error).__name__}{line}"
