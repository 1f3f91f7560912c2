"""What the hybrids' caches hold, and how long a step of decoding takes behind 32,768 tokens, here.

    python experiments/mechanism/costs.py [--length 32768] [--out hybrids_costs.json]

The models are those of hybrids.yaml with weights as drawn, and MHA without windows. All programs
are timed in rounds, one text each, in float32.
"""

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from mechanism import design  # noqa: E402

from lrkv_jax.config import ModelConfig, load_config  # noqa: E402
from lrkv_jax.distributed import start  # noqa: E402
from lrkv_jax.files import write_json  # noqa: E402
from lrkv_jax.lab.bench.clock import Timer, interleaved, quartiles, timer  # noqa: E402
from lrkv_jax.lab.bench.report import machine  # noqa: E402
from lrkv_jax.models.accounting.counts import cache_allocated_bytes  # noqa: E402
from lrkv_jax.models.transformer import Transformer, Unstacked  # noqa: E402

STEPS = 16  # of a call
LENGTHS = (8192, 131072)  # whose caches are counted


def models() -> dict[str, ModelConfig]:
    """Each hybrid's model, and MHA's whose layers all see everything."""
    path = HERE / design.HYBRIDS.config
    plain = ["model.layers_pattern=null", "model.window=null", "model.window_attention=null"]
    settings = {"mha, no windows": ["attention=mha", *plain]}
    settings |= {name: [f"attention={name}"] for name in design.HYBRIDS.variants}
    return {name: load_config(path, some).model for name, some in settings.items()}


def decoding(config: ModelConfig, length: int) -> Timer:
    """A timer of a call of `STEPS` greedy tokens, the last of them behind `length` others."""
    model = Unstacked(Transformer(config, rngs=nnx.Rngs(0)))
    cache = jax.tree.map(lambda array: array + 0.01, model.init_cache(1, length))

    @jax.jit
    def steps(model, cache):
        def step(at, carry):
            token_B, cache = carry
            lengths_B = jnp.full(1, length - STEPS + at)
            x_BTD, cache = model.decode(token_B[:, None], cache, lengths_B)
            return model.logits(x_BTD)[:, 0].argmax(-1).astype(jnp.int32), cache

        return jax.lax.fori_loop(0, STEPS, step, (jnp.zeros(1, jnp.int32), cache))[0]

    return timer(steps, [(model, cache)], 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=32768, help="tokens in the cache at the end")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "results/mechanism/hybrids_costs.json"
    )
    chosen = parser.parse_args()
    start()
    found = models()
    taken = interleaved(
        [decoding(config, chosen.length) for config in found.values()], chosen.rounds, 60.0
    )
    rows = {
        name: {
            "bytes": {length: cache_allocated_bytes(config, length) for length in LENGTHS},
            "ms": [1e3 * seconds / STEPS for seconds in quartiles(times)],
        }
        for (name, config), times in zip(found.items(), taken, strict=True)
    }
    report = {**machine(), "length": chosen.length, "variants": rows}
    write_json(chosen.out, report)
    for name, row in rows.items():
        print(f"{name:18} {row['bytes']} {row['ms'][1]:.2f} ms")


if __name__ == "__main__":
    main()
