"""Trains the runs of `design.py` on one core, one after another, and keeps what they found.

    python experiments/mechanism/runs.py [PART] [--core 1] [--hours H]

Needs the text that `text.py` builds. A run that was stopped goes on from its checkpoint. A run that
the part's file in `experiments/results/mechanism` has is left out, and its folder is deleted. A
line of that file is a run: variant, rate, seed, steps, commit, processor, versions, validations on
part of `tune`, and the nats, tokens and bytes of each document of `tune` and `test`, in the files'
order; then the nats and bytes of those tokens that followed the same token before in the window,
which a model can copy. The factorial's runs have not the last two.

A part's runs are those of one state of the package. The factorial's is 4f9720c, with runs.py as it
was in cbdfcd6: `git worktree add ../mechanism 4f9720c`, and there runs.jsonl as it is now. That
of size and length is 2bd4a5f, with `joins = ()` in variants.py's layer, which samples there need;
that of hybrids is 65a3058.

B windows  T positions
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from mechanism import design  # noqa: E402

ROOT = HERE.parents[1]
FOLDER = ROOT / "runs/mechanism"
RESULTS = HERE.parent / "results/mechanism"
# Tokens of a document that are read, and of a batch.
LONGEST, BATCH = 8192, 4096


def kept(path: Path) -> list[dict]:
    """The runs that are kept, a dictionary each; a last line that was cut off is none."""
    found = []
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def keep(path: Path, rows: list[dict]) -> None:
    """Add runs to those that are kept, behind a last line that was cut off too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + "".join(json.dumps(row) + "\n" for row in rows))


def next_run(part: design.Part, runs: list[dict]) -> design.Planned | None:
    """The first planned run that is not kept."""
    have = {(r["variant"], r["rate"], r["seed"], r["steps"]) for r in runs}
    tuned = {
        (r["variant"], r["rate"], r["seed"]): design.bits_per_byte(r["documents"]["tune"])
        for r in runs
        if r["steps"] == part.rate_steps
    }
    plan = design.planned(part, tuned)
    wanted = (p for p in plan if (p.variant, p.rate, p.seed, p.steps) not in have)
    return next(wanted, None)


def train(part: design.Part, run: design.Planned, core: int, deadline: float) -> bool:
    """Train a run, or go on with it; False if the time ended first. Raises if it fails."""
    command = [
        sys.executable, "-m", "lrkv_jax.cli", "train", str(HERE / part.config),
        *(f"{name}={value}" for name, value in design.settings(part, run).items()),
        f"run_dir={folder_of(part, run)}",
    ]  # fmt: skip
    left = max(1, round(deadline - time.time()))
    command += ["--time-limit", f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02}"]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent)}
    log = Path(f"{folder_of(part, run)}.log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as out:
        code = subprocess.call(
            ["taskset", "-c", str(core), "nice", "-n", "5", *command],
            cwd=ROOT, env=environment, stdout=out, stderr=out,
        )  # fmt: skip
    if code == 75:
        return False
    if code:
        raise SystemExit(f"error: {run.name} failed with {code}: see {log}")
    return True


def folder_of(part: design.Part, run: design.Planned) -> Path:
    return FOLDER / "runs" / f"{Path(part.runs).stem}-{run.name}"


def losses_of_documents(text: Path, directory: Path, average: bool) -> dict[str, dict[str, list]]:
    """{split: {kind: [(nats, tokens, bytes, and those copied) of each document]}} of a run.

    A document is read from its beginning, in windows of the run's context that see nothing of one
    another; tokens that stand for no text count nowhere. `average` takes the mean of the parameters
    at the checkpoints of the run's last tenth.
    """
    import jax

    from lrkv_jax import load_run
    from lrkv_jax.training.loss import make_loss

    run = load_run(directory)
    params = run.params
    if average:
        steps = [int(path.name) for path in directory.glob("checkpoints/[0-9]*")]
        last = [load_run(directory, step=step).params for step in steps if step > 0.9 * run.step]
        params = jax.tree.map(lambda *leaves: sum(leaves) / len(leaves), *last)
    context = run.config.train.seq_len
    losses = jax.jit(make_loss(run.config.model, run.mesh, chunk=run.config.train.loss_chunk))
    bytes_V = run.tokenizer.token_bytes_up_to(run.config.model.vocabulary)
    found, rows_of_batch = {}, BATCH // context
    for split, path in (("tune", text / "corpus/z-tune.jsonl"), ("test", text / "test.jsonl")):
        windows, owners, rows = [], [], []
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            ids = np.asarray(run.ids(row["text"]), np.int32)[: LONGEST + 1]
            for start in range(0, len(ids) - 1, context):
                windows.append(ids[start : start + context + 1])
                owners.append(len(rows))
            rows.append([row["kind"], 0.0, 0, 0, 0.0, 0])
        for first in range(0, len(windows), rows_of_batch):
            some = windows[first : first + rows_of_batch]
            tokens_BU = np.zeros((rows_of_batch, context + 1), np.int32)
            there_BT = np.zeros((rows_of_batch, context), bool)
            again_BT = np.zeros_like(there_BT)
            for b, window in enumerate(some):
                T = len(window) - 1
                tokens_BU[b, : T + 1], there_BT[b, :T] = window, True
                again_BT[b, :T] = seen_before(window)
            with jax.set_mesh(run.mesh):
                nats_BT = np.asarray(losses(params, tokens_BU), np.float64)
            bytes_BT = bytes_V[tokens_BU[:, 1:]] * there_BT
            for b, owner in enumerate(owners[first : first + rows_of_batch]):
                row, text_T, again_T = rows[owner], bytes_BT[b] > 0, again_BT[b]
                row[1] += float((nats_BT[b] * text_T).sum())
                row[2] += int(text_T.sum())
                row[3] += int(bytes_BT[b].sum())
                row[4] += float((nats_BT[b] * text_T * again_T).sum())
                row[5] += int((bytes_BT[b] * again_T).sum())
        kinds = found[split] = {}
        for kind, nats, tokens, size, copied, copied_size in rows:
            values = (round(nats, 3), tokens, size, round(copied, 3), copied_size)
            kinds.setdefault(kind, []).append(values)
    return found


def seen_before(window_U: np.ndarray) -> np.ndarray:
    """Whether each token but the first followed the same token before in the window, [U − 1]."""
    pairs_T2 = np.stack([window_U[:-1], window_U[1:]], axis=1)
    _, first_P, pair_T = np.unique(pairs_T2, axis=0, return_index=True, return_inverse=True)
    return first_P[pair_T.ravel()] < np.arange(len(pairs_T2))


def record(part: design.Part, run: design.Planned, average: bool = False) -> dict:
    """What is kept of a run that has ended, or of the average of its last weights."""
    directory = folder_of(part, run)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    history = [json.loads(line) for line in (directory / "history.jsonl").read_text().splitlines()]
    starts = [row for row in history if row["event"] == "start"]
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    return {
        "variant": f"{run.variant}+average" if average else run.variant,
        "rate": run.rate, "seed": run.seed, "steps": run.steps, "commit": commit,
        "processors": sorted({row["device"] for row in starts}),
        "cores": sorted({row["cores"] for row in starts}),
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy", "optax")},
        "finished": time.strftime("%Y-%m-%d"),
        # The last row has the whole split's beside that of the batches that others have.
        "validation": [
            (row["step"], row.get("val_bpb_subset", row["validation_bpb"]))
            for row in rows
            if "validation_bpb" in row
        ],
        "documents": losses_of_documents(FOLDER / part.text, directory, average),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", nargs="?", choices=design.PARTS, default="factorial")
    parser.add_argument("--core", type=int, default=0, help="the core that trains")
    parser.add_argument("--hours", type=float, default=1000.0, help="stop and save after these")
    parser.add_argument(
        "--list", action="store_true", help="only say what is done and what is next"
    )
    parser.add_argument("--record", metavar="NAME", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    part = design.PARTS[chosen.part]
    if not (FOLDER / part.text / "tokenizer.json").exists():
        raise SystemExit(f"error: there is no {FOLDER / part.text}: {HERE / 'text.py'} makes it")
    if chosen.record:
        run = design.Planned(**json.loads(chosen.record))
        rows = [record(part, run)]
        if run.variant in part.averaged:
            rows.append(record(part, run, average=True))
        keep(RESULTS / part.runs, rows)
        return
    deadline = time.time() + 3600 * chosen.hours
    while run := next_run(part, runs := kept(RESULTS / part.runs)):
        print(f"{len(runs)} runs are kept; next is {run.name}", flush=True)
        if chosen.list or time.time() >= deadline:
            return
        if not train(part, run, chosen.core, deadline):
            return
        own = json.dumps(vars(run))
        subprocess.run(
            ["taskset", "-c", str(chosen.core), "nice", "-n", "5", sys.executable, __file__,
             chosen.part, "--record", own],
            check=True, env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        )  # fmt: skip
        shutil.rmtree(folder_of(part, run))
    print("all runs of the design are kept")


if __name__ == "__main__":
    main()
