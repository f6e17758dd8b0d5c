"""The edge: the daemon of one node. It owns all sandboxes on it and serves them over HTTP.

model.py       what the API takes and gives: specifications, sandboxes, execs, results
backend.py     what a backend (container, fncall, later VMs) must do
journal.py     SQLite: every step is written before it is taken
edge.py        the state machine: create, adopt, pause, end; one lock per sandbox
execs.py       commands and sessions in sandboxes, on top of the keeper
container.py   the container backend
api/           the HTTP API (FastAPI), one module for each kind of resource
service.py     the process: directories, lock, sockets, signals

Other packages it uses: keeper (owns execs), files (file access in a sandbox), network (policy),
snapshots, fncall.
"""
