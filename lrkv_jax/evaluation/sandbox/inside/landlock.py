"""Landlock: a process gives up files and TCP for good, without being root (Linux 5.13).

The kernel's Documentation/userspace-api/landlock.rst; include/uapi/linux/landlock.h.
"""

import ctypes
import os

import system

_VERSION = 1  # a flag: ask which version the kernel speaks
_PATH_BENEATH = 1
_EXECUTE, _READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 0, 1 << 2, 1 << 3, 1 << 1
# Rights on files, by the version that brought them: 13 at first, then refer, truncate, ioctl.
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_BIND_TCP, _CONNECT_TCP = 1, 2
_NO_ABSTRACT_SOCKETS, _NO_SIGNALS = 1, 2


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def version() -> int:
    """The kernel's Landlock version; 0 where it has none, or a container hides it."""
    try:
        return system.call(
            system.LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION)
        )
    except OSError:
        return 0


def confine(readable: list[str], writable: list[str]) -> None:
    """Allow from now on only reading in `readable` and anything in `writable`: no other file.

    No TCP either (version 4), and no signals to processes outside (version 6). Does nothing where
    the kernel has no Landlock. Needs no_new_privs. Raises OSError.
    """
    speaks = version()
    if not speaks:
        return
    every = (1 << _FILE_RIGHTS[min(speaks, 5)]) - 1
    handled = [every]
    handled += [_BIND_TCP | _CONNECT_TCP] if speaks >= 4 else []
    handled += [_NO_ABSTRACT_SOCKETS | _NO_SIGNALS] if speaks >= 6 else []
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    rules = system.call(system.LANDLOCK_CREATE_RULESET, attributes, size, ctypes.c_uint32(0))
    for paths, rights in ((readable, _EXECUTE | _READ_FILE | _READ_DIR), (writable, every)):
        for path in paths:
            _allow(rules, path, rights)
    system.call(system.LANDLOCK_RESTRICT_SELF, rules, ctypes.c_uint32(0))
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        rights &= _EXECUTE | _READ_FILE | _WRITE_FILE
    rule = _PathBeneath(rights, place)
    system.call(
        system.LANDLOCK_ADD_RULE, rules, _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0)
    )
    os.close(place)
