"""Ends the container of a `dsec run` that is killed, and clears what it left.

A shell in a session of its own waits on a pipe that `dsec run` holds. A word tells it that all is
well. If the pipe ends without one, `dsec run` is gone, and the shell becomes a process that
recovers (`python -m dsec_runtime.reaper DATA RUN`): it costs a millisecond while the container
starts, and an interpreter only when it is needed. Whoever kills this, too, leaves things to the
next run's recovery.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from dsecfs.nodedirs import NodeDirs

log = logging.getLogger("dsec_runtime.reaper")

_SCRIPT = 'read -r word || exec "$@"'
_END_S = 10.0


@contextlib.contextmanager
def reaper(dirs: NodeDirs) -> Iterator[None]:
    """While the block lasts, this process's death is the end of its sandboxes."""
    read, write = os.pipe2(os.O_CLOEXEC)
    root = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-P", "-m", "dsec_runtime.reaper"]
    command += [str(dirs.data.absolute()), str(dirs.run.absolute())]
    shell: subprocess.Popen[bytes] | None = None
    try:
        with contextlib.suppress(OSError):
            shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "dsec-reaper", *command],
                stdin=read,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": root},
                start_new_session=True,
            )
        if shell is None:
            log.info("no /bin/sh: if this process is killed, the next run clears up")
        os.close(read)
        yield
    finally:
        if shell is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(write, b"well\n")
        os.close(write)
        if shell is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                shell.wait(_END_S)


def main() -> None:
    """`python -m dsec_runtime.reaper DATA RUN`."""
    from dsec_runtime.run import Runner

    data, run = sys.argv[1:]
    with Runner(NodeDirs(Path(data), Path(run))) as runner:
        runner.recover()


if __name__ == "__main__":
    main()
