"""The edge's HTTP API: routes, and nothing else. Each module has one kind of resource.

app.py         the application: errors become answers, limits on bodies, who may call
sandboxes.py   /v1/sandboxes: create, list, stop, pause, resume, network, lifetime, events, why
execs.py       …/execs: commands, output, input, signals; a WebSocket to attach
files.py       …/files
ports.py       …/ports: HTTP and WebSocket to a port in the sandbox
node.py        /v1/node: status, cordon, drain; /metrics, /healthz

What must hold: a handler only translates: what it calls decides. Every error is a `Problem`.
"""
