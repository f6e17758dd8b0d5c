"""`python -m dsec_runtime.files FD`: the server. FD is its end of the edge's control socket."""

from __future__ import annotations

import sys

from dsec_runtime.files.server import serve

if __name__ == "__main__":
    serve(int(sys.argv[1]))
