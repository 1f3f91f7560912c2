"""The tables of the family's contrasts.md and docs/choosing.md, from results and the package.

    python experiments/family_pages.py [--docs docs] [--results experiments/results]

Runs: results/family/runs.jsonl, which `lrkv sweep ... --archive` writes, and controls.jsonl.
Times of decoding: results/decode_cpu-family.json. Ranks and latents: each seed's value in
results/nano/table08_rank_ablation.json. What each variant supports: the package itself. Tables go
between the marks of pages there and in results, JSON into results/family.
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
from lrkv_jax.distributed.hardware import HARDWARE
from lrkv_jax.errors import LrkvError
from lrkv_jax.interop import architectures, convert, export
from lrkv_jax.kernels.flash import cudnn
from lrkv_jax.lab.bench.decode import OURS
from lrkv_jax.lab.report.comparison.contrasts import (
    Contrast,
    against,
    combined,
    contrasts,
    estimate,
    mean_and_sd,
)
from lrkv_jax.lab.report.comparison.files import read_runs
from lrkv_jax.lab.report.comparison.runs import steps_saved_by_seed
from lrkv_jax.lab.report.paper import REPORT_ITEMS
from lrkv_jax.lab.report.paper.family import TEXTS, bits, families
from lrkv_jax.lab.report.renderers import write_table
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.models.accounting.counts import (
    cache_allocated_bytes_per_token,
    training_flops_per_token,
)
from lrkv_jax.models.accounting.serving import attention_flops
from lrkv_jax.models.attention import abstract_layer

HERE = Path(__file__).parent


def _pairs(*pairs: tuple[str, str]) -> dict[str, dict[str, int]]:
    """First less second of each pair, as weights of the variants."""
    return {f"{first} − {second}": {first: 1, second: -1} for first, second in pairs}


# Contrasts between the variants of configs/nano_family.yaml; p is adjusted within each of these.
CONTRASTS = (
    ("named", _pairs(
        ("lrkv_latent", "mha"),
        ("lrkv_latent", "lrkv_full"),
        ("lrkv_shared", "lrkv_full"),
        ("mla_full", "mla"),
        ("mla_full", "mha"),
        ("lrkv_latent_tied_16", "lrkv_latent_third"),  # at equal bytes
    )),
    # What readers requested afterwards.
    ("added later", _pairs(("lrkv_full", "mha"))),
    ("added later", {
        "(lrkv_full − lrkv_latent) − (mha − lrkv_full)":
            {"lrkv_full": 2, "lrkv_latent": -1, "mha": -1},
    }),
)  # fmt: skip
NAMED_ON = "2026-11-23T04:15:29+00:00"  # the commit that has the named ones first
# Bits per byte: differences below it would change nobody's choice.
MARGIN = 0.005
CONTRASTS_COLUMNS = [
    Column("contrast"),
    Column("difference", "bits/byte"),
    Column("verdict"),
    Column(f"equal within {MARGIN}"),
    Column("by seeds that chose no rate", "bits/byte"),
    Column("on the second text", "bits/byte"),
    Column("sooner", "% of steps", digits=1),
]
CONTRASTS_NOTE = (
    "First minus second, with a 95 % interval, from one model of all variants and seeds. p is "
    "adjusted by Holm within a block. Not found: the number is the smallest difference that such "
    "runs detect with a power of 0.8. Equal: p of two one-sided tests. Sooner: the share of its "
    "steps that the second had left when the first reached its final loss, mean ± standard "
    "deviation if every seed did. Equal variants have some too."
)
SCALE, DEVICE = "128m_family", HARDWARE["h200"]
SHARDS = (1, 2, 6)  # devices that divide the heads: each has its heads', and what all heads share
COSTS = [
    Column("variant"),
    *(Column(f"{n} device{'s' * (n > 1)}", digits=2, group="cache on each of") for n in SHARDS),
    Column("FLOPs", digits=2, group="training"),
    Column("2,048 × 1", digits=2, group="decode, measured"),
    Column("8,192 × 4", digits=2, group="decode, measured"),
    Column(DEVICE.name, digits=2, group="decode, bound"),
    Column("FLOPs/byte", digits=0, group="decode"),
    Column("held-out text", "bits/byte", group="difference to MHA"),
    Column("second text", "bits/byte", group="difference to MHA"),
]
COSTS_NOTE = (
    "Losses: differences to MHA's bits per byte with 95 % intervals, from one model of all "
    "variants and seeds of the runs. Costs: the variants of the same names in "
    f"configs/{SCALE}.yaml, as multiples of MHA's. Cache: bytes on each device, bfloat16, as "
    "allocated. Training: FLOPs of a token. Decode: attention of one layer "
    f"over the fastest MHA of the same benchmark, cached tokens × sequences. {DEVICE.name}: not "
    "measured but a bound, the longer of reading the cache and multiplying at the datasheet's "
    "rates. FLOPs/byte: of each cached byte."
)
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
    (tuned,) = families(runs)
    variants = {one.runs[0].variant: one for one in tuned.variants.values()}
    bench = json.loads((results / "decode_cpu-family.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder)
        for item in REPORT_ITEMS:
            if item.name in ("learning_rates", "family"):
                item.write(item.made(runs), made)
        write_table(_contrasts(variants, runs), made, "family_contrasts")
        write_table(_choosing(variants, bench["rows"]), made, "choosing")
        for name, page in {
            "family": results / "family/contrasts.md",
            "choosing": docs / "choosing.md",
            "family_contrasts": results / "family/contrasts.md",
        }.items():
            _, _, table = (made / f"{name}.md").read_text().partition("\n")  # but its heading
            replace_between(page, name, table)
        for path in made.glob("*.json"):
            shutil.copy(path, results / "family")
    replace_between(docs / "choosing.md", "support", _support())
    controlled = read_runs([results / "family" / "controls.jsonl"])
    replace_between(results / "family/contrasts.md", "controls", _controls([*runs, *controlled]))
    ranks = json.loads((results / "nano" / "table08_rank_ablation.json").read_text())
    replace_between(results / "nano/ranks.md", "ranks", _ranks(ranks))


def _contrasts(variants, runs) -> Table:
    """The contrasts that were named before most of the runs, and later ones."""
    swept = [one for one in variants.values() if one.swept]
    choosing = sorted({seed for one in swept for found in one.bits.values() for seed in found})
    bpb, second = ({name: bits(one, text) for name, one in variants.items()} for text in TEXTS)
    unseen = {
        name: {seed: value for seed, value in by_seed.items() if seed not in choosing}
        for name, by_seed in bpb.items()
    }
    rows = []
    for block, wanted in CONTRASTS:
        found = [combined(values, wanted) for values in (bpb, second, unseen)]
        for name, weights in wanted.items():
            own, on_second, by_unseen = (of[name] for of in found)
            pair = [variants[variant] for variant in weights]
            rows.append(TableRow.of(
                name, own.with_interval(4), own.in_words, f"p = {own.equal_within(MARGIN):.2g}",
                f"{by_unseen.with_interval(4)}, p = {by_unseen.p:.0e}", on_second.with_interval(4),
                _steps_saved(*pair) if len(pair) == 2 else "", block=block,
            ))  # fmt: skip
    before = sum(run.history[0]["time"] < NAMED_ON for run in runs)
    notes = [
        CONTRASTS_NOTE,
        f"{before} of {len(runs)} runs began before the commit that names the contrasts.",
        f"Rates were chosen by the seeds {', '.join(map(str, choosing))}.",
    ]
    return Table("nano_family: contrasts", CONTRASTS_COLUMNS, rows, notes)


def _steps_saved(first, second) -> Cell | str:
    """The share of its steps that the second had left, in per cent."""
    curves = ({seed: run.curve for seed, run in one.runs.items()} for one in (first, second))
    saved = steps_saved_by_seed(*curves)
    if None in saved.values():
        return "not in each seed"
    return Cell.over({seed: 100 * share for seed, share in saved.items()})


def _choosing(variants, bench) -> Table:
    """What each variant gains in loss, over what its namesake in `SCALE` costs."""
    scale, losses, rows = load_config(SCALE), [], []
    names = [name for name in scale.variants if name in variants]
    for text in TEXTS:
        values = {name: bits(variants[name], text) for name in names}
        losses.append(against(values.pop("mha"), values))
    mha = _costs(scale.variant("mha"))
    for name in names:
        config = scale.variant(name)
        costs = [own / of_mha for own, of_mha in zip(_costs(config), mha, strict=True)]
        flops = attention_flops(config.model).per_cached_token
        rows.append(TableRow.of(
            name, *costs[:-1], _time(bench, name, 2048, 1), _time(bench, name, 8192, 4), costs[-1],
            flops / cache_allocated_bytes_per_token(config.model),
            *(one[name].with_interval(4) if name in one else "" for one in losses),
        ))  # fmt: skip
    return Table("Which variant to choose", COSTS, rows, [COSTS_NOTE])


def _costs(config) -> list[float]:
    """Cache bytes of a token on each of `SHARDS` devices, FLOPs of a trained token, and the least
    seconds for a cached token of one decoding step's attention on `DEVICE`."""
    model = config.model
    moved = cache_allocated_bytes_per_token(model) / DEVICE.memory_bandwidth
    return [
        *(_bytes_on_shard(model, n) for n in SHARDS),
        training_flops_per_token(model, config.train.seq_len),
        max(moved, attention_flops(model).per_cached_token / DEVICE.bf16_flops),
    ]


def _bytes_on_shard(model, shards: int) -> int:
    """Bytes that a token leaves on each of `shards` devices between which heads are split.

    Groups (`kv_heads`) that `shards` does not divide stay whole: a shard reads those of its heads.
    """
    entry, heads = model.attention, model.heads // shards
    if groups := getattr(entry, "kv_heads", None):
        most = min(heads, groups // shards if groups % shards == 0 else groups)
        here = next(g for g in range(most, 0, -1) if heads % g == 0)
        entry = entry.model_copy(update={"kv_heads": here})
    shard = model.model_copy(update={"heads": heads, "attention": entry})
    return cache_allocated_bytes_per_token(shard)


def _time(bench, variant: str, length: int, batch: int) -> float:
    """The time of our fastest decoding over MHA's."""
    wanted = variant, length, batch
    rows = [row for row in bench if (row["variant"], row["length"], row["batch"]) == wanted]
    times = [row["time_over_mha"] for row in rows if row["implementation"] in OURS]
    return min(filter(None, times))  # None: it did not run


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
    return estimate(X, [y for *_, y in rows], np.eye(X.shape[1])[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--docs", type=Path, default=HERE.parent / "docs")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    arguments = parser.parse_args()
    write(arguments.docs, arguments.results)
