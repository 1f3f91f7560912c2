"""Table 10, memory and latency: `python experiments/table10_memory_latency.py --out DIR`.

Bytes and FLOPs are counted from the configurations. Times are only ever measured: they are read
from decode benchmarks, `--bench FILE.json...`, as `lrkv bench decode --out` writes them, unless
given from those in `experiments/results/`; `--measure` takes a small one on this machine, about a
minute. What was measured nowhere is a labelled gap. Takes no runs.
"""

import argparse
import json
from functools import partial
from pathlib import Path

from lrkv_jax.accounting import cache_allocated_bytes_per_token
from lrkv_jax.accounting.serving import attention_flops
from lrkv_jax.artefacts import Artefact, Cell, Column, Row, Table, command, printed_table
from lrkv_jax.artefacts.decode_times import line, times
from lrkv_jax.artefacts.printed import verdict
from lrkv_jax.config import ModelConfig, load_config

SCALES = ("128m", "1.2b", "2.5b", "6.3b")
LENGTH = 2048
LINES = (
    ("mha", None), ("mqa", None), ("gqa", None), ("mla", None), ("lrkv", "full"),
    ("lrkv", "shared"),
)  # fmt: skip
RESULTS = Path(__file__).parent / "results"


def make(runs, reports=None):
    """Costs, and the times of each benchmark report; `runs` have no part in them."""
    reports = default_reports() if reports is None else reports
    return [costs(), *times(reports, LINES)]


def costs() -> Table:
    """Cache and attention FLOPs of one decoded token, over all layers."""
    columns = [
        Column("variant"), Column("cache a token", "KiB", digits=1),
        Column("fixed", "MFLOP", digits=2, group="attention:"),
        Column("each cached token", "kFLOP", digits=1, group="attention:"),
        Column(f"at {LENGTH:,}", "MFLOP", digits=1, group="attention:"),
        Column("over MHA", "×", digits=2, group="attention:"),
        Column("more than MHA", "MFLOP", digits=1, group="attention:"),
        Column("extra cost", group="paper:"), Column("or", "M", digits=2, group="paper:"),
        Column("grows with T", group="paper:"),
    ]  # fmt: skip
    rows = []
    for scale in SCALES:
        mha = attention_flops(load_config(scale, ["attention=mha"]).model).at(LENGTH)
        for variant, rope in LINES:
            override = [f"attention.rope={rope}"] if rope else []
            model = load_config(scale, [f"attention={variant}", *override]).model
            flops = attention_flops(model)
            paper = printed_table("table10")[variant]
            rows.append(
                Row.of(
                    line(variant, rope),
                    cache_allocated_bytes_per_token(model) / 1024,
                    flops.fixed / 1e6, flops.per_cached_token / 1e3, flops.at(LENGTH) / 1e6,
                    flops.at(LENGTH) / mha, (flops.at(LENGTH) - mha) / 1e6,
                    paper["extra"], extra_as_printed(model) / 1e6,
                    Cell(paper["dependence"], note=verdict("table10", variant)),
                    block=f"{scale}, {model.layers} layers",
                )
            )  # fmt: skip
    return Table(
        "Cache and attention of one decoded token", columns, rows,
        caption="All layers; the cache bfloat16, as allocated; two FLOPs a multiplication. MLA is "
        "absorbed. LRKV reads its factors, with the whole key rotated (full) or its shared part. "
        "The paper's extra cost is in numbers with a constant of one, over all layers.",
    )  # fmt: skip


def extra_as_printed(model: ModelConfig) -> int:
    """The paper's extra cost of a step without its O: T·C·K for MLA, H·R·K for LRKV."""
    entry = model.attention
    per_layer = {
        "mla": lambda: LENGTH * entry.latent * model.head_width,
        "lrkv": lambda: model.heads * entry.rank * model.head_width,
    }.get(entry.kind, lambda: 0)
    return model.layers * per_layer()


def default_reports() -> list[dict]:
    """The decode benchmarks that are kept with the experiments."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("decode_*.json"))]


def measure() -> dict:
    """A decode benchmark of a minute on this machine: one layer's attention at the 128M shape."""
    from lrkv_jax.bench.decode import Settings, run
    from lrkv_jax.bench.report import as_json

    settings = Settings(
        batches=(1,), lengths=(512, 2048), implementations=("xla", "mosaic"), samples=7
    )
    return as_json(run(settings))


def artefact(reports: list[dict] | None = None) -> Artefact:
    """The table over these benchmark reports; those kept with the experiments unless given."""
    title = "Memory and latency of decoding"
    return Artefact("table10_memory_latency", title, "Table 10", partial(make, reports=reports))


ARTEFACT = artefact()


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--bench", type=Path, nargs="+")
    parser.add_argument("--measure", action="store_true")
    given, rest = parser.parse_known_args()
    if {"-h", "--help"} & set(rest):
        print(__doc__)
    reports = None
    if given.bench or given.measure:
        reports = [json.loads(path.read_text()) for path in given.bench or ()]
        reports += [measure()] if given.measure else []
    command(artefact(reports), rest)


if __name__ == "__main__":
    main()
