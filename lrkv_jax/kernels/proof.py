"""Whether a compiled decode kernel may run on this device: it is tried once, and that is kept.

Before `dispatch` takes a compiled kernel for a family of calls (`lrkv_jax.kernels.trial`), the
family is tried in a process of its own. The verdict holds for this kind of device, these versions
and these sources, and lies beside JAX's compiled programs, a file each. Of a run's processes the
first one tries, and the others take its verdict: all must compile the same program.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

# The client has no public name (`lrkv_jax.runtime.processes` takes it from here too).
from jax._src import distributed

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels.trial import TOLERANCE, Trial

# Of a trial's stages. Starting imports JAX, opens the device and runs XLA's program; running is the
# kernel alone, which takes milliseconds.
SECONDS = {"start": 300, "compile": 300, "run": 60, "compare": 300}
# The first process may be building a dataset while another waits for its verdict.
_PATIENCE_SECONDS = 24 * 3600

_MEND = "set model.decode_kernel=xla"

RIGHT, BAD, UNKNOWN = "right", "bad", "unknown"

_log = logging.getLogger("lrkv_jax.kernels")
_lock = threading.Lock()
_verdicts: dict[str, Verdict] = {}
_needless = False


@contextlib.contextmanager
def unneeded():
    """No kernel is tried in this block: it checks them itself, in a process that may hang."""
    global _needless
    _needless = True
    try:
        yield
    finally:
        _needless = False


class Verdict(NamedTuple):
    """What a trial showed: RIGHT, BAD, or UNKNOWN where it says nothing about the kernel."""

    result: str
    says: str


def doubt(trial: Trial) -> str | None:
    """Why the trial's kernel must not run in this process, None if it gave XLA's results.

    The first question about a family takes seconds, and minutes if the kernel hangs.
    """
    if _needless:
        return None
    calls = family(trial)
    key = {**platform(), **calls}
    name = _name(key)
    with _lock:
        if name not in _verdicts:
            _verdicts[name] = _of_all_processes(calls, name, lambda: _found(name, key, trial))
        verdict = _verdicts[name]
    return None if verdict.result == RIGHT else verdict.says


def family(trial: Trial) -> dict[str, Any]:
    """What tells the trial's family from others."""
    leaves = jax.tree_util.tree_leaves_with_path(trial.arrays)
    return {
        "kernel": f"{trial.mosaic.__module__}.{trial.mosaic.__qualname__}",
        "plan": repr(trial.plan),
        "arrays": {
            jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves
        },
        "scale": trial.scale,
    }


@functools.cache
def platform() -> dict[str, Any]:
    """The kind of device, and the versions, that a verdict holds for."""
    device = jax.local_devices()[0]
    libraries = {
        package.name: package.version
        for package in metadata.distributions()
        if (package.name or "").startswith(("jax", "nvidia"))
    }
    return {
        "device": device.device_kind,
        "platform": device.client.platform_version,
        "libraries": libraries,
        "sources": sources(),
    }


@functools.cache
def sources() -> str:
    """A fingerprint of the kernels' sources."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _name(key):
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]


def directory() -> Path | None:
    """Where verdicts are kept: beside JAX's compiled programs; None where these are not kept."""
    programs = jax.config.jax_compilation_cache_dir
    if not programs or not jax.config.jax_enable_compilation_cache or "://" in programs:
        return None
    return Path(programs) / "kernels"


def _of_all_processes(calls, name, find):
    """What `find` gives in the first of the run's processes, in each of them."""
    if jax.process_count() == 1:
        return find()
    client, place = distributed.global_state.client, f"lrkv/kernels/{_name(calls)}"
    if jax.process_index() == 0:
        verdict = find()
        client.key_value_set(place, json.dumps([name, *verdict]), allow_overwrite=True)
        return verdict
    try:
        said = json.loads(client.blocking_key_value_get(place, _PATIENCE_SECONDS * 1000))
    except jax.errors.JaxRuntimeError as error:
        raise LrkvError(f"process 0 has not checked the compiled kernel: {_MEND}") from error
    if said[0] != name:
        raise LrkvError(
            f"process 0 checked the compiled kernel on another kind of device, or with other "
            f"versions, than process {jax.process_index()} has: {_MEND}"
        )
    return Verdict(*said[1:])


def _found(name, key, trial):
    """The verdict that was kept, or a new one; what is wrong is said as a user reads it."""
    folder, device = directory(), key["device"]
    path = folder and folder / f"{name}.json"
    verdict = path and _read(path, key)
    if not verdict:
        _log.info("checking %s, once for this device and these versions", key["kernel"])
        verdict = attempt(trial, device)
        if path and (verdict.result == UNKNOWN or not _write(path, key, verdict)):
            path = None
    result, says = verdict
    if result == BAD:
        file = f"the file {path}, and remove it to check again" if path else "this line"
        says = (
            f"the compiled kernel failed its check on this {device}: {says}; please report it to "
            f"this project with {file}"
        )
    elif result == UNKNOWN:
        says = (
            f"the compiled kernel could not be checked on this {device}: {says}; the check is a "
            "second process on the device, and takes a few GB of its memory"
        )
    return Verdict(result, says)


def _read(path, key):
    """The verdict in a file; None if there is none, it is damaged, or another's."""
    try:
        kept = json.loads(path.read_bytes())
        verdict = Verdict(kept.pop("result"), kept.pop("says"))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    known = verdict.result in (RIGHT, BAD) and isinstance(verdict.says, str)
    # By way of JSON, as the file was.
    return verdict if known and kept == json.loads(json.dumps(key)) else None


def _write(path, key, verdict):
    """Whether the verdict is kept. Another process may write the same at the same time."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh.write_text(json.dumps({**verdict._asdict(), **key}, indent=2) + "\n")
        fresh.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        _log.warning("the check of %s is not kept: %s", key["kernel"], error)
        return False
    return True


def attempt(trial: Trial, device_kind: str) -> Verdict:
    """Try it in another process, which is ended if it takes too long."""
    code = "from lrkv_jax.kernels.trial import main; main()"
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code], env=_environment(), start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        return Verdict(UNKNOWN, f"no process could be started: {error}")
    output = errors = b""
    request = pickle.dumps((trial, device_kind, SECONDS))
    try:
        # It ends itself in time. This is for one that even a signal does not end.
        output, errors = process.communicate(request, timeout=sum(SECONDS.values()) + 60)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, errors = process.communicate(timeout=10)
    finally:
        process.kill()
    stages = [json.loads(line) for line in output.splitlines()]
    last_words = errors.decode(errors="replace").strip().rpartition("\n")[2]
    return _judge(stages, process.returncode, last_words)


def _judge(stages, code, last_words):
    """The verdict on a process that reached `stages` and ended with an exit code."""
    last = stages[-1] if stages else {"stage": None}
    stage = last["stage"]
    if stage == "done":
        off = last["error"]
        return Verdict(BAD if off > TOLERANCE else RIGHT, _off_by(off))
    if stage == "raised" and "RESOURCE_EXHAUSTED" not in last["reason"]:
        return Verdict(BAD, f"it fails with {_one_line(last['reason'])}")
    if stage in ("compile", "run") and code != -signal.SIGKILL:
        if code == -signal.SIGALRM or code is None:
            late = "does not end" if stage == "run" else "is not compiled"
            return Verdict(BAD, f"it {late} within {SECONDS[stage]} s")
        return Verdict(BAD, f"it ends its process ({_end(code)}): {_one_line(last_words)}")
    reason = last.get("reason") or last_words or _end(code)
    return Verdict(UNKNOWN, _one_line(reason))


def _off_by(off):
    if off == float("inf"):
        return "it gives values that are not numbers"
    return f"it differs from XLA by {off:.1e} of the largest value, {TOLERANCE:.0e} allowed"


def _end(code):
    return signal.Signals(-code).name if code and code < 0 else f"exit code {code}"


def _one_line(text):
    return " ".join(text.split())[:300]


def _environment():
    """The other process's: this one's modules, its device alone, and little of that's memory."""
    device = jax.local_devices()[0]
    own = {
        "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_CUDA_VISIBLE_DEVICES": str(device.local_hardware_id or 0),
        # What is tried is compiled by the versions that are here, not by those of some day.
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    return {**os.environ, **own}
