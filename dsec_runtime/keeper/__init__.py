"""The keeper: owns the commands that run in sandboxes, outside of them and outside of the edge.

Two processes per node, both small. The *worker* starts host commands (crun exec …), moves their
output into logs, feeds standard input, keeps time and writes down how each ended. The *holder*
is its parent and the subreaper of everything below it; it has a copy of every descriptor.

- Worker killed: commands become children of the holder, which reaps them and forks a new worker
  with all descriptors.
- Holder killed: the worker becomes the holder and forks a worker.
- Edge killed: nobody notices; the next edge connects and reads the logs.

What must hold: a command's output and exit code arrive, whichever one of the processes dies; a
command never waits for a process of ours that is gone; what one command writes cannot stall
another; the cost of any amount of output is bounded.

    protocol.py   messages on run/keeper.sock
    log.py        the output of one command on disk: first MiB kept, then a ring of segments
    holder.py     the holder
    worker.py     the worker
    start.py      starts a keeper where none runs, in its own control group
    client.py     the edge's side (asyncio)
"""
