"""Table 1: held-out cross-entropy and bits per byte of every variant, with what its cache holds.

python experiments/table01_pretraining.py RUN... --out DIR
"""

from lrkv_jax.artefacts import (
    SCALES,
    Artefact,
    Cell,
    Column,
    Row,
    Table,
    command,
    name_of,
    no_run,
    paper_scale,
    printed,
)  # fmt: skip
from lrkv_jax.comparison import KINDS, against, settings

COLUMNS = [
    Column("variant"),
    Column("cached values", "% of MHA", digits=1),
    Column("live cache", "bytes/token", digits=0),
    Column("CE", "nats/token", "lower", 4),
    Column("BPB", "bits/byte", "lower", 4),
    Column("BPB over MHA's", "bits/byte", digits=4),
    Column("difference"),
]


def make(runs):
    rows = [row for setting in settings(runs) for row in block(setting)]
    return [
        Table(
            "Pretraining", COLUMNS, rows or [Row.of(*[no_run("any scale")] * len(COLUMNS))],
            notes=[
                "Mean ± standard deviation over seeds, on the whole held-out split. Difference: "
                "paired t-test against MHA over seeds, p adjusted by Holm for the four variants; "
                "none where p ≥ 0.05. Live cache: summed from the buffers of the evaluated run.",
            ],
        ),
        as_printed(runs),
    ]  # fmt: skip


def block(setting):
    of = {kind: setting.main(kind) for kind in KINDS}
    done = {kind: {s: r for s, r in of[kind].items() if r.finished} for kind in KINDS}
    bpb = {kind: {s: r.bits_per_byte for s, r in done[kind].items()} for kind in KINDS}
    tests = against(bpb["mha"], {kind: bpb[kind] for kind in KINDS if kind != "mha"})
    for kind in KINDS:
        if not done[kind]:
            gap = no_run(f"{setting.name} {kind}")
            yield Row.of(name_of(kind), gap, gap, gap, gap, gap, gap, block=setting.name)
            continue
        one = next(iter(done[kind].values()))
        scale = paper_scale(one)
        beside = {w: scale and printed("table01", w, scale, kind) for w in ("cache", "ce", "bpb")}
        test = tests.get(kind)
        yield Row.of(
            name_of(kind) if one.size is None else f"{name_of(kind)}-{one.size}",
            Cell(100 * one.cache_fraction, printed=beside["cache"]),
            one.cache_bytes_measured or Cell(gap=f"not evaluated: {setting.name} {kind}"),
            Cell.over({s: r.cross_entropy for s, r in done[kind].items()}, printed=beside["ce"]),
            Cell.over(bpb[kind], printed=beside["bpb"]),
            "" if test is None or test.difference is None else f"{test.difference:+.4f}",
            "" if test is None else test.in_words,
            block=setting.name,
        )


def as_printed(runs):
    """The paper's own rows, where no run repeats them; a gap says so."""
    repeated = {(paper_scale(run), run.kind) for run in runs if run.finished}
    columns = [Column("variant"), Column("cache", "% of MHA"), Column("CE"), Column("BPB")]
    rows = []
    for scale in SCALES:
        for kind in KINDS:
            values = [printed("table01", what, scale, kind) for what in ("cache", "ce", "bpb")]
            if values[0] and (scale, kind) not in repeated:
                cells = [Cell(value.text, note=value.verdict) for value in values]
                rows.append(Row.of(name_of(kind), *cells, block=f"{SCALES[scale]}, as printed"))
    return Table("The paper's values, printed", columns, rows, name="printed")


ARTEFACT = Artefact("table01_pretraining", "Pretraining across scales", "Table 1", make)

if __name__ == "__main__":
    command(ARTEFACT)
