"""Held-out loss over scales, ranks and contexts as tables: Tables 1, 8 and 9."""

from collections.abc import Mapping, Sequence

from lrkv_jax.lab.report.comparison.contrasts import against
from lrkv_jax.lab.report.comparison.runs import RunRecord, Setting, finished, settings
from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.paper_values import beside
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow, table_of_paper
from lrkv_jax.models.accounting.counts import cache_fraction

COLUMNS = [
    Column("variant"),
    Column("cached values", "% of MHA", digits=1),
    Column("live cache", "bytes/token", digits=0),
    Column("CE", "nats/token", "lower", 4),
    Column("BPB", "bits/byte", "lower", 4),
    Column("BPB over baseline", "bits/byte"),
    Column("difference from baseline"),
    Column("training", "tokens/s", digits=0),
]
NOTE = (
    "Mean ± standard deviation over seeds, on the whole held-out split, at the end of training. "
    "Difference from MHA, or else the first: one model of the block (variant and seed), with its "
    "95 % interval; p adjusted by Holm for the number of variants. Where it is not found "
    "(p ≥ 0.05), the smallest difference that such runs would find four times in five stands "
    "beside it. Live cache: summed from the buffers of the evaluated run, in the dtype that a "
    "footnote names."
)
PRINTED = {"cache": Column("cache", "% of MHA"), "ce": Column("CE"), "bpb": Column("BPB")}
SIZED = ("lrkv", "mla")
LONG = 8192


def loss_rows(
    block: str, variants: Mapping[str, Mapping[int, RunRecord]], paper: str = ""
) -> list[TableRow]:
    """A row of `COLUMNS` for each label's finished runs by seed, next to a table of the paper's."""
    done = {label: found for label, runs in variants.items() if (found := finished(runs))}
    bits = {
        label: {seed: run.bits_per_byte for seed, run in runs.items()}
        for label, runs in done.items()
    }
    base = "MHA" if "MHA" in done else next(iter(done), "")
    tests = against(bits.get(base, {}), {label: bits[label] for label in done if label != base})
    rows = []
    for label, runs in done.items():
        one, test = next(iter(runs.values())), tests.get(label)
        losses = {seed: run.cross_entropy for seed, run in runs.items()}
        speeds = {seed: run.tokens_per_second for seed, run in runs.items()}
        rows.append(
            TableRow.of(
                label,
                Cell(100 * cache_fraction(one.config.model), paper=beside(paper, one, "cache")),
                _live_cache(one),
                Cell.over(losses, paper=beside(paper, one, "ce")),
                Cell.over(bits[label], paper=beside(paper, one, "bpb")),
                test.with_interval(4) if test else "",
                test.in_words if test else "",
                Cell.over(speeds),
                block=block,
            )
        )
    return rows


def _live_cache(run: RunRecord) -> Cell:
    """The measured bytes of a token in the evaluated run's cache, with its dtype as a footnote."""
    found = run.final_evaluation
    if not found:
        return Cell()
    dtype = found.get("kv_cache_dtype") or found.get("dtype", "")
    return Cell(found["kv_cache_bytes_per_token"], note=dtype and f"A cache in {dtype}.")


@report_item("Table 1", "Pretraining across scales")
def table01_pretraining(runs):
    """Held-out loss of every variant, with what its cache holds and the paper's value."""
    rows = [
        row
        for setting in settings(runs)
        for row in loss_rows(setting.name, setting.beside, "table01")
    ]
    return _with_the_paper_s("Pretraining", rows, "table01")


def _with_the_paper_s(title: str, rows: list[TableRow], paper: str, **more: Column) -> list[Table]:
    ours = [Table(title, COLUMNS, rows, [NOTE]).with_data()] if rows else []
    return [*ours, table_of_paper(paper, PRINTED | more)]


@report_item("Table 8", "Ablation of rank and latent")
def table08_rank_ablation(runs):
    """Held-out loss of every size of LRKV and MLA, next to the baselines."""
    rows = []
    for setting in settings(runs):
        sizes = {run.label for run in setting.runs if run.kind in SIZED}
        if len(sizes) > 2:  # more than one of each kind
            every = {label: setting.seeds(label) for label in setting.labels}
            rows += loss_rows(setting.name, every, "table08")
    return _with_the_paper_s("Rank and latent width", rows, "table08")


def at_long_context(runs: Sequence[RunRecord]) -> list[Setting]:
    """The settings of runs that were trained at a context of 8,192 tokens or more."""
    return settings([run for run in runs if run.config.train.seq_len >= LONG])


@report_item("Table 9", "Long context")
def table09_long_context(runs):
    """Held-out loss of models trained at a long context, of 8,192 tokens or more."""
    rows = [
        row
        for setting in at_long_context(runs)
        for row in loss_rows(setting.name, setting.beside, "table09")
    ]
    over = Column("CE over MHA's", "%")
    return _with_the_paper_s("Long context", rows, "table09", loss_over_mha=over)
