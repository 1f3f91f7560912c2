"""The mechanism's tables in docs/results.md, from the runs that are kept.

    python experiments/mechanism/pages.py [--docs docs] [--results experiments/results/mechanism]

Losses and contrasts are of `design.py`, on the documents of `test`. Beside the interval over seeds
stands one over seeds and documents: what is added to the variance is that of a sum over documents
divided by their bytes (Cochran 1977, Sampling Techniques, chapter 6), each kind by itself, as the
kinds are three that were chosen. Numbers go into contrasts.json too.
"""

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from mechanism import design, runs  # noqa: E402

from lrkv_jax.files import write_json  # noqa: E402
from lrkv_jax.lab.bench.report import replace_between  # noqa: E402
from lrkv_jax.lab.report.comparison.contrasts import combined, contrasts, spread  # noqa: E402
from lrkv_jax.lab.report.tabulated import tabulated  # noqa: E402

MEANING = {
    "mha": "MHA: keys and values of all heads are one matrix for Muon",
    "per_head": "a matrix for each head, W_h",
    "shared": "a shared path beside it, W_s + W_h",
    "factored": "a product of two factors for each head, U_h B_h",
    "both": "both, W_s + U_h B_h: LRKV of rank K",
    "doubled": "W_h, moved twice as far in a step",
    "lrkv_full": "LRKV of rank K / 4, whole keys rotated",
    "lrkv_latent": "LRKV of rank K / 4, latents rotated",
    "mqa": "MQA: W_s alone",
}


def error_over_documents(weights: Mapping[str, float], found: list[dict]) -> float:
    """Standard error of a contrast over the documents of `test`, at the seeds that were run."""
    variance = 0.0
    for kind in found[0]["documents"]["test"]:
        total_D, bytes_D = 0.0, None
        for name, weight in weights.items():
            of = [np.asarray(r["documents"]["test"][kind]) for r in found if r["variant"] == name]
            nats_D, _, bytes_D = np.mean(of, axis=0).T
            total_D = total_D + weight * nats_D / math.log(2)
        rest_D = total_D - total_D.sum() / bytes_D.sum() * bytes_D
        n = len(rest_D)
        variance += n / (n - 1) * (rest_D**2).sum() / bytes_D.sum() ** 2
    return math.sqrt(variance) / len(found[0]["documents"]["test"])


def write(docs: Path, results: Path) -> None:
    """Write both tables into results.md, and contrasts.json into the results."""
    part = design.FACTORIAL
    kept = [r for r in runs.kept(results / part.runs) if r["steps"] == part.steps]
    values: dict[str, dict[int, float]] = {name: {} for name in part.variants}
    for run in kept:
        values[run["variant"]][run["seed"]] = design.bits_per_byte(run["documents"]["test"])
    rates = {run["variant"]: run["rate"] for run in kept}
    over_mha = contrasts(values, [(name, "mha") for name in part.variants[1:]])
    rows = []
    for name in part.variants:
        own, found = spread(list(values[name].values())), over_mha.get((name, "mha"))
        rows.append((
            f"`{name}`", MEANING[name], f"{rates[name]:g}", f"{own.n}",
            f"{own.mean:.4f} ± {own.sd:.4f}", found.with_interval(4) if found else "",
        ))  # fmt: skip
    heads = ("variant", "a head's keys and values", "rate", "seeds", "bits/byte ↓", "to MHA")
    replace_between(docs / "results.md", "mechanism", tabulated(heads, rows, left=2))

    heads = ("contrast", "difference, bits/byte", "over documents too", "verdict", "equal within")
    rows, numbers = [], {}
    for name, found in combined(values, part.contrasts).items():
        documents = error_over_documents(part.contrasts[name], kept)
        both = replace(found, error=math.hypot(found.error, documents))
        margin = part.equal_within.get(name)
        equal = found.equal_within(margin) if margin else None
        rows.append((
            name, found.with_interval(4), "{:+.4f} to {:+.4f}".format(*both.interval),
            found.in_words, f"{margin}: p = {equal:.2g}" if margin else "",
        ))  # fmt: skip
        numbers[name] = {
            "weights": part.contrasts[name], "difference": found.difference,
            "error_over_seeds": found.error, "error_over_documents": documents,
            "degrees": found.degrees, "p_holm": found.p,
            "interval_over_seeds": found.interval, "interval_over_both": both.interval,
            "equal_within": margin, "p_equal": equal,
        }  # fmt: skip
    replace_between(docs / "results.md", "mechanism contrasts", tabulated(heads, rows, left=1))
    write_json(results / "contrasts.json", {"values": values, "rates": rates, "contrasts": numbers})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=HERE.parents[1] / "docs")
    parser.add_argument("--results", type=Path, default=HERE.parent / "results/mechanism")
    arguments = parser.parse_args()
    write(arguments.docs, arguments.results)
