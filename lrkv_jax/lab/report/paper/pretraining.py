"""Held-out loss over scales, ranks and contexts: Tables 1, 8 and 9, Figures 2 to 5."""

import textwrap

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from lrkv_jax.lab.report.artefact import artefact
from lrkv_jax.lab.report.comparison import (
    Contrast,
    RunRecord,
    Setting,
    against,
    finished,
    settings,
    sooner_over_seeds,
)
from lrkv_jax.lab.report.comparison.sooner import SoonerOverSeeds
from lrkv_jax.lab.report.figure import Picture, legend_below, panels
from lrkv_jax.lab.report.looks import GREY, ladder, look, look_of, name_of
from lrkv_jax.lab.report.losses import (
    CACHE_LABEL,
    CACHE_NOTE,
    COLUMNS,
    NOTE,
    CurveLine,
    against_cache,
    curves,
    curves_by_kind,
    looks_beside,
    loss_rows,
)
from lrkv_jax.lab.report.printed import KINDS, SCALES, Printed, paper_scale, printed, printed_table
from lrkv_jax.lab.report.table import Column, Table, paper_table

PRINTED = ("cache", "ce", "bpb")
PRINTED_COLUMNS = [Column("variant"), Column("cache", "% of MHA"), Column("CE"), Column("BPB")]


@artefact("Table 1", "Pretraining across scales")
def table01_pretraining(runs):
    """Held-out cross-entropy and bits per byte of every variant, with what its cache holds.

    A block for each scale among the runs. The paper's value stands beside ours where a run repeats
    its setting, and in a table of its own elsewhere.
    """
    rows = []
    for setting in settings(runs):
        lines = {label if runs else name_of(label): runs for label, runs in setting.beside.items()}
        if any(lines.values()):  # an ablation alone is table 8's
            rows += loss_rows(setting.name, lines, beside=_pretraining_beside)
    missing = [] if rows else ["no run: any scale"]
    return [
        Table("Pretraining", COLUMNS, rows, [NOTE], missing=missing),
        _pretraining_as_printed(runs),
    ]


def _pretraining_beside(run, what):
    scale = paper_scale(run)
    return scale and printed("table01", what, scale, run.kind)


def _pretraining_as_printed(runs):
    """The paper's own rows, where no run repeats them."""
    repeated = {(paper_scale(run), run.kind) for run in runs if run.finished}
    rows = []
    for scale in SCALES:
        for kind in KINDS:
            values = [printed("table01", what, scale, kind) for what in PRINTED]
            if values[0] and (scale, kind) not in repeated:
                block = f"{SCALES[scale]}: paper, printed; not among these runs"
                rows.append((block, name_of(kind), values))
    return paper_table(PRINTED_COLUMNS, rows)


SIZED = ("lrkv", "mla")


@artefact("Table 8", "Ablation of rank and latent")
def table08_rank_ablation(runs):
    """Held-out loss by LRKV's rank and by MLA's latent width, beside the baselines.

    It shows every size of LRKV and MLA among runs that may be compared; an ablation's runs
    (nano_ranks) and the baselines of the scale that it extends (nano) come together.
    """
    rows = []
    for setting in settings(runs):
        lines = {label: setting.seeds(label) for label in setting.labels}
        sizes = {run.label for run in setting.runs if run.kind in SIZED}
        if len(sizes) > 2:  # more than each kind's own
            baselines = {"MHA": setting.main("mha")}  # a gap where it has no run
            rows += loss_rows(setting.name, baselines | lines, beside=_ranks_beside)
    missing = [] if rows else ["no run: a ladder of ranks or latents"]
    return [
        Table("Rank and latent width", COLUMNS, rows, [NOTE], missing=missing),
        _ranks_as_printed(),
    ]


def _ranks_beside(run, what):
    if paper_scale(run, any_size=run.kind in SIZED) != "128m":
        return None
    name = f"{run.kind}_{run.size}" if run.kind in SIZED else run.kind
    return printed("table08", name, what)


def _ranks_as_printed():
    rows = []
    for name in printed_table("table08"):
        values = [printed("table08", name, what) for what in PRINTED]
        rows.append(("128M: paper, printed", name.upper().replace("_", "-"), values))
    return paper_table(PRINTED_COLUMNS, rows)


LONG = 8192


@artefact("Table 9", "Long context")
def table09_long_context(runs):
    """Held-out loss of models trained at a long context, of 8,192 tokens or more."""
    rows = []
    for setting in settings([run for run in runs if run.config.train.context >= LONG]):
        lines = {label if runs else name_of(label): runs for label, runs in setting.beside.items()}
        rows += loss_rows(setting.name, lines, beside=_long_beside)
    missing = [] if rows else ["no run: a context of 8,192 or more, as 512m_8k"]
    return [Table("Long context", COLUMNS, rows, [NOTE], missing=missing), _long_as_printed()]


def _long_beside(run, what):
    return printed("table09", run.kind, what) if paper_scale(run) == "512m_8k" else None


def _long_as_printed():
    rows = []
    for kind in KINDS:
        values = [printed("table09", kind, what) for what in PRINTED]
        over = printed("table09", kind, "loss_over_mha") or Printed(None, "baseline")
        rows.append(("512M, 8,192 tokens: paper, printed", name_of(kind), [*values, over]))
    return paper_table([*PRINTED_COLUMNS, Column("CE over MHA's", "%")], rows)


CURVES = "Held-out loss during pretraining"


@artefact("Figure 2", CURVES)
def fig02_loss_curves(runs):
    """Held-out cross-entropy against training tokens, and against training FLOPs.

    A column for each scale; lines are means over seeds, bands one standard deviation. The upper
    axis shows MHA's FLOPs: a token of another variant costs up to some per cent more or less.
    """
    return curves_by_kind(CURVES, settings(runs), "any scale")


CONTEXT = 8192
LONG_CURVES = "Held-out loss at a context of 8,192"


@artefact("Figure 4", LONG_CURVES)
def fig04_long_context_curves(runs):
    """Held-out cross-entropy during pretraining at a context of 8,192 tokens.

    Of the runs it is given, it draws those of that context as Figure 2 draws all.
    """
    long = settings([run for run in runs if run.config.train.context == CONTEXT])
    return curves_by_kind(LONG_CURVES, long, f"a context of {CONTEXT:,}")


HATCH = "////"  # of bars in FLOPs
TITLE_WIDTH = 34  # characters of a line over a panel, or beside its bars
CAPTION = (
    "Share of the baseline's training not needed; means over seeds, whiskers one standard "
    "deviation, dots seeds. Pale bars: the final losses themselves, on the whole held-out "
    "split, are not significantly different (seeds as blocks, p adjusted by Holm for the "
    "baselines, p ≥ 0.05). A curve's first touch of a loss can only be early: this share is 0 or "
    "more even between equal variants, so it is not tested itself. Learning rates are as the "
    "schedule has them at that step, not decayed to its end. The paper prints {} % of steps at "
    "2.5B."
)


@artefact("Figure 3", "Training efficiency")
def fig03_training_efficiency(runs):
    """Loss against cache, and how much sooner LRKV reaches each baseline's final loss.

    (a) Bits per byte against the share of MHA's cache. (b) 1 − step*/step_final for each baseline,
    in steps and in training FLOPs as they are executed: step* is where LRKV's curve of the same
    seed first comes down to the baseline's last validation, linear between validations.
    """
    shown = [setting for setting in settings(runs) if any(run.finished for run in setting.runs)]
    titles = ("Bits per byte against cache", "How much sooner LRKV reaches a baseline's final loss")
    if not shown:
        gaps = ["no finished run: any scale"]
        return [Picture(title, None, gaps=gaps, name="b"[:at]) for at, title in enumerate(titles)]
    return [_trade_off(shown, titles[0]), _efficiency(shown, titles[1])]


def _trade_off(shown, title):
    figure, axes = panels(1, len(shown))
    gaps = []
    for axis, (name, lines) in zip(axes[0], looks_beside(shown).items(), strict=True):
        axis.set_title(name)
        axis.set_xlabel(CACHE_LABEL)
        axis.set_ylabel("held-out bits/byte")
        for label, own_look, by_seed in lines:
            if runs := finished(by_seed):
                against_cache(axis, own_look, [runs], "bits_per_byte")
            else:
                gaps.append(f"no finished run: {name} {label}")
        axis.set_xlim(left=0)
    legend_below(figure)
    return Picture(title, figure, CACHE_NOTE, gaps=gaps)


def _efficiency(shown, title):
    gaps = [f"no finished run: {one.name} lrkv" for one in shown if not _lrkv(one)]
    shown = [one for one in shown if _lrkv(one)]
    if not shown:
        return Picture(title, None, gaps=gaps, name="b")
    figure, axes = panels(1, len(shown), panel=(5.2, 3.4))
    for axis, setting in zip(axes[0], shown, strict=True):
        gaps += _sooner_bars(axis, setting)
    figure.legend(
        handles=[
            Patch(facecolor=GREY, edgecolor=GREY, label="in steps"),
            Patch(facecolor="white", edgecolor=GREY, hatch=HATCH, label="in FLOPs"),
        ],
        loc="outside lower center", ncols=2,
    )  # fmt: skip
    paper = printed("fig03", "sooner", "text")
    return Picture(title, figure, CAPTION.format(paper.text), gaps=gaps, name="b")


def _lrkv(setting: Setting) -> dict[int, RunRecord]:
    """The finished runs by seed of the LRKV that stands for a setting; {} without one.

    That is its main line. Of several lines of which none is, it is the one with the most finished
    runs, the published form before others.
    """
    if main := finished(setting.main("lrkv")):
        return main
    lines = [finished(runs) for runs in setting.beside.values()]
    own = [runs for runs in lines if runs and next(iter(runs.values())).kind == "lrkv"]
    return max(own, key=lambda runs: (len(runs), not _form(runs)), default={})


def _form(runs: dict[int, RunRecord]) -> str:
    return next(iter(runs.values())).config.model.attention.form


def _sooner_bars(axis: Axes, setting: Setting) -> list[str]:
    """Draw two bars for each baseline, in steps and hatched in FLOPs; returns what is missing.

    A pale bar's final losses do not differ significantly (`CAPTION`).
    """
    kinds = setting.kinds
    baselines = [kind for kind in kinds if kind != "lrkv"]
    done = {kind: finished(setting.main(kind)) for kind in baselines} | {"lrkv": _lrkv(setting)}
    name = f"{setting.name}, {next(iter(done['lrkv'].values())).label}"
    axis.set_title(textwrap.fill(name, TITLE_WIDTH))
    losses = {kind: {s: run.cross_entropy for s, run in done[kind].items()} for kind in done}
    tests = against(losses["lrkv"], {kind: losses[kind] for kind in baselines if losses[kind]})
    curves = {kind: {s: run.curve for s, run in done[kind].items() if run.curve} for kind in done}
    ends, gaps = [0.0], []
    for place, kind in enumerate(baselines):
        if done[kind]:
            over = sooner_over_seeds(curves["lrkv"], curves[kind])
            colour = look_of(next(iter(done[kind].values()))).colour
            ends += _bars(axis, place, colour, over, pale=not tests[kind].differs)
            words = _in_words(over, tests[kind])
        else:
            gaps.append(f"no finished run: {setting.name} {kind}")
            words = textwrap.fill(gaps[-1], TITLE_WIDTH)
        axis.text(1.02, place, words, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.axvline(0, color="black", lw=0.8)
    width = max(max(ends) - min(ends), 1.0)
    axis.set_xlim(min(ends) - 0.03 * width, max(ends) + 0.05 * width)
    axis.set_xlabel("sooner by, % of the baseline's training")
    axis.set_yticks(range(len(baselines)), [name_of(kind) for kind in baselines])
    axis.set_ylim(len(baselines) - 0.5, -0.5)
    axis.grid(axis="y", visible=False)
    return gaps


def _bars(axis: Axes, place: int, colour: str, over: SoonerOverSeeds, *, pale: bool) -> list[float]:
    """Draw them where every seed got there; returns the values that the axis has to hold."""
    if over.steps is None:
        return []
    ends = []
    for what, shift, hatch in (("steps", -0.18, ""), ("flops", 0.18, HATCH)):
        share = getattr(over, what)
        each = [100 * getattr(one, what) for one in over.each.values()]
        axis.barh(
            place + shift, 100 * share.mean, 0.34, color="white" if hatch else colour,
            edgecolor=colour, hatch=hatch, alpha=0.35 if pale else 1.0,
            xerr=None if share.sd is None else 100 * share.sd, capsize=3,
        )  # fmt: skip
        if len(each) > 1:
            axis.plot(each, [place + shift] * len(each), "o", ms=3, mfc="white", mec="black")
        ends += [*each, 100 * (share.mean - (share.sd or 0)), 100 * (share.mean + (share.sd or 0))]
    return ends


def _in_words(over: SoonerOverSeeds, test: Contrast) -> str:
    """Return what stands beside a baseline's bars."""
    if not over.each:
        return "no seed in common"
    missed, seeds = len(over.each) - over.reached, len(over.each)
    if missed:
        words = "never" if missed == seeds else f"never in {missed} of {seeds} seeds"
    else:
        words = f"{100 * over.steps.mean:.1f} % of steps\n{100 * over.flops.mean:.1f} % of FLOPs"
    if test.p is None:
        return f"{words}\n{test.verdict}"
    return words if test.differs else f"{words}\nno significant difference (p = {test.p:.2g})"


ABLATED = ("mla", "lrkv")  # by latent and by rank
GAP = "two ranks or two latents of any scale"


@artefact("Figure 5", "Ablation of rank and latent")
def fig05_rank_ablation(runs):
    """What LRKV's rank and MLA's latent buy.

    (a) Held-out cross-entropy against the cache, for every rank, latent and baseline of a scale;
    (b) LRKV's curves by rank. Scales with two ranks or two latents are shown.
    """
    shown = [one for one in settings(runs) if any(len(_sizes(one, kind)) > 1 for kind in ABLATED)]
    return [_losses(shown), _by_rank(shown)]


def _sizes(setting, kind):
    """A kind's runs by size and then seed; of LRKV, those with its keys rotated in full."""
    runs = [run for run in setting.runs if run.kind == kind and look_of(run) == look(kind)]
    return {size: {run.seed: run for run in runs if run.size == size}
            for size in sorted({run.size for run in runs}, key=lambda size: size or 0)}  # fmt: skip


def _losses(shown):
    title = "Loss against cache, by rank and latent"
    if not shown:
        return Picture(title, None, gaps=[f"no run: {GAP}"])
    figure, axes = panels(1, len(shown), panel=(5.0, 3.6))
    gaps = []
    for axis, setting in zip(axes[0], shown, strict=True):
        axis.set_title(f"{setting.name}; numbers: MLA's latent, LRKV's rank")
        axis.set_xlabel(CACHE_LABEL)
        axis.set_ylabel("held-out cross-entropy, nats/token")
        for kind in setting.kinds:
            done = {}
            for size, runs in _sizes(setting, kind).items():
                done[size] = finished(runs)
                if not done[size]:
                    gaps.append(f"not finished: {setting.name} {kind} {size}")
                    del done[size]
            if not done:
                gaps.append(f"no finished run: {setting.name} {kind}")
                continue
            marks = [str(size) for size in done] if kind in ABLATED else ()
            against_cache(
                axis, look(kind), list(done.values()), "cross_entropy",
                marks=marks, above=kind == "mla",
            )  # fmt: skip
        axis.set_xlim(0, 1.05 * axis.get_xlim()[1])
    legend_below(figure)
    return Picture(title, figure, CACHE_NOTE, gaps=gaps)


def _by_rank(shown):
    columns = {}
    for setting in shown:
        ranks = _sizes(setting, "lrkv")
        if len(ranks) < 2:
            continue
        lines = {"mha": CurveLine(look("mha"), setting.main("mha"), f"{setting.name} mha")}
        for rank, one in ladder("lrkv", list(ranks)).items():
            lines[f"lrkv {rank}"] = CurveLine(one, ranks[rank], f"{setting.name} lrkv {rank}")
        columns[setting.name] = lines
    return curves("Loss by rank", columns, baseline="mha", gap="two ranks of any scale", name="b")
