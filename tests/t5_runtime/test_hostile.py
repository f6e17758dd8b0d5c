"""Images and programs that try to get out, or at what is not theirs."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dsec_runtime.errors import NoSuchUser, ProgramNotFound, SandboxError
from dsec_runtime.run import Runner, RunSpec
from dsec_runtime.upper import remove_tree
from dsec_runtime.users import find_user
from dsecfs.kernel.mountinfo import mounts_here
from dsecfs.kernel.namespaces import unpin_namespaces
from dsecfs.layers.local import LocalLayer
from dsecfs.layers.tree import Inode
from dsecfs.nodedirs import NodeDirs
from tests.support.node import Entry, Node, file_inode
from tests.t5_runtime.conftest import Shell, base_entries, remains


def hostile(here: Node, runner: Runner, entries: dict[str, Entry]) -> Shell:
    """A shell in an image that has `entries` instead of what they replace."""
    data = bytearray()
    found = base_entries(data)
    for name in entries:
        for known in list(found):
            if known == name or known.startswith(f"{name}/"):
                del found[known]
    return Shell(runner, here.layer(found | entries, data))


@pytest.mark.parametrize("target", ["/etc", "/../../../../../../etc", "../../../../../../etc"])
def test_links_out_of_the_image_stay_inside(here: Node, runner: Runner, target: str) -> None:
    shell = hostile(here, runner, {"etc": target})
    # The link leads to itself: no passwd, so names are unknown and numbers work.
    with pytest.raises(NoSuchUser):
        shell.run("true", user="daemon")
    assert shell.sh("id -u", user="7") == "7\n"


@pytest.mark.parametrize("name", ["proc", "sys", "dev", "dev/init", "dev/pts"])
@pytest.mark.parametrize("target", ["/escaped", "../../../../escaped", "/etc/escaped"])
def test_mount_points_that_are_links(here: Node, runner: Runner, name: str, target: str) -> None:
    for outside in (Path("/escaped"), Path("/etc/escaped")):
        assert not outside.exists()
    shell = hostile(here, runner, {name: target, "escaped/x": b"", "etc/escaped/x": b""})
    with contextlib.suppress(SandboxError):  # refused is as good as contained
        result, out, _ = shell.run("sh", "-c", "echo inside; test -e /proc/self")
        assert "inside" in out or result.exit_code
    for outside in (Path("/escaped"), Path("/etc/escaped")):
        assert not outside.exists()
    assert not [m.point for m in mounts_here() if "escaped" in str(m.point)]
    assert remains(here, runner) == {}


@pytest.mark.parametrize("name", ["proc", "sys", "dev"])
def test_mount_points_that_are_files(here: Node, runner: Runner, name: str) -> None:
    shell = hostile(here, runner, {name: b"a file"})
    with contextlib.suppress(SandboxError):
        shell.run("true")
    assert remains(here, runner) == {}


@pytest.mark.parametrize(
    "passwd",
    [
        Inode(stat.S_IFIFO | 0o666),
        Inode(stat.S_IFCHR | 0o666, rdev=os.makedev(1, 5)),
        Inode(stat.S_IFSOCK | 0o666),
        Inode(stat.S_IFDIR | 0o755, children={}),
        "/proc/self/environ",
        "passwd",
        b"\xff\xfe:::\n::::::\nroot\nbob:x:99999999999999999999:1\nbob:x:-1:2\n" * 1000,
    ],
    ids=["fifo", "device", "socket", "directory", "proc", "loop", "garbage"],
)
def test_strange_passwd_files(here: Node, runner: Runner, passwd: Entry) -> None:
    shell = hostile(here, runner, {"etc/passwd": passwd})
    with pytest.raises(NoSuchUser):
        shell.run("true", user="bob")
    assert shell.run("true", user="12")[0].exit_code == 0


def test_a_passwd_beyond_the_limit_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsec_runtime.users.MAX_FILE", 1000)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("x:x:1:1::/:\n" * 100_000 + "late:x:5:5::/:\n")
    root = os.open(tmp_path, os.O_PATH)
    with pytest.raises(NoSuchUser):
        find_user(root, "late")
    os.close(root)


def test_directories_like_the_kernels_are_the_images(shell: Shell) -> None:
    with pytest.raises(SandboxError):
        shell.run("true", cwd="/process")
    with pytest.raises(ProgramNotFound):
        shell.run("/devices/tool")
    assert shell.sh("pwd", cwd="/dev/shm") == "/dev/shm\n"


def test_devices_of_an_image(here: Node, runner: Runner) -> None:
    disk = os.stat("/").st_dev
    shell = hostile(
        here,
        runner,
        {
            "disk": Inode(stat.S_IFBLK | 0o666, rdev=disk),
            "mem": Inode(stat.S_IFCHR | 0o666, rdev=os.makedev(1, 1)),
            "zero": Inode(stat.S_IFCHR | 0o666, rdev=os.makedev(1, 5)),
        },
    )
    for name in ("/disk", "/mem", "/zero"):
        result, out, err = shell.run("dd", f"if={name}", "of=/dev/null", "bs=1", "count=1")
        assert result.exit_code != 0 and "denied" in err, (name, out, err)


def test_owners_beyond_the_range_are_nobody(here: Node, runner: Runner) -> None:
    big = Inode(stat.S_IFREG | 0o4755, uid=70000, gid=4_000_000_000)
    shell = hostile(here, runner, {"big": big})
    assert shell.sh("stat -c %u:%g /big") == "65534:65534\n"


def test_what_root_inside_may_not(shell: Shell) -> None:
    """Each line must fail; the script prints those that did not."""
    attempts = [
        "mount -t tmpfs none /tmp",
        "mount -t proc none /tmp",
        "umount /proc",
        "umount /dev/init",
        "rm /dev/init",
        "unshare -U true",
        "unshare -m true",
        "mknod /b b 8 0",
        "echo 1 > /proc/sys/kernel/panic",
        "echo x > /proc/sys/kernel/core_pattern",
        "echo b > /proc/sysrq-trigger",
        "echo 0 > /sys/class/net/lo/mtu",
        "touch /sys/x",
        "test -s /proc/kcore",
        "grep . /proc/kpagecgroup",
        "grep . /proc/kallsyms",
        "grep . /proc/cmdline",
        "grep . /proc/keys",
        "ls /sys/kernel/debug",
        "ls /sys/firmware/*",
        "chmod 777 /dev/null",
        "hostname other",
        "test -e /.dsec",
        "nc -w 1 1.1.1.1 53",
        "echo -1000 > /proc/self/oom_score_adj",
        "kill -0 -1 && ps | grep -v -e sh -e init -e ps -e PID -e grep",
    ]
    script = "\n".join(f"({line}) >/dev/null 2>&1 && echo '{line}'" for line in attempts)
    assert shell.sh(script + "\ntrue") == ""


def test_open_descriptors_of_ours_are_not_inherited(shell: Shell) -> None:
    out = shell.sh("ls -l /proc/self/fd /proc/1/fd")
    assert str(shell.runner._dirs.run) not in out
    numbers = [line.split(" -> ")[0].split()[-1] for line in out.splitlines() if " -> " in line]
    assert set(numbers) <= {"0", "1", "2", "3", "4", "5"}
    kinds = {line.split(" -> ")[1] for line in out.splitlines() if " -> " in line}
    assert not [k for k in kinds if "ns/" in k or "dsec" in k]


def test_streams_of_the_caller_stay_outside(runner: Runner, base: LocalLayer) -> None:
    """A container could change, read or redirect what it has a descriptor of."""
    null = os.stat(os.devnull)
    master, terminal = os.openpty()
    ours, theirs = socket.socketpair()
    script = "for n in 0 1 2; do stat -L -c %F /proc/self/fd/$n; chmod 0 /proc/self/fd/$n; done"
    script += "; cat >/dev/null; chmod 0 /dev/null; echo end"
    with ours, theirs, open(os.devnull, "r+b", buffering=0) as device:
        os.write(master, b"typed\n\4")
        theirs.setblocking(False)
        streams: list[dict[str, Any]] = [
            {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": device.fileno()},
            {"stdin": device.fileno(), "stdout": terminal, "stderr": terminal},
            {"stdin": terminal, "stdout": theirs.fileno(), "stderr": theirs.fileno()},
        ]
        for given in streams:
            spec = RunSpec((base,), ("sh", "-c", f"{script}; exit 3"), **given)
            assert runner.run(spec).exit_code == 3
        said = ours.recv(4096).decode()
        assert said.count("fifo") == 3 and said.endswith("end\n")
        assert "fifo" in os.read(master, 4096).decode()
    os.close(terminal)
    os.close(master)
    now = os.stat(os.devnull)
    assert (now.st_uid, now.st_gid, now.st_mode) == (null.st_uid, null.st_gid, null.st_mode)


def test_a_terminal_does_not_cost_the_host_its_null_device(
    runner: Runner, base: LocalLayer
) -> None:
    null = os.stat(os.devnull)
    master, terminal = os.openpty()
    args = ("sh", "-c", "chmod 0 /dev/null; true")
    spec = RunSpec((base,), args, tty=True, stdin=terminal, stdout=terminal)
    assert runner.run(spec).exit_code == 0
    os.close(terminal)
    os.close(master)
    now = os.stat(os.devnull)
    assert (now.st_uid, now.st_gid, now.st_mode) == (null.st_uid, null.st_gid, null.st_mode)


def test_no_path_of_the_node_is_told(here: Node, shell: Shell) -> None:
    out = shell.sh("cat /proc/self/mountinfo /proc/1/environ /proc/self/cgroup")
    assert str(here.place) not in out
    assert shell.runner.sandboxes.cgroup_parent not in out


def test_seccomp_answers(shell: Shell) -> None:
    status = shell.sh("grep -e Seccomp: -e NoNewPrivs /proc/self/status")
    assert "Seccomp:\t2" in status and "NoNewPrivs:\t0" in status
    status = shell.sh("grep NoNewPrivs /proc/self/status", no_new_privileges=True)
    assert "NoNewPrivs:\t1" in status


def _i386_call(number: int, *arguments: int) -> bytes:
    """A static x86-64 program whose exit code is minus what a 32-bit system call returns.

    The words from 0x4000f8 on are 40, 1 and 0: arguments of socket(2) in memory.
    """
    code = b"\xb8" + struct.pack("<I", number)  # mov eax
    for opcode, value in zip((b"\xbb", b"\xb9", b"\xba"), arguments, strict=False):
        code += opcode + struct.pack("<I", value)  # mov ebx, ecx, edx
    code += b"\xcd\x80\xf7\xd8\x89\xc7\xb8\x3c\0\0\0\x0f\x05"  # int 0x80; exit(-eax)
    size = 0x100 + 4
    header = b"\x7fELF\2\1\1".ljust(16, b"\0")
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, 0x400078, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    header += struct.pack("<IIQQQQQQ", 1, 5, 0, 0x400000, 0x400000, size, size, 4096)
    return (header + code).ljust(0xF8, b"\0") + struct.pack("<III", 40, 1, 0)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="32-bit calls of x86")
def test_no_vsock_by_32_bit_calls(here: Node, runner: Runner) -> None:
    data = bytearray()
    calls = {
        "socketcall": _i386_call(102, 1, 0x4000F8),
        "vsock": _i386_call(359, 40, 1, 0),
        "xdp": _i386_call(359, 44, 3, 0),
        "unix": _i386_call(359, 1, 1, 0),
    }
    entries = base_entries(data) | {name: file_inode(code, data) for name, code in calls.items()}
    shell = Shell(runner, here.layer(entries, data))
    codes = {name: shell.run(f"/{name}")[0].exit_code for name in calls}
    unix = codes.pop("unix")
    if unix == 128 + signal.SIGSEGV:
        pytest.skip("this kernel has no 32-bit calls")
    assert unix > 250, "an ordinary socket is a descriptor, 3 or so"
    assert codes == {"socketcall": errno.EPERM, "vsock": errno.ENOSYS, "xdp": errno.ENOSYS}


def test_sandboxes_do_not_share_ids(here: Node, base: LocalLayer, runner: Runner) -> None:
    starts = []
    pipes = []
    running = []
    for _ in range(3):
        read, write = os.pipe()
        script = "echo x; while true; do sleep 1; done"
        one = runner.start(RunSpec((base,), ("sh", "-c", script), stdout=write))
        os.read(read, 10)
        starts.append((here.dirs.uppers / one.sandbox / "upper").stat().st_uid)
        running.append(one)
        pipes += [read, write]
    assert len(set(starts)) == 3
    assert all(abs(a - b) >= 65536 for a in starts for b in starts if a != b)
    for one in running:
        one.stop(grace_s=0)
        assert one.wait().exit_code in (137, 143)
    for fd in pipes:
        os.close(fd)


def test_another_run_directory_leaves_uppers_in_use_alone(
    here: Node, base: LocalLayer, runner: Runner
) -> None:
    read, write = os.pipe()
    script = "echo kept > /file; echo ready; read line; cat /file"
    given, give = os.pipe()
    spec = RunSpec((base,), ("sh", "-c", script), stdin=given, stdout=write)
    running = runner.start(spec)
    assert os.read(read, 100) == b"ready\n"
    lost = here.dirs.uppers / "0123456789ab"
    lost.mkdir()
    (lost / "claim").write_bytes(os.fsencode(here.place / "nowhere.json"))
    other = NodeDirs(here.dirs.data, here.place / "other")
    with Runner(other, cgroup_parent=runner.sandboxes.cgroup_parent) as second:
        assert second.recover() == []
    unpin_namespaces(other.run / "ns")
    assert not lost.exists()
    os.write(give, b"go\n")
    assert running.wait().exit_code == 0
    assert os.read(read, 100) == b"kept\n"
    for fd in (read, write, given, give):
        os.close(fd)


def test_deep_and_odd_trees_are_removed(here: Node, shell: Shell) -> None:
    script = """
        i=0; while [ $i -lt 1200 ]; do mkdir d && cd d || exit 1; i=$((i+1)); done
        mkdir -p /x/.dsec-1 /x/y/.dsec-1/z; ln -s /etc /x/link; chmod 0 /x /x/y
        touch /.dsec-1 /.dsec-2; touch "$(printf 'a\\nb')"
    """
    shell.sh(script)
    assert remains(here, shell.runner) == {}


def test_remove_tree_follows_no_links(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "file").touch()
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a" / "link").symlink_to(keep)
    (tree / "link").symlink_to(keep)
    remove_tree(tree)
    assert not tree.exists() and (keep / "file").exists()
    (tmp_path / "alias").symlink_to(keep)
    with pytest.raises(OSError, match="Not a directory"):
        remove_tree(tmp_path / "alias")
    assert (keep / "file").exists()
    remove_tree(tmp_path / "missing")
