"""Items of the report, what their tables and pictures hold, and analyzed runs of known heads."""

from support.written_analyses import write_analysis
from support.written_runs import write_run

from lrkv_jax.lab.report.paper import REPORT_ITEMS

H = 6
HEADS = (
    "model.layers=5", "model.unroll=1", f"model.heads={H}", "model.width=48", "model.head_width=8",
    "variants.gqa.kv_heads=2", "variants.lrkv.rank=4", "variants.lrkv_latent.rank=4",
)  # fmt: skip


def report_item(name):
    (found,) = (one for one in REPORT_ITEMS if one.name.startswith(name))
    return found


def cells(table, name, block=None):
    """A row's cells, by (group, column), or by column where it has no group."""
    (row,) = (r for r in table.rows if r.cells[0].value == name and block in (None, r.block))
    return {
        (column.group, column.name) if column.group else column.name: cell
        for column, cell in zip(table.columns, row.cells, strict=True)
    }


def analyzed(folder, kind, cosines, *, seed=0, norm=2.0, ranks=(), weighted=None, **written):
    """A finished run of six heads whose cosines at each layer are `cosines(layer)`."""
    run = write_run(
        folder / f"{kind}{written.get('rank') or ''}-{seed}",
        f"attention={kind}",
        f"train.seed={seed}", *HEADS, steps=20, **written,
    )  # fmt: skip
    write_analysis(run, cosines, norm=norm, ranks=ranks, weighted=weighted)
    return run
