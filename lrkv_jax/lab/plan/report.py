"""The whole plan as one dictionary.

All is counted from the configuration, except the cache's live bytes: those are summed from the
buffers of a small cache that is really allocated. A training step on a mesh is compiled, or else
estimated in closed form; neither allocates anything.
"""

from dataclasses import asdict, dataclass
from typing import Any

from lrkv_jax.config import RunConfig
from lrkv_jax.distributed.hardware import hardware
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.plan.live_cache import live_cache_bytes_per_token
from lrkv_jax.models.accounting.counts import plan, with_mha
from lrkv_jax.models.accounting.serving import USABLE, serving


@dataclass(frozen=True)
class PlanOptions:
    """What a plan reports beyond the variants' costs.

    `training` adds a step on the mesh: `devices` fill an axis of −1, a node's unless given. The
    step is `compiled`, or else estimated. `length` is the number of tokens in a decoder's cache,
    the run's context unless given.
    """

    training: bool = False
    devices: int | None = None
    hardware: str = "h200"
    compiled: bool = False
    length: int | None = None


def report(
    config: RunConfig, names: list[str], options: PlanOptions = PlanOptions()
) -> dict[str, Any]:
    """The costs of the run under each variant of `names`, and what `options` add.

    Raises `LrkvError` for a variant that cannot have the model's shape, unknown hardware, and a
    mesh that the devices or the model cannot have.
    """
    device = hardware(options.hardware)
    if options.length is not None and options.length < 1:
        raise LrkvError(f"--length {options.length}: use 1 or more tokens")
    length = options.length or config.train.seq_len
    planned = plan(config, names)
    mha_bytes = live_cache_bytes_per_token(with_mha(config.model))
    for name, costs in planned["variants"].items():
        model = config.variant(name).model
        live = live_cache_bytes_per_token(model)
        costs["kv_cache_live_bytes_per_token"] = live
        costs["kv_cache_live_fraction_of_mha"] = live / mha_bytes
        decoding = serving(model, device, length)
        costs["decode"] = asdict(decoding) | {"tokens_per_second": decoding.tokens_per_second}
    planned["hardware"] = asdict(device) | {"decode_usable": USABLE}
    if options.training:
        # Imported here: the step and its optimizer take a second to load.
        from lrkv_jax.lab.plan.training import training

        planned["training"] = training(config, device, options.devices, compiled=options.compiled)
    return planned
