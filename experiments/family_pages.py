"""The tables of docs/results.md's family and docs/choosing.md, from results and the package.

    python experiments/family_pages.py [--docs docs] [--results experiments/results]

Runs: results/family/runs.jsonl, which `lrkv sweep ... --archive` writes, and controls.jsonl.
Times of decoding: results/decode_cpu-family.json. Ranks and latents: each seed's value in
results/nano/table08_rank_ablation.json. What each variant supports: the package itself. Tables go
between the marks of the pages, JSON into results/family.
"""

import argparse
import json
import math
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from blocks import replace_between

from lrkv_jax.config import AttentionConfig, ModelConfig, load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import architectures, convert, export
from lrkv_jax.kernels.flash import cudnn
from lrkv_jax.lab.bench.report import read_decode
from lrkv_jax.lab.report.comparison import read_runs
from lrkv_jax.lab.report.comparison.contrasts import (
    Contrast,
    _estimate,
    against,
    contrasts,
    mean_and_sd,
)
from lrkv_jax.lab.report.paper import REPORT_ITEMS
from lrkv_jax.lab.report.paper.family import _bytes_on_shard
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.models.attention import abstract_layer

HERE = Path(__file__).parent
# Each page's blocks, by the file that `lrkv report` writes.
BLOCKS = {
    "results.md": ("family", "family_contrasts"),
    "choosing.md": ("choosing",),
}
# First less second, and what a difference would say.
CONTROLS = {
    ("mha_wide", "mha"): "wider logits alone",
    ("lrkv_one_table", "mha"): "rotated latents, at the head's frequencies",
    ("lrkv_latent", "lrkv_one_table"): "slower frequencies for the latents, on top",
    ("lrkv_latent", "mha_wide"): "LRKV `latent` against MHA with equally wide logits",
}
# Each variant and mode, at the widths of the paper's 128M.
_MLA, _LRKV = {"kind": "mla", "kv_lora_rank": 128}, {"kind": "lrkv", "rank": 46}
SUPPORTED = {
    "MHA": {"kind": "mha"},
    "GQA": {"kind": "gqa", "kv_heads": 2},
    "MQA": {"kind": "mqa"},
    "MLA": _MLA,
    "MLA, `rank: 16`": {**_MLA, "rank": 16},
    "MLA, `rope: full`": {**_MLA, "rope": "full"},
    "MLA, `rope: full`, `latent_norm: false`": {**_MLA, "rope": "full", "latent_norm": False},
    "LRKV, `rope: full`": _LRKV,
    "LRKV, `rope: shared`": {**_LRKV, "rope": "shared"},
    "LRKV, `rope: latent`": {**_LRKV, "rope": "latent"},
    "LRKV, `rope: none`": {**_LRKV, "rope": "none"},
}


def write(docs: Path, results: Path) -> None:
    """Write both pages' blocks, and the files beside them."""
    runs = read_runs([results / "family" / "runs.jsonl"])
    bench = read_decode(results / "decode_cpu-family.json")
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        for item in REPORT_ITEMS:
            if item.name in ("learning_rates", "family", "choosing"):
                item.write(item.made(runs, [bench]), made)
        for page, names in BLOCKS.items():
            for name in names:
                _, _, table = (made / f"{name}.md").read_text().partition("\n")  # but its heading
                replace_between(docs / page, name, table)
        for path in made.glob("*.json"):
            shutil.copy(path, results / "family")
    replace_between(docs / "choosing.md", "support", _support())
    controlled = read_runs([results / "family" / "controls.jsonl"])
    replace_between(docs / "results.md", "controls", _controls([*runs, *controlled]))
    ranks = json.loads((results / "nano" / "table08_rank_ablation.json").read_text())
    replace_between(docs / "results.md", "ranks", _ranks(ranks))


def _support() -> str:
    """What each variant supports: what the package makes and does not refuse."""
    rows = [[name, *_supported(settings).values()] for name, settings in SUPPORTED.items()]
    return tabulated(["variant", *_supported(SUPPORTED["MHA"])], rows)


def _supported(settings) -> dict[str, str]:
    run, entry = load_config("128m", ["attention=mha"]), AttentionConfig(**settings)
    model = run.model.model_copy(update={"attention": entry, "dtype": "bfloat16"})
    one, two = (_bytes_on_shard(model, devices) for devices in (1, 2))

    def cudnn_takes_documents():
        widths, gpu = (entry.logit_width(model), model.head_width), cudnn.Gpu((9, 0), cudnn.OLDEST)
        if cudnn.widths(*widths, gpu, documents=True) is None:
            raise LrkvError("XLA computes these widths")

    def decode():
        layer = abstract_layer(model.model_copy(update={"decode_kernel": "interpret"}))
        x_BTD = jax.ShapeDtypeStruct((1, 1, model.width), jnp.bfloat16)
        cache, lengths_B = layer.stored_shapes(1, 64, jnp.bfloat16), jnp.zeros(1, jnp.int32)
        jax.eval_shape(type(layer).decode, layer, x_BTD, cache, lengths_B)

    def checked(**more):
        ModelConfig(**model.model_dump() | {"attention": entry} | more)

    def convert_to():
        own = entry.model_dump(exclude_none=True, exclude={"kind"})
        to = [f"attention={entry.kind}", *(f"attention.{key}={own[key]}" for key in own)]
        convert._asked(run, run.model.attention, to)

    def yes(call, *arguments, **more) -> str:
        try:
            call(*arguments, **more)
        except LrkvError:
            return ""
        return "yes"

    return {
        "cuDNN with a document mask": yes(cudnn_takes_documents),
        "GPU kernel in decoding": yes(decode),
        "int8 cache": yes(checked, kv_cache_dtype="int8"),
        "gains and biases": yes(checked, qk_gain=True, qkv_bias=True),
        "`kv_heads`": yes(lambda: AttentionConfig(**settings | {"kv_heads": 3}).check(model)),
        "cache on each of 2 devices": f"{two / one:.0%}",
        "Hugging Face class": yes(architectures._check_attention, model),
        "factored export": yes(export._factored_settings, model),
        "convert from": yes(convert._source, model, ""),
        "convert to": yes(convert_to),
    }


def _controls(runs) -> str:
    """The controls' differences, from one model of all lines and seeds at the one rate."""
    values: dict[str, dict[int, float]] = {}
    for run in runs:
        if run.config.optimizer.matrix_lr == 0.014:
            values.setdefault(run.variant, {})[run.seed] = run.bits_per_byte
    heads = ("first − second", "what it isolates", "seeds", "bits/byte of the first",
             "difference, bits/byte", "verdict")  # fmt: skip
    rows = []
    for (first, second), found in contrasts(values, CONTROLS).items():
        mean, sd = mean_and_sd(values[first].values())
        rows.append((
            f"{first} − {second}", CONTROLS[first, second], f"{len(values[first])}",
            f"{mean:.4f} ± {sd:.4f}", found.with_interval(4), found.in_words,
        ))  # fmt: skip
    return tabulated(heads, rows, left=2)


def _ranks(table) -> str:
    """The earlier runs by rank and latent, with seeds as blocks, and the slope over ranks."""
    titles, cells = [one["name"] for one in table["columns"]], [r["cells"] for r in table["rows"]]
    rows = {row[0]["value"]: dict(zip(titles, row, strict=True)) for row in cells}
    values = {name: row["BPB"]["seeds"] for name, row in rows.items()}
    tests = against(values["MHA"], {name: one for name, one in values.items() if name != "MHA"})
    heads = (
        "variant", "cached values, % of MHA", "bits/byte", "difference to MHA, bits/byte", "verdict"
    )  # fmt: skip
    lines = []
    for name, row in rows.items():
        test, bits = tests.get(name), row["BPB"]
        lines.append((
            name, f"{row['cached values']['value']:.1f}", f"{bits['value']:.4f} ± {bits['sd']:.4f}",
            test.with_interval(4) if test else "", test.in_words if test else "",
        ))  # fmt: skip
    doublings = {name: math.log2(int(name.removeprefix("LRKV-")))
                 for name in values if name.startswith("LRKV-")}  # fmt: skip
    slope = trend({name: values[name] for name in doublings}, doublings)
    alone = against(values["MHA"], {"LRKV-8": values["LRKV-8"]})["LRKV-8"]
    return "\n".join([
        tabulated(heads, lines), "",
        "Seeds are blocks of one model of all rows; p adjusted by Holm for the ten rows below MHA. "
        f"A paired test of LRKV-8 and MHA alone has p = {alone.p:.1g}. Each doubling of the rank "
        f"changes the loss by {slope.with_interval(4)} bits per byte (p = {slope.p:.0e}).",
    ])  # fmt: skip


def trend(values, at) -> Contrast:
    """The slope of the values over `at`, a number for each variant; seeds are blocks."""
    rows = [(at[v], s, y) for v, by_seed in values.items() for s, y in by_seed.items()]
    seeds = sorted({s for _, s, _ in rows})
    X = np.asarray([[x, *(float(s == seed) for seed in seeds)] for x, s, _ in rows])
    return _estimate(X, [y for *_, y in rows], np.eye(X.shape[1])[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    write(arguments.docs, arguments.results)
