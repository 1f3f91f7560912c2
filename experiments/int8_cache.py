"""What an int8 cache costs trained models, and what it holds at the paper's scales.

python experiments/int8_cache.py RUN... [--groups N] [--docs docs] [--results experiments/results]

Each run decodes docstrings, token by token after prompts, from its whole cache and from an int8
one, and both are held against the forward over the whole sequence. Writes int8_cpu.json and the
blocks of docs/serving.md.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).parent


def measure(directory: str, groups: int) -> dict:
    """Losses of a run over `groups` times four rows of docstrings, and its caches' bytes."""
    from lrkv_jax.accounting.counts import cache_allocated_bytes_per_token, with_mha
    from lrkv_jax.data.docstrings import docstring_rows
    from lrkv_jax.evals.agreement import ROWS, agreement_on
    from lrkv_jax.run.restore import load_run

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
    from lrkv_jax.accounting.counts import cache_allocated_bytes_per_token
    from lrkv_jax.artefacts.printed import SCALES
    from lrkv_jax.config import load_config

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


def write(docs: Path, results: Path) -> None:
    """Write the page's blocks from results/int8_cpu.json."""
    from lrkv_jax.bench.files import replace_between

    report = json.loads((results / "int8_cpu.json").read_text(encoding="utf-8"))
    lines = [
        "| model | bytes of MHA's, whole → int8 | nats a token, forward | whole cache | int8 "
        "| same greedy token |",
        "| :-- | --: | --: | --: | --: | --: |",
    ]
    for row in report["runs"]:
        whole, int8 = row["whole"], row["int8"]
        shares = (one["bytes_bf16"] / row["mha_bytes_bf16"] for one in (whole, int8))
        change = int8["nats"] / whole["nats"] - 1
        lines.append(
            f"| {row['run']}, {row['label']} | {' → '.join(f'{s:.2f}' for s in shares)} "
            f"| {whole['forward_nats']:.4f} | {whole['nats']:.4f} "
            f"| {int8['nats']:.4f} ({change:+.2%}) | {int8['same_greedy_token']:.1%} |"
        )
    positions = report["runs"][0]["int8"]["positions"]
    lines += ["", f"{report['device']}, {report['date'][:10]}: {positions:,} tokens of docstrings."]
    replace_between(docs / "serving.md", "int8", "\n".join(lines))
    lines = [
        "| scale | MHA int8 | MLA whole → int8 | LRKV whole → int8 | LRKV whole over int8 |",
        "| :-- | --: | --: | --: | --: |",
    ]
    for row in report["scales"]:
        of = {name: size / row["mha_whole"] for name, size in row.items() if name != "scale"}
        lines.append(
            f"| {row['scale']} | {of['mha_int8']:.2f} | {of['mla_whole']:.2f} → "
            f"{of['mla_int8']:.2f} | {of['lrkv_whole']:.2f} → {of['lrkv_int8']:.2f} "
            f"| {of['lrkv_whole'] / of['lrkv_int8']:.2f} |"
        )
    replace_between(docs / "serving.md", "int8 scales", "\n".join(lines))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--groups", type=int, default=4, help="of four rows each")
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    from lrkv_jax.bench.report import machine

    found = [measure(run, arguments.groups) for run in arguments.runs]
    report = {"benchmark": "int8_cache", **machine(), "runs": found, "scales": scales()}
    text = json.dumps(report, indent=1)
    (arguments.results / "int8_cpu.json").write_text(text + "\n", encoding="utf-8")
    write(arguments.docs, arguments.results)
