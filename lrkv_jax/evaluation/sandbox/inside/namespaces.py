"""Namespaces: a process that sees a read-only standard library, a small folder, and no network."""

import os

import system

# Inside a user namespace the one user that exists.
NOBODY = 65534
WORK = "/lrkv-program"  # a name that no system and no project has
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
# Each file costs the kernel a kilobyte that the file system's size does not count.
_INODES = 4096


def enter(order: dict, as_root: bool) -> None:
    """Enter the namespaces: this process becomes the first of a process namespace, in WORK.

    The caller's process stays outside and ends when that one does. Raises OSError where
    the kernel or a container forbids it.
    """
    apart = os.CLONE_NEWNS | os.CLONE_NEWPID | os.CLONE_NEWNET | os.CLONE_NEWIPC | os.CLONE_NEWUTS
    if as_root:
        os.unshare(apart)
    else:
        user, group = os.geteuid(), os.getegid()
        os.unshare(apart | os.CLONE_NEWUSER)
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{NOBODY} {user} 1")
        _write("/proc/self/gid_map", f"{NOBODY} {group} 1")
    first = os.fork()
    if first:
        # The supervisor alone reports: were the pipe open here too, it would not end with it.
        os.closerange(0, 256)
        os.waitpid(first, 0)
        os._exit(0)
    _build(order["root"], order["readable"], order["limits"]["disk_bytes"])


def _build(root: str, readable: list[str], disk_bytes: int) -> None:
    system.mount("none", "/", None, system.MS_REC | system.MS_PRIVATE)
    plain = system.MS_NOSUID | system.MS_NODEV
    # No /proc: nothing in there is a program's business, and much of it is a way out.
    system.mount("tmpfs", root, "tmpfs", plain, f"size=1m,nr_inodes={_INODES},mode=755")
    for path in (*readable, *DEVICES):
        _bind(path, root + path)
    work = root + WORK
    os.mkdir(work)
    system.make_read_only(root)
    system.mount("tmpfs", work, "tmpfs", plain, f"size={disk_bytes},nr_inodes={_INODES},mode=1777")
    system.change_root(root)
    os.chdir(WORK)


def _bind(path: str, target: str) -> None:
    if os.path.islink(path):  # /lib is one to usr/lib
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT))
    system.mount(path, target, None, system.MS_BIND | system.MS_REC)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
