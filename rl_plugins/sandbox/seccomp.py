"""Filter of system calls for programs in the sandbox, as a program of the kernel's packet filter (seccomp).

The filter refuses calls that reach beyond the sandbox, or that take memory which no limit counts. A refused call fails
with EPERM. The filter stays for ever, also in children and in other interpreters.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct
from dataclasses import dataclass

from rl_plugins.sandbox.kernel import NO_NEW_PRIVILEGES, SET_SECCOMP, process_control

_FILTER_MODE = 2
_INSTRUCTION = "HBBI"
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _FOURTH_ARGUMENT = 0, 4, 16, 24, 40
_KIND_OF_SOCKET = 15
"""Bits of a socket's type without its flags."""
_NEW_NAMESPACES = 0x7E020000
_SHARED_WITHOUT_FILE = 0x21
"""Flags MAP_SHARED and MAP_ANONYMOUS of `mmap`."""
_OTHER_NUMBERS = 0x40000000
"""Numbers of a second set of calls on x86-64 (x32)."""

# io_uring, fsopen, fsconfig, fsmount, fspick, open_tree, move_mount, mount_setattr, memfd_secret, pidfd_getfd,
# quotactl_fd: the same numbers everywhere.
_EVERYWHERE = (425, 426, 427, 430, 431, 432, 433, 428, 429, 442, 447, 438, 443)
_CLONE3 = 435


@dataclass(frozen=True)
class _Machine:
    """Numbers of system calls of a processor.

    Attributes:
        architecture: number of the processor in the kernel's audit records.
        clone: number of `clone`.
        mmap: number of `mmap`.
        prlimit: number of `prlimit64`.
        socketpair: number of `socketpair`.
        denied: numbers of the refused calls.
    """

    architecture: int
    clone: int
    mmap: int
    prlimit: int
    socketpair: int
    denied: dict[str, int]


_X86 = {
    "socket": 41, "connect": 42, "bind": 49, "listen": 50, "accept": 43, "accept4": 288,
    "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "unshare": 272,
    "setns": 308, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "keyctl": 250, "add_key": 248,
    "request_key": 249, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "memfd_create": 319, "shmget": 29,
    "shmat": 30, "msgget": 68, "semget": 64, "mq_open": 240, "name_to_handle_at": 303, "open_by_handle_at": 304,
    "init_module": 175, "finit_module": 313, "delete_module": 176, "kexec_load": 246, "kexec_file_load": 320,
    "reboot": 169, "swapon": 167, "swapoff": 168, "acct": 163, "quotactl": 179, "settimeofday": 164,
    "clock_settime": 227, "adjtimex": 159, "clock_adjtime": 305, "syslog": 103, "fanotify_init": 300,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "modify_ldt": 154, "lookup_dcookie": 212,
    "move_pages": 279, "migrate_pages": 256, "mbind": 237, "set_mempolicy": 238, "personality": 135, "vhangup": 153,
    "uselib": 134, "vmsplice": 278,
}  # fmt: skip
_ARM = {
    "socket": 198, "connect": 203, "bind": 200, "listen": 201, "accept": 202, "accept4": 242,
    "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "unshare": 97,
    "setns": 268, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "keyctl": 219, "add_key": 217,
    "request_key": 218, "bpf": 280, "perf_event_open": 241, "userfaultfd": 282, "memfd_create": 279, "shmget": 194,
    "shmat": 196, "msgget": 186, "semget": 190, "mq_open": 180, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "init_module": 105, "finit_module": 273, "delete_module": 106, "kexec_load": 104, "kexec_file_load": 294,
    "reboot": 142, "swapon": 224, "swapoff": 225, "acct": 89, "quotactl": 60, "settimeofday": 170,
    "clock_settime": 112, "adjtimex": 171, "clock_adjtime": 266, "syslog": 116, "fanotify_init": 262,
    "sethostname": 161, "setdomainname": 162, "lookup_dcookie": 18, "move_pages": 239, "migrate_pages": 238,
    "mbind": 235, "set_mempolicy": 237, "personality": 92, "vhangup": 58, "vmsplice": 75,
}  # fmt: skip
_MACHINES = {
    "x86_64": _Machine(0xC000003E, 56, 9, 302, 53, _X86),
    "aarch64": _Machine(0xC00000B7, 220, 222, 261, 199, _ARM),
}


def has_filter() -> bool:
    """Return True if there is a filter for the processor of this machine."""
    return platform.machine() in _MACHINES


def filter_text() -> bytes:
    """Return the filter for this machine as the kernel reads it."""
    return b"".join(struct.pack(_INSTRUCTION, *row) for row in _instructions(_MACHINES[platform.machine()]))


def filter_calls() -> None:
    """Refuse dangerous system calls in this process and its children for ever."""
    text = filter_text()
    content, count = ctypes.create_string_buffer(text), len(text) // struct.calcsize(_INSTRUCTION)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", count, ctypes.addressof(content)))
    process_control(NO_NEW_PRIVILEGES, 1)
    process_control(SET_SECCOMP, _FILTER_MODE, program)


def _instructions(machine: _Machine) -> list[tuple[int, int, int, int]]:
    """Return the instructions: operation, instructions to skip if true and if false, and value."""
    refuse = (_RETURN, 0, 0, _FAIL | errno.EPERM)
    code = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine.architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _OTHER_NUMBERS),
        refuse,
    ]
    for number in (*machine.denied.values(), *_EVERYWHERE):
        code += [(_EQUAL, 0, 1, number), refuse]
    # Without clone3, libraries use clone, whose flags the filter can read.
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _FAIL | errno.ENOSYS)]
    first = (_LOAD, 0, 0, _FIRST_ARGUMENT)
    code += [(_EQUAL, 0, 4, machine.clone), first, (_ANY_BIT, 0, 1, _NEW_NAMESPACES), refuse]
    code += [(_RETURN, 0, 0, _ALLOW)]
    # Pairs of streams only, as of multiprocessing and asyncio: a socket of datagrams sends to any address.
    code += [(_EQUAL, 0, 7, machine.socketpair), first, (_EQUAL, 0, 3, socket.AF_UNIX)]
    code += [(_LOAD, 0, 0, _SECOND_ARGUMENT), (_AND, 0, 0, _KIND_OF_SOCKET), (_EQUAL, 1, 0, socket.SOCK_STREAM)]
    code += [refuse, (_RETURN, 0, 0, _ALLOW)]
    # Shared memory without a file: its pages stay in memory, and count for no process, after a program has told the
    # kernel to forget their addresses (MADV_DONTNEED).
    code += [(_EQUAL, 0, 5, machine.mmap), (_LOAD, 0, 0, _FOURTH_ARGUMENT), (_AND, 0, 0, _SHARED_WITHOUT_FILE)]
    code += [(_EQUAL, 0, 1, _SHARED_WITHOUT_FILE), refuse, (_RETURN, 0, 0, _ALLOW)]
    # Limits of the own process only: the number 0 is the own process.
    code += [(_EQUAL, 0, 3, machine.prlimit), first, (_EQUAL, 1, 0, 0), refuse]
    return [*code, (_RETURN, 0, 0, _ALLOW)]
