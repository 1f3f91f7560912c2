"""The plan as text: tables and sentences that fit an 80-column terminal."""

import json
from typing import Any

from lrkv_jax.config import RunConfig
from lrkv_jax.lab.plan.report import PlanOptions, report

COSTS = (
    "Parameters with embedding and head; attention (queries, K/V, output) and K/V over all layers. "
    "GFLOPs are training's, forward and backward, attention counted in full, not its causal half. "
    "KV bytes: all layers, {dtype} values and float32 inverse norms, by the formula; live, summed "
    "from the buffers of an allocated cache, padding included; and those as a share of MHA's. "
    "The paper counts values alone, and MLA's without the rope key."
)
MEMORY = (
    "State and gradients are counted. The rest of this table is an estimate: kept is what the "
    "forward pass leaves for the backward pass, loss the work of one chunk of logits; usable is "
    "{usable:.0%} of the memory."
)
TIME = (
    "Estimated step: {step}. Products {products}, Newton–Schulz {newton_schulz}, the rest of the "
    "optimizer {optimizer}, collectives {exposed_collectives}, and {hidden_collectives} of them "
    "hidden."
)
RUN = (
    "By the assumptions of docs/planning.md, not measured: {tokens_per_second:,.0f} tokens/s, an "
    "MFU of {mfu:.0%}; the run's {steps:,} steps take {hours:,.1f} hours, {device_hours:,.0f} "
    "GPU-hours."
)
DECODING = (
    "Weights and cache in bfloat16; the batch fills {usable:.0%} of the memory. A step reads all "
    "weights but the embedding's table, and all caches: it takes no less than that does. Attention "
    "with more than {ridge:.0f} FLOPs per cached byte is bound by arithmetic instead."
)
NO_OPTIONS = PlanOptions()
GIGA = 1e9


def print_plan(
    config: RunConfig,
    *,
    all_variants: bool,
    as_json: bool,
    options: PlanOptions = NO_OPTIONS,
) -> None:
    """Print the plan of the chosen variant, or of every one of `variants`, to stdout."""
    names = list(config.variants) if all_variants else [config.attention]
    planned = report(config, names, options)
    if as_json:
        print(json.dumps(planned, indent=2))
        return
    # Imported here: JSON needs no terminal.
    from rich.console import Console

    console = Console(highlight=False)
    _print_costs(console, planned)
    if "training" in planned:
        _print_training(console, planned)
        _print_decoding(console, planned)


def _print(console, text: str) -> None:
    console.print(text, markup=False)


def _table(title: str, headers: list[str], caption: str | None = None):
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    # Narrow enough for nine columns on an 80-column terminal.
    table = Table(
        title=escape(title), caption=caption, box=box.SIMPLE_HEAD, caption_justify="left",
        collapse_padding=True, pad_edge=False,
    )  # fmt: skip
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index else "left", no_wrap=True)
    return table


def _print_costs(console, planned: dict[str, Any]) -> None:
    from rich.markup import escape

    title = (
        "{name}: {layers} layers of {width}, {heads} heads of {head_width}, "
        "{tokens:,} tokens at context {context:,}"
    ).format(**planned)
    headers = [
        "variant", "params", "atten-\ntion", "K/V", "GFLOPs\n/token", "KV bytes\n/token",
        "live\n/token", "% MHA,\nlive", "% in\npaper",
    ]  # fmt: skip
    table = _table(title, headers, COSTS.format(dtype=planned["cache_dtype"]))
    for name, costs in planned["variants"].items():
        table.add_row(
            escape(name),
            _human(costs["parameters"]),
            _human(costs["attention_parameters"]),
            _human(costs["kv_parameters"]),
            f"{costs['flops_per_token'] / 1e9:.3f}",
            f"{costs['kv_cache_bytes_per_token']:,}",
            f"{costs['kv_cache_live_bytes_per_token']:,.0f}",
            f"{100 * costs['kv_cache_live_fraction_of_mha']:.1f}",
            f"{100 * costs['kv_cache_fraction_published']:.1f}",
        )
    console.print(table)


def _print_training(console, planned: dict[str, Any]) -> None:
    training, device = planned["training"], planned["hardware"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in training["mesh"].items())
    _print(
        console,
        f"\nA training step on {training['devices']} x {device['name']}: {mesh}; "
        f"{training['dtype']}, {training['tokens_per_step']:,} tokens.\n",
    )
    _print_memory(console, training, training["memory"]["usable"] / device["memory"])
    _print_collectives(console, training["collectives"])
    if training["verdict"]["fits"]:
        parts = {k: _seconds(v) for k, v in training["time"].items() if isinstance(v, float)}
        _print(console, TIME.format(**parts))
        _print(console, RUN.format(**training["time"]))
    else:
        _print(console, "No time is estimated of a step that does not fit.")
    shares = " and ".join(
        f"{part:.1%} at {int(tokens):,} tokens"
        for tokens, part in training["muon"]["share"].items()
    )
    _print(console, f"Muon's Newton–Schulz is {shares} of a step's forward and backward FLOPs.")


def _print_memory(console, training: dict[str, Any], usable: float) -> None:
    memory, step = training["memory"], training["compiled"]
    policies, chosen = memory["estimates"], memory["remat"]
    headers = ["train.remat", *(f"{p}*" if p == chosen else p for p in policies)]
    table = _table("Memory of one device, GB, estimated", headers)
    for name in ("parameters", "optimizer", "gradients"):
        table.add_row(name, *(f"{memory[name] / GIGA:.2f}" for _ in policies))
    for name in ("kept", "loss", "total"):
        table.add_row(name, *(f"{policy[name] / GIGA:.2f}" for policy in policies.values()))
    fits = ("yes" if p["total"] <= memory["usable"] else "no" for p in policies.values())
    table.add_row(f"fits in {memory['usable'] / GIGA:.0f}", *fits)
    console.print(table)
    _print(console, MEMORY.format(usable=usable))
    if step:
        _print(
            console,
            f"\nCompiled by XLA for {training['devices']} simulated CPU devices in "
            f"{step['seconds']:.0f} s: {step['arguments'] / GIGA:.3g} GB of arguments and "
            f"{step['temporary'] / GIGA:.3g} GB of temporaries per device.",
        )
    sentence = training["verdict"]["sentence"]
    _print(console, f"{sentence[0].upper()}{sentence[1:]}.\n")


def _print_collectives(console, collectives: list[dict[str, Any]]) -> None:
    if not collectives:
        return
    table = _table("What one device sends in a step, estimated", ["collective", "devices", "GB"])
    for one in collectives:
        table.add_row(one["kind"], str(one["devices"]), f"{one['bytes'] / GIGA:.3g}")
    console.print(table)


def _print_decoding(console, planned: dict[str, Any]) -> None:
    from rich.markup import escape

    device = planned["hardware"]
    length = next(iter(planned["variants"].values()))["decode"]["length"]
    headers = [
        "variant", "weights\nGB", "cache GB\n/sequence", "largest\nbatch", "ms, one\nsequence",
        "ms, all", "tokens/s\nat most", "FLOPs\n/byte",
    ]  # fmt: skip
    _print(console, f"\nDecoding on one {device['name']}, {length:,} tokens in each cache.\n")
    table = _table("A step of decoding, at the bandwidth's floor", headers)
    for name, costs in planned["variants"].items():
        one = costs["decode"]
        table.add_row(
            escape(name),
            f"{one['weights'] / GIGA:.3g}",
            f"{one['cache_per_sequence'] / GIGA:.3g}",
            f"{one['largest_batch']:,}",
            f"{1e3 * one['floor_of_one']:.3g}",
            f"{1e3 * one['floor']:.3g}" if one["largest_batch"] else "-",
            _human(round(one["tokens_per_second"])),
            f"{one['flops_per_byte']:.0f}",
        )
    console.print(table)
    ridge = device["bf16_flops"] / device["memory_bandwidth"]
    _print(console, DECODING.format(usable=device["decode_usable"], ridge=ridge))


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def _human(count: int) -> str:
    """162.2M, 6.85B."""
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.1f}K"
