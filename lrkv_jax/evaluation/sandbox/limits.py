"""What a program may use, and what became of it."""

from dataclasses import dataclass, fields

from lrkv_jax.errors import LrkvError

_MIB = 1 << 20


@dataclass(frozen=True)
class Limits:
    """What one program may use; the kernel holds all but `seconds` and `output_bytes`.

    seconds: of wall clock, from its first statement. cpu_seconds, memory_bytes (of address space),
    file_bytes (one file's size), open_files: of each process. processes: how many processes and
    threads at a time, itself included. disk_bytes: of all its files together. output_bytes: of
    stdout and stderr together. Raises LrkvError for one that is not above 0.
    """

    seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_bytes: int = 1024 * _MIB
    file_bytes: int = 16 * _MIB
    disk_bytes: int = 64 * _MIB
    open_files: int = 64
    processes: int = 8
    output_bytes: int = _MIB

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise LrkvError(f"sandbox: {field.name} = {value}: give a number above 0")


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    passed: it came to its end without raising. reason: "passed", "timed out", "raised NameError",
    "ran out of memory", "ended without passing", ... seconds: wall clock of the program alone.
    output: the end of what it wrote to stdout and stderr.
    """

    passed: bool
    reason: str
    seconds: float
    output: str
