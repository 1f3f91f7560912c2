"""The system calls that Python has no name for, on Linux, by ctypes.

This folder runs inside the sandbox, on the standard library alone.
"""

import ctypes
import errno
import os

_LIBC = ctypes.CDLL(None, use_errno=True)
# The same numbers on x86-64 and on arm64, as for every call added since Linux 5.0.
_MOUNT_SETATTR = 442
_IO_URING_SETUP = 425
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_SOCKET = {"x86_64": 41, "aarch64": 198}
# include/uapi/linux/audit.h: the machine whose numbers a call's are.
_AUDIT_MACHINE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_AT_RECURSIVE = 0x8000
_ATTR_READ_ONLY, _ATTR_NOSUID = 1, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 1, 4, 38
_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2
_VSOCK = 40  # socket.AF_VSOCK, whose module takes long to import
_SECCOMP_ALLOW, _SECCOMP_ERRNO = 0x7FFF0000, 0x00050000
# Classic BPF (linux/filter.h): load a word, jump if equal, jump if at least, return.
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_X32_CALLS = 0x40000000  # from here on numbers are those of x86-64's third set of calls
_SIGKILL = 9


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(number: int, *arguments) -> int:
    """syscall(2); raises OSError."""
    return _checked(_LIBC.syscall(ctypes.c_long(number), *arguments), f"system call {number}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2); raises OSError."""
    result = _LIBC.mount(
        source.encode(),
        target.encode(),
        kind and kind.encode(),
        ctypes.c_ulong(flags),
        options.encode() or None,
    )
    _checked(result, f"mount {target}")


def make_read_only(target: str) -> None:
    """Make all mounts from `target` downwards read-only; mount_setattr(2), Linux 5.12."""
    attributes = (ctypes.c_uint64 * 4)(_ATTR_READ_ONLY | _ATTR_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    _call(_MOUNT_SETATTR, -100, target.encode(), _AT_RECURSIVE, attributes, size)


def change_root(root: str) -> None:
    """Make `root`, a mount point, this process's /; the former / is no longer reachable."""
    os.chdir(root)
    _call(_PIVOT_ROOT[os.uname().machine], b".", b".")
    _checked(_LIBC.umount2(b".", _MNT_DETACH), "umount2")
    os.chdir("/")


def _control(option: int, value: int) -> None:
    _checked(_LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0), f"prctl {option}")


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_void_p)]


def forbid_vsock() -> None:
    """Forbid for good to make vsock sockets, which lead to a virtual machine's host (seccomp(2)).

    A network namespace does not part them. io_uring, which makes sockets too, and calls
    by other machines' numbers are forbidden with them. Needs no_new_privs. Does nothing
    where the kernel has no filters; raises OSError where it refuses this one.
    """
    machine = os.uname().machine
    rules = [
        (_LOAD, 0, 0, 4),  # the machine
        (_JUMP_EQUAL, 0, 6, _AUDIT_MACHINE[machine]),
        (_LOAD, 0, 0, 0),  # the call
        (_JUMP_AT_LEAST, 4, 0, _X32_CALLS),
        (_JUMP_EQUAL, 3, 0, _IO_URING_SETUP),
        (_JUMP_EQUAL, 0, 3, _SOCKET[machine]),
        (_LOAD, 0, 0, 16),  # its first argument, the family
        (_JUMP_EQUAL, 0, 1, _VSOCK),
        (_RETURN, 0, 0, _SECCOMP_ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _SECCOMP_ALLOW),
    ]
    words = (code | yes << 16 | no << 24 | value << 32 for code, yes, no, value in rules)
    program = (ctypes.c_uint64 * len(rules))(*words)
    there = ctypes.byref(_Filter(len(rules), ctypes.addressof(program)))
    result = _LIBC.prctl(_PR_SET_SECCOMP, ctypes.c_ulong(_SECCOMP_MODE_FILTER), there, 0, 0)
    if result and ctypes.get_errno() != errno.EINVAL:
        _checked(result, "seccomp")


def die_with_parent() -> None:
    """Have this process killed when its parent ends; a change of user undoes it."""
    _control(_PR_SET_PDEATHSIG, _SIGKILL)


def hide_from_debuggers() -> None:
    """Forbid processes of the same user to trace this one or read its memory."""
    _control(_PR_SET_DUMPABLE, 0)


def drop_capabilities() -> None:
    """Give up all capabilities for good: no set-user-id program brings one back."""
    _control(_PR_SET_NO_NEW_PRIVS, 1)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _checked(_LIBC.capset(header, (ctypes.c_uint32 * 6)()), "capset")
