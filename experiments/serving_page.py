"""The tables of docs/serving.md, from what is kept in experiments/results.

python experiments/serving_page.py                       # of serve_, lookup_ and int8_cpu.json
python experiments/serving_page.py --lookup RUN          # measures lookup_cpu.json before
python experiments/serving_page.py --int8 RUN [RUN ...]  # measures int8_cpu.json before

serve_cpu.json is what `lrkv bench serve --out experiments/results` wrote. A table whose file is
not kept stays as it is.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import fmean, median

HERE = Path(__file__).parent
DRAFTS, PROMPT = 7, 48  # tokens


def measure_lookup(
    directory: str, tokens: int, texts: int, batches: list[int], samples: int
) -> list[dict]:
    """What looking drafts up in the text gains with a trained model.

    Beginnings of held-out texts are continued by an engine that looks drafts up and by one that
    does not, in turns. Greedily a small model soon repeats itself; drawn at temperature 0.8 it
    hardly ever does. A row for each kind of text and each number of texts at a time.
    """
    from lrkv_jax.data.loader import heldout_batches
    from lrkv_jax.inference import Engine, Sampling
    from lrkv_jax.training.restore import load_run

    run = load_run(directory)
    (rows_BU,) = heldout_batches(run.config.data, run.config.train.context, texts, some=1)
    prompts = rows_BU[:, :PROMPT].tolist()
    kinds = {"greedy": Sampling(), "temperature 0.8": Sampling(0.8)}
    rows = []
    for batch in batches:
        engines = {
            drafts: Engine(
                run.config.model,
                run.params,
                batch=batch,
                length=PROMPT + tokens,
                draft_tokens=drafts,
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


def measure_int8(directory: str, groups: int) -> dict:
    """What an int8 cache costs a trained model, and what it holds.

    The run decodes `groups` times four rows of docstrings, token by token after prompts, from its
    whole cache and from an int8 one, and both are held against the forward over whole sequences.
    """
    from lrkv_jax.data.docstrings import docstring_rows
    from lrkv_jax.evaluation.agreement import ROWS, agreement_on
    from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token, with_mha
    from lrkv_jax.training.restore import load_run

    found = {}
    for how in ("whole", "int8"):
        run = load_run(directory, overrides=[f"model.decode_cache={how}"])
        rows_RU = docstring_rows(run.tokenizer, run.config.train.context)[:, :-1]
        every = [agreement_on(run, rows_RU[ROWS * i : ROWS * (i + 1)]) for i in range(groups)]
        found[how] = {
            "nats": fmean(one.loss for one in every),
            "forward_nats": fmean(one.forward_loss for one in every),
            "same_greedy_token": fmean(one.same_greedy_token for one in every),
            "bytes_bf16": cache_allocated_bytes_per_token(run.config.model),
            "positions": sum(one.positions for one in every),
        }
    mha = cache_allocated_bytes_per_token(with_mha(run.config.model))
    label = run.config.model.attention.label
    return {"run": Path(directory).name, "label": label, "mha_bytes_bf16": mha, **found}


def scales() -> list[dict]:
    """Bytes of a token at the paper's scales, of a bfloat16 cache and of its int8 form."""
    from lrkv_jax.config import load_config
    from lrkv_jax.lab.report.printed import SCALES
    from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token

    def nbytes(scale, variant, how):
        config = load_config(scale, [f"attention={variant}", f"model.decode_cache={how}"])
        return cache_allocated_bytes_per_token(config.model)

    variants = ("mha", "mla", "lrkv")
    return [
        {
            "scale": scale,
            **{f"{v}_{how}": nbytes(scale, v, how) for v in variants for how in ("whole", "int8")},
        }
        for scale in SCALES
    ]


# Blocks of the page.


def gains(report: dict) -> str:
    """Every ratio of `lrkv bench serve`."""
    rows = [
        (
            row["what"],
            row["variant"],
            f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})",
        )
        for row in report["rows"]
    ]
    settings = report["settings"]
    where = (
        f"{_machine(report)}, jax {report['versions']['jax']}: `{settings['scale']}` with random "
        f"weights, {settings['dtype']}, {settings['requests']} requests of log-normal lengths, "
        f"{settings['samples']} samples."
    )
    return _table("ratio | variant | measured (range)", 2, rows, where)


def lookup(report: dict) -> str:
    """What drafts from the text itself gained."""
    rows = []
    for row in report["rows"]:
        drafts = row["drafted"] // DRAFTS
        rows.append(
            (
                row["kind"], row["batch"],
                f"{row['ratio']:.2f} ({row['least']:.2f} to {row['most']:.2f})",
                f"{100 * drafts / row['tokens']:.1f}", f"{row['accepted'] / max(drafts, 1):.1f}",
                "yes" if row["same"] else "no",
            )
        )  # fmt: skip
    titles = (
        "text | at a time | tokens/s over those without | drafts, of 100 tokens | "
        "right, of a draft's 7 | the same text"
    )
    where = f"{report['run']}, {report['tokens']} tokens after each of its prompts."
    return _table(titles, 1, rows, f"{_machine(report)}: {where}")


def int8(report: dict) -> str:
    """What int8 caches cost trained models."""
    rows = []
    for row in report["runs"]:
        whole, int8 = row["whole"], row["int8"]
        shares = (one["bytes_bf16"] / row["mha_bytes_bf16"] for one in (whole, int8))
        change = int8["nats"] / whole["nats"] - 1
        rows.append(
            (
                f"{row['run']}, {row['label']}", " → ".join(f"{share:.2f}" for share in shares),
                f"{whole['forward_nats']:.4f}", f"{whole['nats']:.4f}",
                f"{int8['nats']:.4f} ({change:+.2%})", f"{int8['same_greedy_token']:.1%}",
            )
        )  # fmt: skip
    titles = (
        "model | bytes of MHA's, whole → int8 | nats a token, forward | whole cache | int8 | "
        "same greedy token"
    )
    positions = report["runs"][0]["int8"]["positions"]
    return _table(titles, 1, rows, f"{_machine(report)}: {positions:,} tokens of docstrings.")


def int8_scales(report: dict) -> str:
    """What int8 caches hold at the paper's scales."""
    rows = []
    for row in report["scales"]:
        of = {name: size / row["mha_whole"] for name, size in row.items() if name != "scale"}
        rows.append(
            (
                row["scale"], f"{of['mha_int8']:.2f}",
                *(f"{of[f'{v}_whole']:.2f} → {of[f'{v}_int8']:.2f}" for v in ("mla", "lrkv")),
                f"{of['lrkv_whole'] / of['lrkv_int8']:.2f}",
            )
        )  # fmt: skip
    titles = "scale | MHA int8 | MLA whole → int8 | LRKV whole → int8 | LRKV whole over int8"
    return _table(titles, 1, rows)


def _machine(report):
    cores = report["cores"]
    return f"{report['device']}, {cores} core{'s' * (cores > 1)}, {report['date'][:10]}"


def _table(titles: str, words: int, rows: list[tuple], where: str = "") -> str:
    """A table in Markdown, its first `words` columns to the left, and a line below it."""
    from lrkv_jax.lab.report.tabulated import tabulated

    return f"{tabulated(titles.split(' | '), rows, left=words)}\n\n{where}"


# Block → (the kept file that it is of, what writes it).
BLOCKS = {
    "serving": ("serve_cpu.json", gains),
    "lookup": ("lookup_cpu.json", lookup),
    "int8": ("int8_cpu.json", int8),
    "int8 scales": ("int8_cpu.json", int8_scales),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lookup", metavar="RUN")
    parser.add_argument("--tokens", type=int, default=192, help="of --lookup: new ones of a text")
    parser.add_argument("--texts", type=int, default=24, help="of --lookup")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="texts at a time")
    parser.add_argument("--samples", type=int, default=5, help="of --lookup")
    parser.add_argument("--int8", metavar="RUN", nargs="+", default=[])
    parser.add_argument("--groups", type=int, default=4, help="of --int8: of four rows each")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    asked = parser.parse_args()
    from lrkv_jax.lab.bench.files import replace_between
    from lrkv_jax.lab.bench.report import machine

    def keep(name, **found):
        text = json.dumps({"benchmark": name, **machine(), **found}, indent=1)
        (asked.results / f"{name}_cpu.json").write_text(text + "\n", encoding="utf-8")

    if asked.lookup:
        how = asked.tokens, asked.texts, asked.batch, asked.samples
        rows = measure_lookup(asked.lookup, *how)
        keep("lookup", run=Path(asked.lookup).name, tokens=asked.tokens, rows=rows)
    if asked.int8:
        runs = [measure_int8(run, asked.groups) for run in asked.int8]
        keep("int8", runs=runs, scales=scales())
    for block, (file, written) in BLOCKS.items():
        if (asked.results / file).exists():
            report = json.loads((asked.results / file).read_text(encoding="utf-8"))
            replace_between(asked.docs / "serving.md", block, written(report))


if __name__ == "__main__":
    main()
