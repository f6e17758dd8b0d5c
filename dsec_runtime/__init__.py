"""One node: layers become sandboxes. Imports dsecfs, never dsec_api.

run.py         one command in a container, from preparation to the last clean-up
running.py     a container that runs: its end, signals
streams.py     its standard streams
terminal.py    its terminal
sandbox.py     what can remain of a run, and who removes it: records and recovery
reaper.py      clears what a run leaves whose process is killed
cgroups.py     its control groups; which limits were hit
bundle.py      the OCI configuration that crun gets
seccomp.py     the system calls a container may make
users.py       users, groups and programs of an image, looked up without trusting it
namespace.py   the pinned mount namespace in which crun runs
uids.py        ranges of user ids, one per sandbox
upper.py       where a sandbox writes
skeleton.py    the lowest layer of every container: mount points, /etc/hosts
"""
