"""The tables and the figure of `design.py`'s parts in docs/results.md, from the runs that are kept.

    python experiments/mechanism/pages.py [--docs docs] [--results experiments/results/mechanism]

A part is written when all of its runs are there. A contrast's interval takes its variance from all
variants; next to it stands that of its seeds alone, as variants' variances may differ. Numbers go
into contrasts.json too, with an interval over seeds and documents: what is added to the variance is
that of a sum over documents divided by their bytes (Cochran 1977, Sampling Techniques, chapter 6),
each kind by itself, as the kinds are three that were chosen.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from blocks import replace_between  # noqa: E402
from mechanism import design, runs  # noqa: E402

from lrkv_jax.files import write_json  # noqa: E402
from lrkv_jax.lab.report.comparison.contrasts import (  # noqa: E402
    Contrast,
    combined,
    contrasts,
    mean_and_sd,
)
from lrkv_jax.lab.report.figures import (  # noqa: E402
    Picture,
    draw_mean,
    legend_below,
    panels,
    style,
    write_picture,
)
from lrkv_jax.lab.report.styles import VariantStyle, variant_style  # noqa: E402
from lrkv_jax.lab.report.tabulated import tabulated  # noqa: E402

MEANING = {
    "mha": "MHA: keys and values of all heads are one matrix for Muon",
    "per_head": "a matrix for each head, W_h",
    "shared": "a matrix for each head and a shared path, W_s + W_h",
    "factored": "a product of two factors for each head, U_h B_h",
    "both": "such a product and a shared path, W_s + U_h B_h: LRKV of rank K",
    "doubled": "W_h, moved twice as far in a step",
    "lrkv_full": "LRKV of rank K / 4, whole keys rotated",
    "lrkv_latent": "LRKV of rank K / 4, latents rotated",
    "lrkv_none": "LRKV of rank K / 4, nothing rotated",
    "mla_full": "MLA, whole keys rotated",
    "mqa": "MQA: W_s alone",
}
# The figure's variants: names there, and how those look that the package's styles do not have.
SHOWN = {
    "shared": ("MHA per head, with a shared path", VariantStyle("#56B4E9", "-", "o")),
    "both": ("LRKV of rank K", VariantStyle("#E69F00", "-", "s")),
    "lrkv_full": ("LRKV of rank K / 4", variant_style("lrkv", "full")),
    "lrkv_latent": ("LRKV of rank K / 4, latents rotated", variant_style("lrkv", "latent")),
    "lrkv_none": ("LRKV of rank K / 4, nothing rotated", variant_style("lrkv", "none")),
    "mla_full": ("MLA, whole keys rotated", variant_style("mla", "full")),
    "mqa": ("MQA", variant_style("mqa")),
}


def values_of(
    part: design.Part, kept: list[dict], value: Callable[[dict], float]
) -> dict[str, dict[int, float]]:
    """{variant: {seed: value of its run}}."""
    found: dict[str, dict[int, float]] = {name: {} for name in part.names}
    for run in kept:
        found[run["variant"]][run["seed"]] = value(run)
    return found


def of_test(run: dict, kind: str | None = None) -> float:
    """Bits per byte of `test`, or of one of its kinds."""
    documents = run["documents"]["test"]
    return design.bits_per_byte(documents if kind is None else {kind: documents[kind]})


def of_what_cannot_be_copied(run: dict) -> float:
    """Bits per byte of those tokens of `test` that did not follow the same token before."""
    return design.bits_per_byte({
        kind: [(nats - copied, tokens, size - copied_size)
               for nats, tokens, size, copied, copied_size in documents]
        for kind, documents in run["documents"]["test"].items()
    })  # fmt: skip


def to_mha(values: Mapping[str, Mapping[int, float]]) -> dict[str, Contrast]:
    """Each other variant's difference to MHA."""
    found = contrasts(values, [(name, "mha") for name in values if name != "mha"])
    return {name: one for (name, _), one in found.items()}


def of_seeds_alone(values: Sequence[float]) -> Contrast:
    """The mean of one value a seed, with the error of these values alone."""
    mean, sd = mean_and_sd(values)
    return Contrast(mean, sd / math.sqrt(len(values)), len(values) - 1)


def error_over_documents(weights: Mapping[str, float], found: list[dict]) -> float:
    """Standard error of a contrast over the documents of `test`, at the seeds that were run."""
    variance = 0.0
    for kind in found[0]["documents"]["test"]:
        total_D, bytes_D = 0.0, None
        for name, weight in weights.items():
            of = [np.asarray(r["documents"]["test"][kind]) for r in found if r["variant"] == name]
            nats_D, _, bytes_D = np.mean(of, axis=0)[:, :3].T
            total_D = total_D + weight * nats_D / math.log(2)
        rest_D = total_D - total_D.sum() / bytes_D.sum() * bytes_D
        n = len(rest_D)
        variance += n / (n - 1) * (rest_D**2).sum() / bytes_D.sum() ** 2
    return math.sqrt(variance) / len(found[0]["documents"]["test"])


def losses(part: design.Part, kept: list[dict], short: list[dict]) -> str:
    """The table of variants: loss, and its difference to MHA's.

    Beside it the difference in the runs of a quarter of the steps that found the rates, at these;
    and in what cannot be copied, where the runs have that.
    """
    values, rates = values_of(part, kept, of_test), {r["variant"]: r["rate"] for r in kept}
    early = [run for run in short if run["rate"] == rates[run["variant"]]]
    tuned = values_of(part, early, lambda run: design.bits_per_byte(run["documents"]["tune"]))
    to_mha_in, rows = [to_mha(values), to_mha(tuned)], []
    heads = ["variant", "a head's keys and values", "rate", "bits/byte ↓", "to MHA",
             "to MHA in runs of a quarter"]  # fmt: skip
    first, *_ = kept[0]["documents"]["test"].values()
    if len(first[0]) == 5:
        to_mha_in.append(to_mha(values_of(part, kept, of_what_cannot_be_copied)))
        heads.append("to MHA in what cannot be copied")
    for name in part.names:
        mean, sd = mean_and_sd(values[name].values())
        attention, _, arm = name.partition("+")
        meaning = MEANING[attention] + (f", {design.ARMS[arm]}" if arm else "")
        row = [f"`{name}`", meaning, f"{rates[name]:g}", f"{mean:.4f} ± {sd:.4f}"]
        there = name != "mha"
        rows.append(row + [some[name].with_interval(4) if there else "" for some in to_mha_in])
    return tabulated(heads, rows, left=2)


def asked(part: design.Part, kept: list[dict]) -> tuple[str, dict]:
    """The table of the part's contrasts, and their numbers."""
    rows, numbers, values = [], {}, values_of(part, kept, of_test)
    for name, found in combined(values, part.contrasts).items():
        weights = part.contrasts[name]
        documents = error_over_documents(weights, kept)
        alone = of_seeds_alone([
            sum(weight * values[variant][seed] for variant, weight in weights.items())
            for seed in part.seeds
        ])  # fmt: skip
        both = replace(found, error=math.hypot(found.error, documents))
        margin = part.equal_within.get(name)
        equal = found.equal_within(margin) if margin else None
        row = [name, found.with_interval(4), "{:+.4f} to {:+.4f}".format(*alone.interval)]
        equality = [f"{margin}: p = {equal:.2g}" if margin else ""] if part.equal_within else []
        rows.append((*row, found.in_words, *equality))
        numbers[name] = {
            "weights": weights, "difference": found.difference,
            "error_over_seeds": found.error, "error_over_documents": documents,
            "degrees": found.degrees, "p_holm": found.p,
            "interval_over_seeds": found.interval, "interval_over_both": both.interval,
            "interval_of_seeds_alone": alone.interval,
            "equal_within": margin, "p_equal": equal,
        }  # fmt: skip
    heads = ("contrast", "difference, bits/byte", "its seeds alone", "verdict", "equal within")
    return tabulated(heads[: len(rows[0])], rows, left=1), numbers


def by_copying(part: design.Part, kept: list[dict], counted: dict) -> str:
    """The table of differences to MHA by the share of a document's bytes that could be copied.

    A document's difference is its kind's plus a slope times the share, by least squares weighted by
    bytes, for each seed; intervals are of 95 %, over seeds. `counted` is a run whose lines have the
    bytes that could be copied; the design names none of this.
    """
    documents = counted["documents"]["test"]
    lines_D5 = np.concatenate([np.asarray(rows) for rows in documents.values()])
    bytes_D, share_D = lines_D5[:, 2], lines_D5[:, 4] / lines_D5[:, 2]
    kinds_DK = np.repeat(np.eye(len(documents)), [len(rows) for rows in documents.values()], axis=0)
    design_DX = np.column_stack([kinds_DK, share_D]) * np.sqrt(bytes_D)[:, None]

    def bits_per_byte(run: dict) -> np.ndarray:
        rows = [np.asarray(run["documents"]["test"][kind]) for kind in documents]
        return np.concatenate([of[:, 0] / of[:, 2] for of in rows]) / math.log(2)

    values, rows = values_of(part, kept, bits_per_byte), []
    for name in part.variants[1:]:
        found = []
        for seed, own_D in values[name].items():
            over_D = (own_D - values["mha"][seed]) * np.sqrt(bytes_D)
            *of_kinds, slope = np.linalg.lstsq(design_DX, over_D, rcond=None)[0]
            found.append((np.mean(of_kinds), slope / 10))
        cells = (of_seeds_alone(some).with_interval(4) for some in zip(*found, strict=True))
        rows.append((f"`{name}`", *cells))
    heads = ("variant", "to MHA where nothing can be copied", "for each tenth that can be")
    return tabulated(heads, rows, left=1)


def costs(report: dict) -> str:
    """The table of what `costs.py` found: bytes of a bfloat16 cache, and a step's milliseconds."""
    rows = []
    for name, row in report["variants"].items():
        held = [f"{nbytes / 2**20:.2f}" for nbytes in row["bytes"].values()]
        first, median, third = row["ms"]
        rows.append((f"`{name}`", *held, f"{median:.2f} ({first:.2f}–{third:.2f})"))
    lengths = [f"MiB of {int(length):,} tokens" for length in row["bytes"]]
    heads = ("layers that see everything", *lengths, f"ms a token behind {report['length']:,}")
    place = f"{report['device']}, {report['cores']} cores, {report['date'][:10]}"
    return f"{place}\n\n{tabulated(heads, rows, left=1)}"


def picture(part: design.Part, kept: list[dict]) -> Picture:
    """Differences to MHA while training, with one standard deviation, and of each kind at its end.

    Those while training are of part of `tune`, those at the end of `test`, with 95 % intervals.
    """
    shown = {name: SHOWN[name] for name in SHOWN if name in part.variants}
    curves = values_of(part, kept, lambda run: np.array(run["validation"]).T)
    with style():
        figure, ((during, ended),) = panels(1, 2, panel=(4.6, 3.2))
        for name, (label, look) in shown.items():
            seeds = curves[name].keys() & curves["mha"].keys()
            steps = curves[name][min(seeds)][0]
            draw_mean(
                during, steps * 2048 / 1e6,
                [curves[name][seed][1] - curves["mha"][seed][1] for seed in seeds],
                color=look.color, linestyle=look.line, label=label,
            )  # fmt: skip
        during.set(title="while training", xlabel="million tokens", ylabel="bits/byte above MHA")
        kinds = list(kept[0]["documents"]["test"])
        for i, kind in enumerate(kinds):
            found = to_mha(values_of(part, kept, lambda run, kind=kind: of_test(run, kind)))
            for j, (name, (_, look)) in enumerate(shown.items()):
                one, place = found[name], i + 0.13 * (j - (len(shown) - 1) / 2)
                half = (one.interval[1] - one.interval[0]) / 2
                ended.errorbar(place, one.difference, half, color=look.color, marker=look.marker)
        ended.set_xticks(range(len(kinds)), kinds)
        ended.set_title("at the end, by kind of text")
        for axis in (during, ended):
            axis.axhline(0, color="black", linewidth=0.8)
        legend_below(figure, columns=3)
    return Picture("", figure)


def write(docs: Path, results: Path) -> None:
    """Write what is complete into results.md, the figure and contrasts.json into the results."""
    numbers = {}
    for name, part in design.PARTS.items():
        every = runs.kept(results / part.runs)
        kept, short = ([r for r in every if r["steps"] == n] for n in (part.steps, part.rate_steps))
        if len(kept) < len(part.names) * len(part.seeds):
            continue
        replace_between(docs / "results.md", name, losses(part, kept, short))
        text, contrasts_of = asked(part, kept)
        replace_between(docs / "results.md", f"{name} contrasts", text)
        rates = {run["variant"]: run["rate"] for run in kept}
        values = values_of(part, kept, of_test)
        numbers[name] = {"values": values, "rates": rates, "contrasts": contrasts_of}
        if not part.averaged:  # controls are no ways to make keys
            _, svg = write_picture(picture(part, kept), results, name)
            svg.unlink()  # the page shows the other
        counted = runs.kept(results / design.LENGTH.runs)
        if name == "factorial" and counted:  # the same text
            replace_between(docs / "results.md", "copying", by_copying(part, kept, counted[0]))
        if name == "hybrids":
            report = json.loads((results / "hybrids_costs.json").read_text("utf-8"))
            replace_between(docs / "results.md", "hybrids costs", costs(report))
    write_json(results / "contrasts.json", numbers)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results/mechanism")
    arguments = parser.parse_args()
    write(arguments.docs, arguments.results)
