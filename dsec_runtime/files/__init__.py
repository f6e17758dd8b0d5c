"""Files of a running sandbox, touched from outside as one of its users.

The edge owns one *server*, a small process with one thread. For every operation the server forks
a *child* that enters the sandbox's user, mount and pid namespaces, becomes the sandbox's user with
no capability left, and works there with no descriptor but its socket to the edge. So the kernel
decides what may be touched, as for any process of that user; the rest of this package sees to it
that a hostile sandbox cannot block, mislead or outlive whoever asked.

client.py      the edge's side (asyncio): `Files`, a method for each operation; deadlines
channel.py     the server's process and operations under way: starting, limits, ending
answers.py     what a child says, checked; errno → error
model.py       what is told of files
wire.py        frames between the edge and a child
server.py      the server: forks, reaps and kills children (`__main__.py` starts it)
enter.py       how a child becomes the sandbox's user
child.py       a child's life: request, operation, answer; `link.py` its side of the socket
paths.py       from a path to a directory's descriptor and a name
operations.py  stat, list, mkdir, move, remove, read
writing.py     writing one file, atomically
trees.py       walking, removing and copying trees
archive.py     trees as tar, both ways
watching.py    inotify
calls.py       system calls that Python has no function for
"""
