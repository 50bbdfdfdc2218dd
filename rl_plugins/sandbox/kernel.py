"""Calls of the Linux kernel that Python 3.11 lacks: namespaces, mounts and privileges of this process."""

from __future__ import annotations

import ctypes
import os

NEW_MOUNTS, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000

BIND, RECURSIVE, PRIVATE = 4096, 16384, 1 << 18
NO_SUID, NO_DEVICES, NO_EXEC = 2, 4, 8
"""Flags of `mount`."""
READ_ONLY_ATTRIBUTE, NO_SUID_ATTRIBUTE, NO_DEVICES_ATTRIBUTE, NO_EXEC_ATTRIBUTE = 1, 2, 4, 8
"""Flags of `set_mount_attributes`."""

PARENT_DEATH_SIGNAL, SET_DUMPABLE, NO_NEW_PRIVILEGES, SET_SECCOMP = 1, 4, 38, 22
"""Options of `process_control`."""

_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE, _DETACH = -100, 0x8000, 2
_CAPABILITY_VERSION = 0x20080522
_LIBC = ctypes.CDLL(None, use_errno=True)


def _check(result: int, action: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{action}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces. New process numbers begin with the next child."""
    _check(_LIBC.unshare(flags), "new namespaces")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system, or a folder or file in a second place."""
    values = [value.encode() for value in (source, target, kind)]
    _check(_LIBC.mount(*values, ctypes.c_ulong(flags), options.encode()), f"mount of {source} on {target}")


def set_mount_attributes(path: str, attributes: int, recursive: bool) -> None:
    """Add attributes, such as read-only, to a mount.

    Args:
        path: place of the mount.
        attributes: flags to set.
        recursive: also change all mounts below.
    """
    record = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    how = ctypes.c_uint(_AT_RECURSIVE if recursive else 0)
    size = ctypes.c_size_t(ctypes.sizeof(record))
    number, folder = ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD)
    _check(_LIBC.syscall(number, folder, path.encode(), how, record, size), f"read-only mount of {path}")


def detach(path: str) -> None:
    """Unmount a folder with all mounts below."""
    _check(_LIBC.umount2(path.encode(), _DETACH), f"unmount of {path}")


def pivot_root(new: str, old: str) -> None:
    """Make a mount the root folder, and put the old root folder under `old`."""
    _check(_LIBC.pivot_root(new.encode(), old.encode()), "change of the root folder")


def process_control(option: int, value: int, second: int | ctypes.Array[ctypes.c_char] = 0) -> None:
    """Call `prctl`."""
    further = ctypes.c_ulong(second) if isinstance(second, int) else second
    zero = ctypes.c_ulong(0)
    _check(_LIBC.prctl(option, ctypes.c_ulong(value), further, zero, zero), f"option {option} of the process")


def drop_capabilities() -> None:
    """Give up all capabilities of this process for ever."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _check(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "end of the capabilities")
