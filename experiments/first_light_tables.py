"""The tables of docs/decode.md and docs/performance.md from the files of `first_light.py`.

Each says where and when it was measured. Where a file is missing, or of a dry run, its place says
that nothing was measured on a GPU.
"""

import json
from pathlib import Path
from typing import Any

from lrkv_jax.artefacts.tabulated import tabulated

NOTHING = "Not measured on a GPU yet (`python experiments/first_light.py`)."


def write(folder: Path, docs: Path) -> None:
    """Write both pages' blocks from the files in `folder`."""
    from lrkv_jax.bench.files import replace_between

    found = {name: _read(folder / f"{name}.json") for name in "bcdef"}
    for page, block, parts in (
        ("decode.md", "first light: decoding", (_kernels, _decoding, _plans)),
        ("performance.md", "first light: training", (_training, _curves, _runs)),
    ):
        texts = [part(found) for part in parts]
        body = "\n\n".join(text for text in texts if text)
        replace_between(docs / page, block, body or NOTHING)
        print(docs / page)


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    # A dry run is of a CPU and of tiny shapes: it says nothing.
    return None if content["dry"] or not content["rows"] else content


def _where(stage: dict[str, Any]) -> str:
    where = stage["where"]
    versions = {name: where["versions"].get(name) for name in ("jax", "torch", "lrkv_jax")}
    named = ", ".join(f"{name} {v}" for name, v in versions.items() if v)
    dates = sorted({row["date"][:10] for row in stage["rows"]})
    more = f" Left out: {'; '.join(stage['left_out'])}." if stage["left_out"] else ""
    return f"{where['device']}, {named}, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.{more}"


def _wrong(rows: list[dict[str, Any]]) -> str:
    bad = [f"- {row['name']}: {row['says']}" for row in rows if row["verdict"] == "wrong"]
    return "\n\n" + "\n".join(bad) if bad else ""


def _kernels(found) -> str:
    if not (stage := found["b"]):
        return ""
    rows = [row for row in stage["rows"] if row["item"] != "the tests"]
    counts = [sum(row["verdict"] == v for row in rows) for v in ("ok", "wrong", "not here")]
    says = "{} right, {} wrong, {} not run".format(*counts)
    return f"**Kernels against float32 oracles, bfloat16** ({_where(stage)}) {says}.{_wrong(rows)}"


def _decoding(found) -> str:
    if not (stage := found["c"]):
        return ""
    lines = []
    for row in stage["rows"]:
        measured = row["measured"]
        best_us = measured.get("best_mha_us")
        for one in measured.get("report", {}).get("rows", []):
            if not best_us or not one["us"] or one["variant"] == "mha":
                continue
            name = " ".join(filter(None, (one["variant"], one["rope"])))
            share = f"{one['share_of_copy']:.0%}" if one["share_of_copy"] else ""
            lines.append([
                row["name"], f"{best_us:.1f} ({measured['best_mha']})", name,
                one["implementation"], f"{one['us']:.1f}", f"{one['us'] / best_us:.2f}",
                f"{one['bytes_over_mha']:.2f}" if one["bytes_over_mha"] else "", share,
            ])  # fmt: skip
    headers = ("shape", "best MHA, µs", "variant", "by", "µs", "of MHA: time", "bytes", "of copy")
    return (
        f"**Attention of one layer beside the best MHA of the same minutes** ({_where(stage)})\n\n"
        f"{tabulated(headers, lines)}{_wrong(stage['rows'])}"
    )


def _plans(found) -> str:
    if not (stage := found["d"]):
        return ""
    lines = [
        [row["name"].removesuffix(", table"), f"{row['measured']['ratio']:.3f}",
         ", ".join(f"{k} {v}" for k, v in row["measured"]["choice"].items())]
        for row in stage["rows"] if row["item"].endswith(", table")
    ]  # fmt: skip
    headers = ("family", "best other over computed", "its plan")
    return f"**Plans** ({_where(stage)})\n\n{tabulated(headers, lines)}{_wrong(stage['rows'])}"


def _training(found) -> str:
    if not (stage := found["e"]):
        return ""
    lines = []
    for row in stage["rows"]:
        for one in row["measured"].get("report", {}).get("rows", []):
            if one["ms"] is None:
                continue
            sheet, ratio = one["mfu_of_datasheet"], one["time_over_mha"]
            lines.append([
                row["name"], " ".join(filter(None, (one["variant"], one["rope"]))),
                f"{one['ms']:.1f}", f"{one['tokens_per_second']:,.0f}",
                f"{sheet:.1%}" if sheet else "", f"{one['mfu_of_ceiling']:.1%}",
                f"{ratio:.2f}" if ratio else "",
                f"{one['peak_bytes'] / 1e9:.1f}",
            ])  # fmt: skip
    headers = ("step", "variant", "ms", "tokens/s", "MFU of sheet", "of products",
               "of MHA", "peak GB")  # fmt: skip
    wrong = _wrong(stage["rows"])
    return f"**Training steps** ({_where(stage)})\n\n{tabulated(headers, lines)}{wrong}"


def _curves(found) -> str:
    rows = [row["measured"] for row in (found["e"] or {"rows": []})["rows"]]
    of = {(row["variant"], row["dtype"]): row for row in rows if "losses" in row}
    lines = []
    for variant in dict.fromkeys(variant for variant, _ in of):
        pair = [of.get((variant, dtype)) for dtype in ("bfloat16", "float32")]
        if all(pair):
            curves = [row["losses"] for row in pair]
            last = [sum(curve[-20:]) / len(curve[-20:]) for curve in curves]
            apart = max(abs(a - b) for a, b in zip(*curves, strict=False))
            cells = [f"{loss:.4f}" for loss in last]
            lines.append(
                [f"{pair[0]['scale']} {variant}", str(len(curves[0])), *cells, f"{apart:.3f}"]
            )
    headers = ("run", "steps", "bfloat16", "float32", "most apart at a step")
    says = "**Losses on bytes, the mean of the last 20 steps**"
    return f"{says}\n\n{tabulated(headers, lines)}" if lines else ""


def _runs(found) -> str:
    if not (stage := found["f"]):
        return ""
    lines = []
    for row in stage["rows"]:
        if not (one := row["measured"]):
            continue
        score = one["evaluation"]
        train, decoded = one["train_tokens_per_second"], one["decode_tokens_per_second"]
        lines.append([
            f"{one['scale']} {one['variant']}", str(one["steps"]), f"{one['losses'][-1]:.3f}",
            f"{score['bpb']['bpb']:.3f}", f"{score['agreement']['max_relative_error']:.1e}",
            f"{train:,.0f}" if train else "", f"{decoded:,.0f} (batch {one['decode_batch']})",
        ])  # fmt: skip
    headers = ("run", "steps", "last loss", "held-out bits per byte", "decode's error",
               "trained tokens/s", "decoded tokens/s")  # fmt: skip
    wrong = _wrong(stage["rows"])
    return (
        f"**Runs on the embedded corpus** ({_where(stage)})\n\n{tabulated(headers, lines)}{wrong}"
    )
