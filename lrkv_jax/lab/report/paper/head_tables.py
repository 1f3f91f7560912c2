"""Tables of analyzed heads: Table 3, ranks on text, and what the paper only describes.

Each value is a mean over layers ± the standard deviation over seeds, unless its heading differs.
"""

from collections.abc import Sequence

from lrkv_jax.lab.report.analyzed import (
    FAMILIES,
    FORMS,
    VIEWS,
    AnalyzedSetting,
    AnalyzedVariant,
    analyzed_settings,
)
from lrkv_jax.lab.report.comparison.contrasts import against
from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.paper_values import beside, paper_value
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow, table_of_paper

RANKS = [
    Column("variant"),
    Column("count", group="uncentered"),
    Column("% of heads", group="uncentered", digits=1),
    Column("null", "% of heads", group="uncentered", digits=1),
    Column("count", group="centered (PCA)"),
    Column("% of heads", group="centered (PCA)", digits=1),
    Column("% of cap", group="centered (PCA)", digits=1),
    Column("null", "% of cap", group="centered (PCA)", digits=1),
    Column("components for 90 %", group="centered (PCA)", digits=1),
]
RANKS_NOTE = (
    "Mean over layers ± standard deviation over seeds. Null: random weights. Cap: centering "
    "leaves H − 1 dimensions, which takes 100 / H points of heads from any model. Components: the "
    "fewest that hold 90 % of the centered variance."
)
PRINTED_RANKS = {
    "uncentred": Column("uncentered", "% of heads"),
    "centred": Column("centered (PCA)", "% of heads"),
}


def _table(title: str, columns: list[Column], rows: Sequence[TableRow], note: str, name: str = ""):
    """The table in a list, or none without rows."""
    return [Table(title, columns, list(rows), [note], name=name)] if rows else []


@report_item("Table 3", "Effective rank of heads", reads="analyses")
def table03_effective_rank(runs):
    """Effective rank of heads, uncentered and centered, and of random weights."""
    found = analyzed_settings(runs)
    tables = []
    for form, title in FORMS.items():
        rows = [_rank_row(one, form, setting) for setting in found for one in setting.every]
        name = "" if form == "query_key" else form
        tables += _table(f"Effective rank of heads, {title}", RANKS, rows, RANKS_NOTE, name)
    return [*tables, table_of_paper("table03", PRINTED_RANKS)]


def _rank_row(variant: AnalyzedVariant, form: str, setting: AnalyzedSetting) -> TableRow:
    null, run = variant.first[form]["null"]["mean"], variant.runs[min(variant.runs)]

    def cell(view: str, what: str) -> Cell:
        printed = form == "query_key" and what == "percent_of_heads"  # the paper has no other
        paper = beside("table03", run, view) if printed else None
        return variant.cell(lambda a: a[form]["mean"][view][what], paper=paper)

    return TableRow.of(
        variant.label,
        cell("uncentred", "effective_rank"),
        cell("uncentred", "percent_of_heads"),
        null["uncentred"]["percent_of_heads"],
        cell("centred", "effective_rank"),
        cell("centred", "percent_of_heads"),
        cell("centred", "percent_of_cap"),
        null["centred"]["percent_of_cap"],
        cell("centred", "components_90"),
        block=_block(setting.name, setting.heads),
    )


def _block(name: str, heads: int) -> str:
    return f"{name}, {heads} heads, cap {100 * (heads - 1) / heads:.1f} %"


WEIGHTED = "Effective rank of heads, weighted by held-out text"
WEIGHTED_COLUMNS = [
    Column("variant"),
    *(
        Column(name, digits=1, group=group)
        for group in ("uncentered, % of H", "centered, % of H − 1")
        for name in ("plain", "weighted", "random weights, weighted")
    ),
    Column("mean cosine of two heads, weighted"),
]
WEIGHTED_NOTE = (
    "Means over layers ± standard deviation over seeds. Weighted: by the second moment of the "
    "layer's inputs on held-out text; random weights meet the same inputs, and their ± is that of "
    "a mean over as many layers."
)


@report_item("Beside the paper", WEIGHTED, reads="analyses")  # fmt: skip
def weighted_ranks(runs):
    """Effective ranks of heads as text meets them; needs `lrkv analyze RUN... --batches 4`."""
    rows = [
        _weighted_row(variant, form, f"{setting.name}, {title}")
        for setting in analyzed_settings(runs)
        for form, title in FORMS.items()
        for variant in setting.every
        if all(variant.each(lambda a: a.get("weighted")).values())
    ]
    return _table(WEIGHTED, WEIGHTED_COLUMNS, rows, WEIGHTED_NOTE)


def _weighted_row(variant: AnalyzedVariant, form: str, block: str) -> TableRow:
    null = variant.first["weighted"][form]["null"]
    cells: list[Cell | str | None] = []
    for view in VIEWS:
        mean, sd = (null[what][view]["percent_of_cap"] for what in ("mean", "sd_of_mean"))
        spread = "" if sd is None else f" ± {sd:.1f}"
        cells += [
            variant.cell(lambda a, v=view: a[form]["mean"][v]["percent_of_cap"]),
            variant.cell(lambda a, v=view: a["weighted"][form]["mean"][v]["percent_of_cap"]),
            None if mean is None else f"{mean:.1f}{spread}",
        ]
    cosines = variant.cell(lambda a: a["weighted"][form]["mean"]["mean_off_diagonal"])
    return TableRow.of(variant.label, *cells, cosines, block=block)


GAP = "Mean similarity of heads, less MHA's"
GAP_COLUMNS = [
    Column("variant"),
    Column("mean cosine", digits=4),
    Column("less MHA's"),
    Column("difference from MHA"),
]


@report_item("Described, not shown", GAP, reads="analyses")
def similarity_gap(runs):
    """Mean cosine of query–key forms, each variant less MHA, tested over seeds."""
    note = (
        "Mean off-diagonal cosine of query–key forms, mean over layers. Difference: seeds as "
        "blocks, p adjusted by Holm. The paper says, without showing it, that LRKV is within "
        f"{paper_value('heads', 'similarity_gap').text} of MHA in all layers."
    )
    rows = [row for setting in analyzed_settings(runs) for row in _gap_rows(setting)]
    return _table(GAP, GAP_COLUMNS, rows, note, "table")


def _gap_rows(setting: AnalyzedSetting):
    if setting.heads == 1:
        return  # it has no other to be like
    means = {
        one.label: one.each(lambda a: a["query_key"]["mean"]["mean_off_diagonal"])
        for one in setting.every
    }
    others = {label: seeds for label, seeds in means.items() if label != "MHA"}
    tests = against(means["MHA"], others) if "MHA" in means else {}
    for label, seeds in means.items():
        test = tests.get(label)
        words = (test.with_interval(4), test.in_words) if test else ("", "")
        yield TableRow.of(label, Cell.over(seeds), *words, block=setting.name)


OVERLAP = "Shared part against residuals"
OVERLAP_COLUMNS = [
    Column("variant"),
    Column("of"),
    Column("mean", group="cosine"),
    Column("lowest layer", group="cosine"),
    Column("highest layer", group="cosine"),
    Column("random, sd", group="cosine"),
    Column("the paper's", group="cosine"),
    Column("measured", group="mean squared cosine of angles"),
    Column("random", group="mean squared cosine of angles"),
]
OVERLAP_NOTE = (
    "Cosine of W_shared and U_h B_hᵀ, mean over heads and layers; angles between the columns of "
    "U_h and of W_shared. The paper does not say whether its cosines are of keys or of values."
)


@report_item("Described, not shown", OVERLAP, reads="analyses")
def overlap(runs):
    """Cosines and principal angles of LRKV's residuals and shared part, next to random ones."""
    rows = [
        _overlap_row(variant, family, setting.name)
        for setting in analyzed_settings(runs)
        for variant in setting.of("lrkv")
        if variant.first["geometry"]
        for family in FAMILIES
    ]
    return _table(OVERLAP, OVERLAP_COLUMNS, rows, OVERLAP_NOTE, "table")


def _overlap_row(variant: AnalyzedVariant, family: str, block: str) -> TableRow:
    null = variant.first["geometry"]["mean"][family]
    by_layer = variant.mean(
        lambda a: [layer[family]["mean_cosine"] for layer in a["geometry"]["per_layer"]]
    )
    return TableRow.of(
        variant.label, FAMILIES[family],
        variant.cell(lambda a: a["geometry"]["mean"][family]["mean_cosine"]),
        float(by_layer.min()), float(by_layer.max()), null["cosine_null_sd"],
        paper_value("heads", "cosine").text,
        variant.cell(lambda a: a["geometry"]["mean"][family]["mean_square"]),
        null["mean_square_null"], block=block,
    )  # fmt: skip


FIT = "Heads as a shared matrix and residuals"
ERRORS = {"error": "of the weights", "form_error": "of the forms"}
BEST = {"svd": "SVD", "mean_svd": "mean + SVD", "alternating": "alternating"}
FIT_COLUMNS = [
    Column("heads of"),
    Column("matrices"),
    Column("rank R"),
    *(
        Column(name, "%", digits=1, group=f"error {of}")
        for of in ERRORS.values()
        for name in BEST.values()
    ),
    Column("random", "%", digits=1, group="alternating, of a random layer's weights"),
]
FIT_NOTE = (
    "Relative Frobenius errors over a layer's heads. SVD: each W_h alone at rank R. Mean + SVD "
    "and alternating: one shared matrix and rank-R residuals. An error no lower than a random "
    "layer's is no sign that heads share anything."
)


@report_item("Described, not shown", FIT, reads="analyses")
def factorisation(runs):
    """The errors of shared matrices and residuals that are fitted to MHA's heads and LRKV's."""
    rows = [
        _fit_row(variant, family, rank, setting.name)
        for setting in analyzed_settings(runs)
        for variant in setting.of("mha", "lrkv")
        for family in FAMILIES
        for rank in _ranks(variant)
    ]
    return _table(FIT, FIT_COLUMNS, rows, FIT_NOTE, "table")


def _ranks(variant: AnalyzedVariant) -> list[int]:
    """The ranks that each seed was fitted at."""
    of_seeds = variant.each(lambda a: {fit["rank"] for fit in a["factorisation"]}).values()
    return sorted(set.intersection(*of_seeds))


def _fit_row(variant: AnalyzedVariant, family: str, rank: int, block: str) -> TableRow:
    def percent(analysis, of: str, name: str, error: str) -> float:
        fit = next(one for one in analysis["factorisation"] if one["rank"] == rank)
        return 100 * fit[of][family][name][error]

    errors = [
        variant.cell(lambda a, n=name, e=error: percent(a, "mean", n, e))
        for error in ERRORS
        for name in BEST
    ]
    random = variant.mean(lambda a: percent(a, "null", "alternating", "error"))
    return TableRow.of(variant.label, FAMILIES[family], rank, *errors, float(random), block=block)
