"""The container backend of the edge: sandboxes as OCI containers that outlive it.

    backend.py    the Backend: steps of create, commands, clean-up
    groups.py     what its control groups do for a sandbox: freeze, reclaim, count
    inside.py     changes to a sandbox's files before it starts: users, hosts
    mounts.py     layers, scratch space and paths of the node in a sandbox
"""
