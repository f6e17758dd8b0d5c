"""Snapshots of what sandboxes wrote: from an upper to a layer, and what changed in it.

    model.py      what the API takes and gives
    scrub.py      rules: what is left out, and why
    spool.py      bytes set aside while a sandbox is frozen
    reader.py     walks of an upper that changes meanwhile
    pack.py       a snapshot from the first look to the environment in the store
    diff.py       what changed against the start

No sandbox's state is known here: that is dsec_runtime/edge/snapshots.py.
"""
