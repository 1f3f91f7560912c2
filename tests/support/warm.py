"""Starts the command again and again without importing everything again: a second instead of five.

A process that has the imports behind it, and no device yet, forks for each start. The child is
what `lrkv` would have been: the same arguments, environment and exit code.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


class Warm:
    """Use as a context manager. `start` returns a process id, `wait` its exit code."""

    def __init__(self, environment: dict[str, str]):
        environment = {**environment, "OPENBLAS_NUM_THREADS": "1"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._server.stdin.close()
        self._server.wait(timeout=60)

    def _ask(self, **question):
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(self, arguments, output: Path, **environment: str) -> int:
        arguments = list(map(str, arguments))
        return self._ask(arguments=arguments, output=str(output), environment=environment)

    def ended(self, pid: int) -> int | None:
        """The exit code if it has ended, negative for a signal's number."""
        return self._ask(pid=pid, block=False)

    def wait(self, pid: int) -> int:
        return self._ask(pid=pid, block=True)


def _child(arguments, output, environment):
    os.environ.update(environment)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(0)
    sys.argv = ["lrkv", *arguments]
    from lrkv_jax.cli import main

    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _serve():
    import lrkv_jax.cli
    import lrkv_jax.config
    import lrkv_jax.training.loop  # noqa: F401

    ended = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "arguments" in question:
            pid = os.fork()
            if pid == 0:
                _child(**question)
            answer = pid
        else:
            pid = question["pid"]
            if pid not in ended:
                done, status = os.waitpid(pid, 0 if question["block"] else os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()
