"""The table of docs/serving.md, from what `lrkv bench serve --out experiments/results` wrote.

python experiments/serving_page.py [--docs docs] [--results experiments/results]
"""

import argparse
import json
from pathlib import Path

HERE = Path(__file__).parent


def write(docs: Path, results: Path) -> None:
    """Write the page's block from results/serve_cpu.json."""
    from lrkv_jax.bench.files import replace_between

    report = json.loads((results / "serve_cpu.json").read_text(encoding="utf-8"))
    lines = [
        "| ratio | variant | measured (range) | asked | at best |",
        "| :-- | :-- | --: | --: | --: |",
    ]
    for row in report["rows"]:
        bound = "" if row["bound"] is None else f"{row['bound']:.2f}"
        reached = "" if row["reached"] else " ✗"
        measured = f"{row['ratio']:.2f}{reached} ({row['least']:.2f} to {row['most']:.2f})"
        cells = row["what"], row["variant"], measured, row["reach"], bound
        lines.append(f"| {' | '.join(cells)} |")
    settings, day = report["settings"], report["date"][:10]
    where = (
        f"{report['device']}, {report['cores']} cores, {day}, jax {report['versions']['jax']}: "
        f"`{settings['scale']}` with random weights, {settings['dtype']}, {settings['requests']} "
        f"requests of log-normal lengths, {settings['samples']} samples; ✗: not what was asked."
    )
    replace_between(docs / "serving.md", "serving", "\n".join([*lines, "", where]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    write(arguments.docs, arguments.results)
