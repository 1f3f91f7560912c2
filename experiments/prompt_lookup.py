"""What looking drafts up in the text gains with a trained model: the block of docs/serving.md.

python experiments/prompt_lookup.py RUN [--tokens N] [--texts N] [--batch N...] [--samples N]
    [--docs docs] [--results experiments/results]

Beginnings of held-out texts are continued by an engine that looks drafts up and by one that does
not, in turns, one at a time and eight. Greedily a small model soon repeats itself; drawn at
temperature 0.8 it hardly ever does. Writes lookup_cpu.json.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

HERE = Path(__file__).parent
DRAFTS, PROMPT = 7, 48


def measure(
    directory: str, tokens: int, texts: int, batches: list[int], samples: int
) -> list[dict]:
    """Rows of one kind of text and one number of rows: seconds of both engines, and counts."""
    from lrkv_jax.data.loader import heldout_batches
    from lrkv_jax.decode import Engine, Sampling
    from lrkv_jax.run.restore import load_run

    run = load_run(directory)
    (rows_BU,) = heldout_batches(run.config.data, run.config.train.context, texts, some=1)
    prompts = rows_BU[:, :PROMPT].tolist()
    kinds = {"greedy": Sampling(), "temperature 0.8": Sampling(0.8)}
    rows = []
    for batch in batches:
        engines = {
            drafts: Engine(
                run.config.model, run.params, batch=batch, length=PROMPT + tokens, drafts=drafts
            )
            for drafts in (0, DRAFTS)
        }
        for kind, sampling in kinds.items():
            seconds = {drafts: [] for drafts in engines}
            said, calls = {}, engines[DRAFTS].calls
            for _ in range(samples + 1):  # the first one compiles
                drafted, accepted = calls.drafted, calls.accepted
                for drafts, engine in engines.items():
                    began = time.perf_counter()
                    said[drafts] = engine.generate(prompts, tokens, sampling=sampling)
                    seconds[drafts].append(time.perf_counter() - began)
            ratios = [a / b for a, b in zip(seconds[0][1:], seconds[DRAFTS][1:], strict=True)]
            rows.append(
                {
                    "kind": kind, "batch": batch, "tokens": texts * tokens,
                    "drafted": calls.drafted - drafted, "accepted": calls.accepted - accepted,
                    "same": said[0] == said[DRAFTS], "ratio": median(ratios),
                    "least": min(ratios), "most": max(ratios),
                }
            )  # fmt: skip
    return rows


def write(docs: Path, results: Path) -> None:
    """Write the page's block from results/lookup_cpu.json."""
    from lrkv_jax.bench.files import replace_between

    report = json.loads((results / "lookup_cpu.json").read_text(encoding="utf-8"))
    lines = [
        "| text | at a time | tokens/s over those without | drafts, of 100 tokens "
        "| right, of a draft's 7 | the same text |",
        "| :-- | --: | --: | --: | --: | :-- |",
    ]
    for row in report["rows"]:
        drafts = row["drafted"] // DRAFTS
        lines.append(
            f"| {row['kind']} | {row['batch']} "
            f"| {row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f}) "
            f"| {100 * drafts / row['tokens']:.1f} | {row['accepted'] / max(drafts, 1):.1f} "
            f"| {'yes' if row['same'] else 'no'} |"
        )
    where = f"{report['device']}, {report['cores']} cores, {report['date'][:10]}"
    lines += ["", f"{where}: {report['run']}, {report['tokens']} tokens after each of its prompts."]
    replace_between(docs / "serving.md", "lookup", "\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("--tokens", type=int, default=192, help="new ones of each text")
    parser.add_argument("--texts", type=int, default=24)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="texts at a time")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    from lrkv_jax.bench.report import machine

    report = {
        "benchmark": "prompt_lookup", **machine(), "run": Path(arguments.run).name,
        "tokens": arguments.tokens,
        "rows": measure(
            arguments.run, arguments.tokens, arguments.texts, arguments.batch, arguments.samples
        ),
    }  # fmt: skip
    text = json.dumps(report, indent=1)
    (arguments.results / "lookup_cpu.json").write_text(text + "\n", encoding="utf-8")
    write(arguments.docs, arguments.results)
