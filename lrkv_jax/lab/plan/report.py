"""The whole plan as one dictionary, and as text.

All is counted from the configuration. A training step on a mesh is compiled, or else estimated in
closed form; nothing is allocated.
"""

import math
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lrkv_jax.config import RunConfig
from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.report.tabulated import tabulated
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token, plan, with_mha
from lrkv_jax.models.accounting.serving import USABLE, serving

GIGA = 1e9
# The least and the most of the devices' peak that a step is assumed to reach, unless the user
# knows better: public trainers of dense models report 0.4 to 0.5 on H100s.
UTILIZATION = (0.3, 0.5)


def plan_report(
    config: RunConfig,
    names: list[str],
    *,
    training: bool = False,
    compiled: bool = False,
    devices: int | None = None,
    device: str = "h200",
    length: int | None = None,
    utilization: Sequence[float] = UTILIZATION,
) -> dict[str, Any]:
    """The costs of the run under each variant of `names`, ready for JSON.

    `training` adds a step on the mesh, `compiled` or else estimated: `devices` fill an axis of −1,
    a node's unless given. `length` is the number of tokens in a decoder's cache, the run's context
    unless given. `utilization` is the least and the most of the devices' peak that a step may
    reach.

    Raises `LrkvError` for a variant that cannot have the model's shape, unknown hardware, and a
    mesh that the devices or the model cannot have.
    """
    named = hardware(device)
    for name in names:
        model = config.variant(name).model
        if any(":" in kind.attention.kind for kind in model.cycle):
            # Variants of this package are held to their counts by tests, and need no JAX here.
            from lrkv_jax.models.transformer import abstract_parameters

            abstract_parameters(model)
    planned = plan(config, names)
    mha_bytes = cache_allocated_bytes_per_token(with_mha(config.model))
    for name, costs in planned["variants"].items():
        allocated = costs["kv_cache_allocated_bytes_per_token"]
        costs["kv_cache_allocated_fraction_of_mha"] = allocated / mha_bytes
        decoding = serving(config.variant(name).model, named, length or config.train.seq_len)
        tokens_per_second = {"tokens_per_second": decoding.tokens_per_second}
        costs["decode"] = asdict(decoding) | tokens_per_second
    planned["hardware"] = asdict(named) | {"decode_usable": USABLE}
    if training:
        # Imported here: the step and its optimizer take a second to load.
        from lrkv_jax.lab.plan import training as of_training

        planned["training"] = of_training.training(
            config, named, devices, compiled=compiled, utilization=utilization
        )
    return planned


def as_text(planned: dict[str, Any], *, decoding: bool = False) -> str:
    """The plan in tables and sentences that fit an 80-column terminal.

    The time to decode a token is there with the training step, or with `decoding`.
    """
    parts = _costs(planned)
    if "training" in planned:
        parts += _training(planned)
    if decoding or "training" in planned:
        parts += _decoding(planned)
    return "\n\n".join(parts)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 80)


def _costs(planned: dict[str, Any]) -> list[str]:
    title = (
        "{name}: {layers} layers of {width}, {heads} heads of {head_width}, "
        "{tokens:,} tokens at context {context:,}"
    ).format(**planned)
    if planned["window"]:
        kinds = f"layers {planned['layers_pattern'] or 'S'}, S with windows"
        title = f"{title}\n{kinds} of {planned['window']:,} tokens"
    headers = (
        "variant", "size", "attn", "K/V", "G-\nFLOP", "KV\nbytes", "allo-\ncated",
        "% of\nMHA", "% in\npaper",
    )  # fmt: skip
    rows = [
        [
            name,
            _human(costs["parameters"]),
            _human(costs["attention_parameters"]),
            _human(costs["kv_parameters"]),
            f"{costs['flops_per_token'] / 1e9:.3f}",
            f"{costs['kv_cache_bytes_per_token']:,}",
            f"{costs['kv_cache_allocated_bytes_per_token']:,}",
            f"{100 * costs['kv_cache_allocated_fraction_of_mha']:.1f}",
            f"{100 * costs['kv_cache_fraction_published']:.1f}",
        ]
        for name, costs in planned["variants"].items()
    ]
    legend = (
        "Size: parameters with embedding and head; attention (queries, K/V, output) and K/V over "
        "all layers. FLOPs of a token are training's, forward and backward, attention counted in "
        f"full, not its causal half. KV bytes of a token: {planned['cache_dtype']} values and "
        "float32 inverse norms; as allocated, padding included, and those as a share of MHA's. "
        "The paper counts values alone, and MLA's without the rope key."
    )
    return [title, tabulated(headers, rows, form="simple"), _wrapped(legend)]


def _training(planned: dict[str, Any]) -> list[str]:
    training, device = planned["training"], planned["hardware"]
    mesh = ", ".join(f"{axis} {size}" for axis, size in training["mesh"].items())
    title = (
        f"A training step on {training['devices']} x {device['name']}: {mesh}; "
        f"{training['dtype']}, {training['tokens_per_step']:,} tokens"
    )
    time = training["time"]
    sentence = "No time is given for a step that does not fit."
    if time:
        shares = " to ".join(dict.fromkeys(f"{one:.0%}" for one in time["utilization"]))
        sentence = (
            f"Time, not measured: {_duration(time['hours'])}, {_range(time['device_hours'])} "
            f"GPU-hours, {_range(time['tokens_per_second'])} tokens/s, if the step's FLOPs reach "
            f"{shares} of the peak (--utilization). Muon's Newton–Schulz is "
            f"{training['newton_schulz_share']:.1%} of the forward and backward FLOPs."
        )
    return [_wrapped(title), *_memory(training), _wrapped(sentence), *_alternatives(training)]


def _alternatives(training: dict[str, Any]) -> list[str]:
    what = "would cost less" if training["verdict"]["fits"] else "would fit"
    found = training["alternatives"]
    if not found:
        return [_wrapped(f"No other remat policy, batch or mesh that was tried {what}.")]
    rows = [
        [
            "\n".join(f"{key}={value}" for key, value in one["changes"].items()),
            f"{one['needs'] / GIGA:.3g}",
            _range(one["device_hours"]),
            "changes" if "train.global_batch_size" in one["changes"] else "stays",
        ]
        for one in found
    ]
    headers = ("setting", "GB\n/device", "GPU-hours", "result of\nthe training")
    return [f"What {what}, estimated", tabulated(headers, rows, form="simple")]


def _range(ends: Sequence[float]) -> str:
    """A range like 1,200 to 2,000: two digits of each end."""
    places = [1 - math.floor(math.log10(end)) for end in ends]
    least, most = (f"{round(x, n):,.{max(0, n)}f}" for x, n in zip(ends, places, strict=True))
    return least if least == most else f"{least} to {most}"


def _duration(hours: Sequence[float]) -> str:
    if hours[-1] >= 0.1:
        return f"{_range(hours)} hours"
    return f"{_range([3600 * end for end in hours])} seconds"


def sbatch(planned: dict[str, Any], config: str, overrides: Sequence[str]) -> str:
    """`launch/slurm.sbatch` for the planned step, to be submitted without arguments.

    Raises `LrkvError` for a step that does not fit.
    """
    training, device = planned["training"], planned["hardware"]
    if not training["verdict"]["fits"]:
        raise LrkvError(f"--sbatch is for a step that fits: {training['verdict']['sentence']}")
    package = Path(__file__).parents[2]  # a wheel has the launchers in the package
    folder = next(d for d in (package.parent / "launch", package / "launch") if d.is_dir())
    text = (folder / "slurm.sbatch").read_text(encoding="utf-8")
    devices, hours = training["devices"], training["time"]["hours"]
    nodes = -(-devices // device["node"])
    while devices % nodes:
        nodes += 1
    about = f"""Written by lrkv plan for {devices} x {device["name"]}.
        {training["verdict"]["sentence"]} Estimated, not measured: {_duration(hours)}."""
    about = textwrap.fill(" ".join(about.split()), 98, initial_indent="# ", subsequent_indent="# ")
    mesh = [f"mesh.{axis}={size}" for axis, size in training["mesh"].items()]
    words = [config, *(one for one in overrides if not one.startswith("mesh.")), *mesh]
    changes = {
        r"^# A training run(.*\n#)+ .*": about,
        r"(?<=--job-name=).*": shlex.quote(planned["name"]),
        r"(?<=--nodes=).*": str(nodes),
        r"((?<=--gpus-per-node=)|(?<=LOCAL_DEVICES:-))\d+": str(devices // nodes),
        # An hour is for compiling, validation and saving; a longer run goes on in the next job.
        r"(?<=--time=).*": f"{min(24, math.ceil(hours[-1]) + 1):02d}:00:00",
        r'(?<=lrkv train )"\$@"': f'{shlex.join(words)} "$@"',
    }
    if devices // nodes < device["node"]:  # the rest of the node is for others
        changes[r"^# The whole node.*\n#SBATCH --exclusive\n#SBATCH --mem=0\n"] = ""
    for pattern, new in changes.items():
        text = re.sub(pattern, new.replace("\\", r"\\"), text, flags=re.M)
    return text


def _memory(training: dict[str, Any]) -> list[str]:
    memory, step = training["memory"], training["compiled"]
    policies, chosen = memory["estimates"], memory["remat"]
    rows = [
        [name, *(f"{memory[name] / GIGA:.2f}" for _ in policies)]
        for name in ("parameters", "optimizer", "gradients")
    ]
    rows += [
        [name, *(f"{policy[name] / GIGA:.2f}" for policy in policies.values())]
        for name in ("activations", "loss", "total")
    ]
    headers = ["train.remat", *(f"{p}*" if p == chosen else p for p in policies)]
    legend = (
        "State and gradients are counted. The rest is an estimate: activations are what the "
        "forward pass leaves for the backward pass, loss the work of one chunk of logits."
    )
    parts = ["Memory of one device, GB, estimated", tabulated(headers, rows, form="simple")]
    parts.append(_wrapped(legend))
    if step:
        parts.append(
            _wrapped(
                f"Compiled by XLA for {training['devices']} simulated CPU devices in "
                f"{step['seconds']:.0f} s: {step['arguments'] / GIGA:.3g} GB of arguments and "
                f"{step['temporary'] / GIGA:.3g} GB of temporaries per device."
            )
        )
    return [*parts, _wrapped(training["verdict"]["sentence"])]


def _decoding(planned: dict[str, Any]) -> list[str]:
    device = planned["hardware"]
    length = next(iter(planned["variants"].values()))["decode"]["length"]
    headers = (
        "variant", "weights\nGB", "cache\nGB", "largest\nbatch", "ms,\none", "ms,\nbatch",
        "tok/s", "FLOPs\n/byte",
    )  # fmt: skip
    rows = []
    for name, costs in planned["variants"].items():
        one = costs["decode"]
        rows.append(
            [
                name,
                f"{one['weights'] / GIGA:.3g}",
                f"{one['cache_per_sequence'] / GIGA:.2g}",
                f"{one['largest_batch']:,}",
                f"{1e3 * one['floor_of_one']:.2g}",
                f"{1e3 * one['floor']:.3g}" if one["largest_batch"] else "-",
                _human(round(one["tokens_per_second"])),
                f"{one['flops_per_byte']:.0f}",
            ]
        )
    ridge = device["bf16_flops"] / device["memory_bandwidth"]
    legend = (
        "Weights, and the cache of one sequence, in bfloat16; the batch fills "
        f"{device['decode_usable']:.0%} of the memory. A step reads all weights but the "
        "embedding's table, and all caches: it takes no less than that does. Attention with more "
        f"than {ridge:.0f} FLOPs per cached byte is bound by arithmetic instead."
    )
    title = f"Decoding on one {device['name']}, {length:,} tokens in each cache, at the bandwidth"
    return [title, tabulated(headers, rows, form="simple"), _wrapped(legend)]


def _human(count: int) -> str:
    """162.2M, 6.85B."""
    if count >= 1e9:
        return f"{count / 1e9:.2f}B"
    return f"{count / 1e6:.1f}M" if count >= 1e6 else f"{count / 1e3:.1f}K"
