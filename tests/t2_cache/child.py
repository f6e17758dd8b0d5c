"""A process that uses a cache on its own: `python child.py '{"op": ..., …}'`.

Prints one line of JSON at its end; the tests start several and compare, or kill them.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from pathlib import Path

from dsecfs.cache import ChunkCache
from dsecfs.layers.digest import parse_digest
from dsecfs.nodedirs import NodeDirs
from tests.t2_cache.stores import LoggingStore


def main() -> int:
    args = json.loads(sys.argv[1])
    dirs = NodeDirs(Path(args["data"]), Path(args["run"]))
    store = LoggingStore(args["store"], Path(args["log"]), pause_s=args.get("pause_s", 0.0))
    cache = ChunkCache(
        dirs,
        store,
        max_bytes=args.get("max_bytes", 1 << 30),
        min_free=0,
        lock_wait_s=args.get("lock_wait_s", 10.0),
    )
    blob = cache.open(parse_digest(args["blob"]))
    expected = Path(args["expected"]).read_bytes()
    if args.get("ready"):
        Path(args["ready"]).touch()
        end = time.monotonic() + 20
        while not Path(args["go"]).exists() and time.monotonic() < end:
            time.sleep(0.001)
    bad = 0
    if args["op"] == "whole":
        bad = int(bytes(blob.read(0, blob.size)) != expected)
    elif args["op"] == "random":
        rng = random.Random(args["seed"])
        end = time.monotonic() + args["seconds"]
        while time.monotonic() < end:
            offset = rng.randrange(blob.size)
            size = rng.randrange(1, 4 * blob.chunk_size)
            data = blob.read_nowait(offset, size)
            if data is None:
                data = blob.read(offset, size)
            bad += bytes(data) != expected[offset : offset + size]
    elif args["op"] == "evict":
        end = time.monotonic() + args["seconds"]
        while time.monotonic() < end:
            cache.clear()
    digest = hashlib.sha256(bytes(blob.read(0, blob.size))).hexdigest()
    print(json.dumps({"bad": bad, "digest": digest, "stats": cache.stats.snapshot()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
