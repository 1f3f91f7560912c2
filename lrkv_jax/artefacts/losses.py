"""Rows of held-out losses: what tables 1, 8 and 9 have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lrkv_jax.artefacts.printed import Printed
from lrkv_jax.artefacts.table import Cell, Column, Row, no_run
from lrkv_jax.comparison import RunRecord, against, finished

COLUMNS = [
    Column("variant"),
    Column("cached values", "% of MHA", digits=1),
    Column("live cache", "bytes/token", digits=0),
    Column("CE", "nats/token", "lower", 4),
    Column("BPB", "bits/byte", "lower", 4),
    Column("BPB over MHA's", "bits/byte", digits=4),
    Column("told apart from MHA"),
]
NOTE = (
    "Mean ± standard deviation over seeds, on the whole held-out split, at the end of training. "
    "Told apart: paired t-test over the seeds that both have, p adjusted by Holm for the number of "
    "variants in the block; none where p ≥ 0.05. Live cache: summed from the buffers of the "
    "evaluated run, in its own dtype."
)

# (run, "cache" | "ce" | "bpb") → the printed value of the same setting, if it is one.
Beside = Callable[[RunRecord, str], Printed | None]


def loss_rows(
    block: str,
    lines: Mapping[str, Mapping[int, RunRecord]],
    *,
    baseline: str = "MHA",
    beside: Beside = lambda run, what: None,
) -> list[Row]:
    """A row of `COLUMNS` for each line: a name, and its runs by seed.

    A line without runs is a labelled gap, as is one whose runs have not finished. Lines are
    compared with the one named `baseline`, where there is one.
    """
    done = {name: finished(runs) for name, runs in lines.items()}
    bpb = {name: {s: run.bits_per_byte for s, run in runs.items()} for name, runs in done.items()}
    rivals = {name: values for name, values in bpb.items() if name != baseline and values}
    tests = against(bpb.get(baseline, {}), rivals)
    rows = []
    for name, runs in done.items():
        if not runs:
            what = f"{block} {name}"
            gap = Cell(gap=f"not finished: {what}") if lines[name] else no_run(what)
            rows.append(Row.of(name, *[gap] * (len(COLUMNS) - 1), block=block))
            continue
        one, test = next(iter(runs.values())), tests.get(name)
        losses = {seed: run.cross_entropy for seed, run in runs.items()}
        told = "" if test is None else test.in_words
        if test is None and name != baseline:
            told = "no MHA beside it"
        rows.append(
            Row.of(
                name,
                Cell(100 * one.cache_fraction, printed=beside(one, "cache")),
                one.cache_bytes_measured or Cell(gap=f"not evaluated: {block} {name}"),
                Cell.over(losses, printed=beside(one, "ce")),
                Cell.over(bpb[name], printed=beside(one, "bpb")),
                f"{test.difference:+.4f}" if test and test.difference is not None else "",
                told,
                block=block,
            )
        )
    return rows
