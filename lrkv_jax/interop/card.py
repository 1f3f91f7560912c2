"""The model card of an exported run: what is known of it, and nothing else."""

from __future__ import annotations

from pathlib import Path

from lrkv_jax.files import read_json
from lrkv_jax.inference.trained_run import TrainedRun
from lrkv_jax.models.accounting.counts import cache_bytes_per_token, parameter_counts, with_mha

WHOLE = """\
The keys and values of every head are materialised in these weights. A server keeps those keys and
values, {whole:,} bytes per token in bfloat16, whatever the run's own cache took: **it saves nothing
through this class**."""
FACTORED = """\
`modeling_lrkv.py` (`trust_remote_code=True`) keeps {own:,} bytes per token in bfloat16 and decodes
exactly from them. A server that brings its own cache, as vLLM does, materialises keys and values
and saves nothing."""


def card(run: TrainedRun, architecture: str, dtype: str, *, factored: bool = False) -> str:
    """README.md of the exported folder, in Markdown."""
    config, model = run.config, run.config.model
    own, groups = cache_bytes_per_token(model), model.attention.key_heads(model)
    whole = 4 * model.layers * groups * model.head_width
    mha = cache_bytes_per_token(with_mha(model))
    trained = run.step * config.train.global_batch_size * config.train.seq_len
    rows = [
        ("class", f"`{architecture}`"),
        ("attention as it was trained", model.attention.label),
        ("parameters of the run", f"{parameter_counts(model).total:,}"),
        ("layers, width, heads, head width",
         f"{model.layers}, {model.width}, {model.heads}, {model.head_width}"),
        ("weights", dtype),
        ("trained at a context of", f"{config.train.seq_len:,} tokens"),
        ("step", f"{run.step:,}"),
        ("tokens trained on", f"{trained:,}"),
        ("data", config.data.source if config.data.mixture is None else "conversations"),
        ("tokenizer", config.data.tokenizer),
        ("cache of lrkv_jax", f"{own:,} bytes per token in bfloat16, {own / mha:.1%} of MHA's"),
    ]  # fmt: skip
    path = Path(config.directory) / "evaluation.json"
    evaluation = read_json(path, "evaluate the run again") or {}
    if evaluation.get("step") == run.step:
        rows += [
            (f"{name}, {key}", f"{value:.4f}")
            for name, found in evaluation.items() if isinstance(found, dict)
            for key, value in found.items() if isinstance(value, float) and key != "seconds"
        ]  # fmt: skip
    table = "\n".join(f"| {name} | {value} |" for name, value in rows)
    about = FACTORED.format(own=own) if factored else WHOLE.format(whole=whole)
    if not factored and own == whole:
        about = f"A server's cache takes {whole:,} bytes per token in bfloat16, as the run's own."
    return (
        f"---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        f"# {config.name}, {model.attention.label}\n\nTrained and exported by lrkv_jax.\n\n"
        f"| | |\n|---|---|\n{table}\n\n{about}\n"
    )
