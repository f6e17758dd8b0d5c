"""Which system calls a container may make: an allow-list in the spirit of docker's default.

What must hold:
- a call that is neither listed nor denied on purpose fails with ENOSYS, so that C libraries
  use what they used before the call existed; one that is denied on purpose fails with EPERM;
- nothing that makes namespaces or mounts: a container has CAP_SYS_ADMIN in no namespace, and
  a user namespace of its own making would open most of the kernel's attack surface to it;
- no io_uring, bpf, perf, userfaultfd and kernel keyrings: often broken, never needed;
- sockets of the families that containers need, and no others. AF_VSOCK reaches the host from
  inside a VM and has no namespaces; AF_ALG and AF_XDP are often broken. socketcall(2) of 32-bit
  x86 hides the family behind a pointer, so it is refused: old 32-bit programs have no sockets.
"""

from __future__ import annotations

import functools
import os
from typing import Any

ENOSYS = 38
EPERM = 1

ALLOWED = """
_llseek _newselect accept accept4 access adjtimex alarm bind brk cachestat capget capset chdir
chmod chown chown32 chroot clock_adjtime clock_adjtime64 clock_getres clock_getres_time64
clock_gettime clock_gettime64 clock_nanosleep clock_nanosleep_time64 close close_range connect
copy_file_range creat dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait
epoll_pwait2 epoll_wait epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat
faccessat2 fadvise64 fadvise64_64 fallocate fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown
fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr
fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue
futex_time64 futex_wait futex_waitv futex_wake futimesat get_mempolicy get_robust_list
get_thread_area getcpu getcwd getdents getdents64 getegid getegid32 geteuid geteuid32 getgid
getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp getpid getppid getpriority
getrandom getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname
getsockopt gettid gettimeofday getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init
inotify_init1 inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents
io_pgetevents_time64 io_setup io_submit ioctl ioprio_get ioprio_set ipc kill landlock_add_rule
landlock_create_ruleset landlock_restrict_self lchown lchown32 lgetxattr link linkat listen
listxattr listxattrat llistxattr lremovexattr lseek lsetxattr lstat lstat64 madvise
map_shadow_stack mbind membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat
mlock mlock2 mlockall mmap mmap2 mprotect mq_getsetattr mq_notify mq_open mq_timedreceive
mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap mseal msgctl msgget msgrcv
msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep newfstatat nice open openat
openat2 pause pidfd_getfd pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free
pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2 prlimit64 process_mrelease
process_vm_readv process_vm_writev pselect6 pselect6_time64 ptrace pwrite64 pwritev pwritev2 read
readahead readdir readlink readlinkat readv recv recvfrom recvmmsg recvmmsg_time64 recvmsg
remap_file_pages removexattr removexattrat rename renameat renameat2 restart_syscall rmdir rseq
rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend
rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max
sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler
sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity sched_setattr sched_setparam
sched_setscheduler sched_yield seccomp select semctl semget semop semtimedop semtimedop_time64
send sendfile sendfile64 sendmmsg sendmsg sendto set_mempolicy set_mempolicy_home_node
set_robust_list set_thread_area set_tid_address setfsgid setfsgid32 setfsuid setfsuid32 setgid
setgid32 setgroups setgroups32 setitimer setpgid setpriority setregid setregid32 setresgid
setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid setsockopt setuid setuid32
setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaction sigaltstack signal signalfd
signalfd4 sigpending sigprocmask sigreturn sigsuspend socketpair splice stat stat64
statfs statfs64 statx symlink symlinkat sync sync_file_range sync_file_range2 syncfs sysinfo tee
tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64 timer_settime
timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime
timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat utime
utimensat utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev
""".split()  # noqa: SIM905

DENIED = """
acct add_key bpf clock_settime clock_settime64 create_module delete_module fanotify_init
finit_module fsconfig fsmount fsopen fspick get_kernel_syms init_module io_uring_enter
io_uring_register io_uring_setup ioperm iopl kcmp kexec_file_load kexec_load keyctl listmount
lookup_dcookie lsm_set_self_attr mount mount_setattr move_mount move_pages migrate_pages
nfsservctl open_by_handle_at open_tree open_tree_attr perf_event_open pivot_root process_madvise
query_module quotactl quotactl_fd reboot request_key setdomainname sethostname setns settimeofday
statmount stime swapoff swapon syslog umount umount2 unshare uselib userfaultfd vhangup
""".split()  # noqa: SIM905

BY_MACHINE = {
    "x86_64": ["arch_prctl", "modify_ldt"],
    "aarch64": ["arm_fadvise64_64", "arm_sync_file_range", "breakpoint", "cacheflush", "set_tls"],
    "riscv64": ["riscv_flush_icache", "riscv_hwprobe"],
}
"""By machine (uname -m): calls that only this architecture has."""

ARCHITECTURES = {
    "x86_64": ["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
    "aarch64": ["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
    "riscv64": ["SCMP_ARCH_RISCV64"],
}
"""The native one and its 32-bit form; x32 is left out, since nothing uses it."""

CLONE_NEW_ANY = 0x7E020000
"""All CLONE_NEW* flags of clone(2) (include/uapi/linux/sched.h)."""
FAMILIES = (1, 2, 10, 16, 17)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK, AF_PACKET (include/linux/socket.h)."""
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""PER_LINUX, PER_LINUX32, each with UNAME26, and the query."""


def _rule(
    action: str,
    names: list[str],
    args: list[dict[str, Any]] | None = None,
    errno: int | None = None,
) -> dict[str, Any]:
    rule: dict[str, Any] = {"names": names, "action": action}
    if args:
        rule["args"] = args
    if errno is not None:
        rule["errnoRet"] = errno
    return rule


def _arg(index: int, value: int, op: str, value_two: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": value_two, "op": op}


@functools.cache
def profile(machine: str = "") -> dict[str, Any]:
    """The `linux.seccomp` object of an OCI configuration for this machine."""
    machine = machine or os.uname().machine
    allow, deny = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"
    names = ALLOWED + BY_MACHINE.get(machine, [])
    value: dict[str, Any] = {
        "defaultAction": deny,
        "defaultErrnoRet": ENOSYS,
        "syscalls": [
            _rule(allow, names),
            # clone3 hides its flags behind a pointer: with ENOSYS libraries use clone.
            _rule(allow, ["clone"], [_arg(0, CLONE_NEW_ANY, "SCMP_CMP_MASKED_EQ", 0)]),
            *(_rule(allow, ["socket"], [_arg(0, n, "SCMP_CMP_EQ")]) for n in FAMILIES),
            *(
                _rule(allow, ["personality"], [_arg(0, value, "SCMP_CMP_EQ")])
                for value in _PERSONALITIES
            ),
            _rule(deny, DENIED, errno=EPERM),
            # Not only left out: libseccomp allows it along with `socket`.
            _rule(deny, ["socketcall"], errno=EPERM),
        ],
    }
    if machine in ARCHITECTURES:
        value["architectures"] = ARCHITECTURES[machine]
    return value
