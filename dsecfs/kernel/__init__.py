"""What we ask of the Linux kernel by system call, typed, and what this kernel can.

syscalls.py    mounts, id-mapped mounts, openat2, namespaces, pidfds; one function a call
mountinfo.py   which mounts a process sees
namespaces.py  mount namespaces that outlive us, threads that live in them, user namespaces
loop.py        loop devices, for kernels that mount no files
probe.py       what this kernel can, found out by trying
"""
