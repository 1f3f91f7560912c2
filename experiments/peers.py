"""This package beside what else people would use, on this machine's cores, in one run.

    python experiments/peers.py --torch PYTHON --nanodo FOLDER \
        --folder SMOLLM2 --run RUN --transformers PYTHON --llama PYTHON --vllm PYTHON

Each peer is a process of `experiments/peers`, in the interpreter that its option names; peers
whose options are left out are left out. They compute in turn, so that a round's ratio is of
neighbours; measure on an idle machine.

Training: the quickstart's model, and one of 256 x 6 layers, as MHA, LRKV `full` and `latent`, next
to the same function in PyTorch, eager and by `torch.compile`, each with the C library's allocator
as it starts and told to keep what is freed; and nanodo's model next to MHA. PyTorch must take the
same first steps. LRKV's steps are timed next to MHA's of this package, too. The matrix products of
our step, without the rest of it, are the bound, as they are of decoding.

Decoding: a folder of transformers' Llama class (`experiments/smollm2_folder.py` makes one), and
runs of this package, which the others decode from their exports, LRKV's as factors; in float32
and greedily, one request and eight. Every peer must give the same first tokens.

Without --out the tables also go to docs/performance.md.
"""

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from blocks import replace_between

from lrkv_jax import files
from lrkv_jax.config import load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop.export import export
from lrkv_jax.lab.bench.clock import quartiles
from lrkv_jax.lab.bench.report import machine
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.models.transformer import init_parameters
from lrkv_jax.training.run_dir import read_run

HERE = Path(__file__).parent
PEERS, RESULTS, PAGE = HERE / "peers", HERE / "results", HERE.parent / "docs/performance.md"
CORES = len(os.sched_getaffinity(0))
PAUSE = 0.5  # seconds: threads of OpenMP spin for 0.2 after their last work
# glibc's, read when a process starts: what `lrkv_jax.distributed.start` tells it in ours.
KEEPS = {
    "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 32),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
}  # fmt: skip
VARIANTS = {"mha": (), "lrkv": ("attention.rope=full",), "lrkv_latent": ()}
SHAPES = {
    "quickstart": (),
    "256 x 6": ("model.width=256", "model.head_width=64", "model.layers=6", "model.unroll=6"),
}
ALONE = "products alone"
# Float32 sums of other orders differ by 1e-6 or so; another optimizer's by far more.
SAME = {"loss": 1e-4, "grad_norm": 1e-3}
OURS, OUR_MHA, OUR_TRAINER = "lrkv_jax", "lrkv_jax, mha", (sys.executable, "ours_train.py")


class Peer:
    """A process that answers a line of JSON with one; the first makes it."""

    def __init__(self, python, script, *arguments, keeps=False, **order):
        self.name, self.said = script, tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [python, PEERS / script, *arguments], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.said,
            env={**os.environ, **(KEEPS if keeps else {})},
        )  # fmt: skip
        self.version = self.ask(threads=CORES, **order)["version"]

    def ask(self, **order):
        """The answer; raises LrkvError, with what the process said last, where there is none."""
        time.sleep(PAUSE)
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            self.process.wait()
            self.said.seek(0)
            last = self.said.read().strip().splitlines() or ["it said nothing"]
            raise LrkvError(f"{self.name} stopped: {last[-1]}")
        return json.loads(answer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.said.close()


def spread(values):
    """Median, and the quartiles around it."""
    first, median, third = quartiles(values)
    return [median, first, third]


def rows_of(places, peers, rates):
    """A row for each peer: its rates of each kind, and ours over it, of each round."""
    return [
        places
        | {"peer": name, "version": peers[name].version}
        | {kind: spread(found) for kind, found in rates[name].items()}
        | {
            f"ours over it, {kind}": spread(list(np.divide(rates[OURS][kind], found)))
            for kind, found in rates[name].items()
        }
        for name in peers
    ]


def training(options):
    """Rows of each shape and variant."""
    for shape, changes in SHAPES.items():
        for variant in VARIANTS:
            if options.only in (None, f"{shape}/{variant}"):
                yield from trained(options, shape, variant, changes)


def trained(options, shape, variant, changes):
    """The rows of a variant at a shape: every peer's, timed in turn."""
    print(f"training {shape}, {variant}", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        order, tokens = ordered(options, variant, changes, folder)
        peers, first = {}, {}
        for name, arguments, how in training_peers(options, variant):
            made = ordered(options, "mha", changes, folder)[0] if name == OUR_MHA else order
            peers[name] = stack.enter_context(Peer(*arguments, **how, **made))
            first[name] = peers[name].ask(steps=4)
            if name.startswith("torch"):
                same_steps(name, first[name], first[OURS])
        rates = {name: {"tokens/s": []} for name in peers}
        for number in range(options.rounds + 1):
            for name, peer in peers.items():
                seconds = peer.ask(steps=options.burst)["seconds"]
                if number:  # the first round has no clock
                    rates[name]["tokens/s"].append(tokens * options.burst / seconds)
        return rows_of({"part": "training", "of": f"{shape}, {variant}"}, peers, rates)


def ordered(options, variant, changes, folder):
    """What a trainer of this variant is asked to make, and the tokens of its step."""
    changes = [
        f"attention={variant}", *VARIANTS[variant], "optimizer.schedule=constant", "mesh.fsdp=1",
        *changes, *options.changes,
    ]  # fmt: skip
    config = load_config("quickstart", changes)
    model, rule = config.model, config.optimizer
    shape_NBU = (4, config.train.global_batch_size, config.train.seq_len + 1)
    tokens_NBU = np.random.default_rng(0).integers(0, model.vocabulary, shape_NBU, np.int32)
    names = {"parameters": f"{folder}/{variant}.npz", "tokens": f"{folder}/{variant}.npy"}
    np.savez(names["parameters"], **parameters(config))
    np.save(names["tokens"], tokens_NBU)
    order = {
        "config": "quickstart", "changes": changes,
        "model": model.model_dump(mode="json")
        | {"feed_forward": model.feed_forward_width, "length": config.train.seq_len},
        "optimizer": rule.model_dump(mode="json")
        | {"momentum": rule.muon.momentum, "iterations": rule.muon.iterations},
    }  # fmt: skip
    return order | names, tokens_NBU[0, :, 1:].size


def training_peers(options, variant):
    """(name, what to start, how) of each peer."""
    yield OURS, OUR_TRAINER, {}
    if variant != "mha":  # right behind ours, which it may differ little from
        yield OUR_MHA, OUR_TRAINER, {}
    yield ALONE, (sys.executable, "ours_products.py"), {}
    if options.torch:
        for what in ("eager", "compiled"):
            for keeps in (False, True):
                name = f"torch {what}{', memory kept' if keeps else ''}"
                how = {"keeps": keeps, "compile": what == "compiled"}
                yield name, (options.torch, "torch_train.py"), how
    if options.nanodo and variant == "mha":
        yield "nanodo", (sys.executable, "nanodo_train.py", options.nanodo), {}


def parameters(config):
    """Parameters by name, N(0, 1/fan-in) where they start at zero: output projections, head."""
    rng, found = np.random.default_rng(1), {}
    for path, leaf in jax.tree.leaves_with_path(init_parameters(config.model, 0)):
        name, value = jax.tree_util.keystr(path, simple=True, separator="."), np.asarray(leaf)
        if not value.any():
            inputs = np.prod(value.shape[1 if name.startswith("blocks") else 0 : -1])
            value = rng.standard_normal(value.shape, np.float32) / np.float32(inputs**0.5)
        found[name] = value
    return found


def same_steps(name, theirs, ours):
    """Raise LrkvError unless both took the same first steps."""
    for what, most in SAME.items():
        a, b = (np.atleast_1d(each[what]) for each in (theirs, ours))
        worst = np.max(np.abs(a - b) / np.abs(b))
        if not worst < most:
            raise LrkvError(f"{name}: {what} differs by {worst:.1e}: it is another model")


def decoding(options):
    """Rows of each model, of one request and of eight."""
    with tempfile.TemporaryDirectory() as made:
        models = [(folder, {}) for folder in options.folder]
        for run in options.run:
            folder, kind = Path(made) / run.name, read_run(run).model.attention.kind
            export(run, folder, form="factored" if kind == "lrkv" else None)
            models.append((folder, {"run": str(run)}))
        for folder, order in models:
            for requests in (1, 8):
                yield from answered(options, folder, requests, order)


def answered(options, folder, requests, order):
    """The rows of a model and a number of requests: every peer's, timed in turn."""
    print(f"decoding {folder.name}, {requests} at once", file=sys.stderr)
    config = json.loads((folder / "config.json").read_text())
    # Some peers stop at the context that a model names.
    prompt = min(options.prompt, config["max_position_embeddings"] - options.new)
    order = order | {"folder": str(folder), "requests": requests, "length": prompt + options.new}
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        peers = {
            name: stack.enter_context(Peer(python, script, **how, **order))
            for name, python, script, how in decoding_peers(options, config)
        }
        rates = {name: {"prompt tokens/s": [], "new tokens/s": []} for name in peers}
        for number in range(options.rounds + 1):
            prompts = rng.integers(config["vocab_size"], size=(2, requests, prompt)).tolist()
            tokens = {name: decoded(options, *prompts, peers[name], rates[name]) for name in peers}
            if not number:
                same_tokens(tokens)
                rates = {name: {kind: [] for kind in rates[name]} for name in peers}
    of = f"{folder.name}, {requests} request{'s' * (requests > 1)}"
    return rows_of({"part": "decoding", "of": of}, peers, rates)


def decoding_peers(options, config):
    """(name, interpreter, script, how) of each that knows the model's class."""
    yield OURS, sys.executable, "ours_decode.py", {}
    yield ALONE, sys.executable, "ours_decode_products.py", {}
    # The class that an export brings along takes a DynamicCache alone.
    caches = ("dynamic",) if "auto_map" in config else ("dynamic", "static")
    for cache in caches if options.transformers else ():
        script, how = "transformers_decode.py", {"cache": cache}
        yield f"transformers, {cache}", options.transformers, script, how
    if config["architectures"] == ["LlamaForCausalLM"]:
        yield "plain JAX", sys.executable, "plain_decode.py", {}
        if options.llama:
            yield "llama", options.llama, "llama_decode.py", {}
    if options.vllm:
        yield "vllm", options.vllm, "vllm_decode.py", {}


def decoded(options, short, long, peer, rates):
    """One token after some prompts, then many after others, which no peer has read: the many."""
    first = peer.ask(prompts=short, new=1)["seconds"]
    more = peer.ask(prompts=long, new=options.new)
    rates["prompt tokens/s"].append(len(short) * len(short[0]) / first)
    rates["new tokens/s"].append(len(long) * (options.new - 1) / (more["seconds"] - first))
    return more["tokens"]


def same_tokens(tokens):
    """Raise LrkvError unless each peer's texts begin as ours: later, a rounding may decide."""
    for name, texts in tokens.items():
        if name == ALONE:
            continue
        for text, ours in zip(texts, tokens[OURS], strict=True):
            if text[:4] != ours[:4]:
                raise LrkvError(f"{name} goes on with {text[:4]}, {OURS} with {ours[:4]}")


def tables(report):
    """A text for each part: where and when, and a table of medians with quartiles."""
    found = {}
    for part in dict.fromkeys(row["part"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["part"] == part]
        kinds = [kind for kind in rows[0] if "tokens/s" in kind]
        cells = [
            # What is measured stands in the first of its rows, which is no ratio.
            [row["of"] if row["peer"] == OURS else "", row["peer"]]
            + ["" if "ours" in k and row["peer"] == OURS else ranged(row[k]) for k in kinds]
            for row in rows
        ]
        versions = ", ".join(dict.fromkeys(row["version"] for row in rows))
        place = f"{report['device']}, {report['cores']} cores, {report['date'][:10]}; {versions}"
        found[part] = f"{place}\n\n{tabulated([part, 'peer', *kinds], cells, left=2)}"
    return found


def ranged(found):
    median, low, high = (f"{value:,.{0 if found[0] >= 100 else 2}f}" for value in found)
    return f"{median} ({low}–{high})"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", help="of training, as in model.layers=2")
    parser.add_argument("--torch", metavar="PYTHON", help="with torch and numpy")
    parser.add_argument("--nanodo", metavar="FOLDER", help="a clone of google-deepmind/nanodo")
    trained = [f"{shape}/{variant}" for shape in SHAPES for variant in VARIANTS]
    parser.add_argument("--only", choices=[*trained, "none"], help="of training")
    several = {"type": Path, "action": "append", "default": []}
    parser.add_argument("--folder", **several, help="a model to decode; may come again")
    parser.add_argument("--run", **several, help="of this package, to decode; may come again")
    parser.add_argument("--transformers", metavar="PYTHON", help="with torch and transformers")
    parser.add_argument("--llama", metavar="PYTHON", help="with llama-cpp-python and gguf")
    parser.add_argument("--vllm", metavar="PYTHON", help="with vllm for a CPU")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=64, help="tokens after a prompt")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--burst", type=int, default=2, help="steps of training in a burst")
    parser.add_argument("--out", type=Path, help="a folder for peers_cpu.json")
    options = parser.parse_args()
    rows = [*training(options), *decoding(options)]
    report = {"benchmark": "peers", **machine(), "rows": rows}
    # Where the interpreters lie on this machine says nothing.
    report["command"] = re.sub(r"(?<=[ =])/\S*/", "", report["command"])
    out = options.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "peers_cpu.json", report)
    for part, text in tables(report).items():
        print(f"{text}\n")
        if options.out is None:
            replace_between(PAGE, f"measured: {part}", text)


if __name__ == "__main__":
    try:
        main()
    except LrkvError as error:
        sys.exit(f"peers: {error}")
