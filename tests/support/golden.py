"""The golden record: numbers that no restructuring may move.

`python tests/support/golden.py FILE` writes them: 20 steps of every variant on one device and on
2 × 2 × 2 simulated ones, a text of each, an evaluation, a converted model, and the counts of every
scale. Floats are written so that they can be compared to the bit on one kind of processor.
"""

import io
import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
)
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).parents[1]))

STEPS = 20
MLA_FULL = ("attention=mla", "attention.rope=full", "attention.qk_rope_head_dim=0")
VARIANTS = {
    "mha": ["attention=mha"],
    "gqa": ["attention=gqa"],
    "mqa": ["attention=mqa"],
    "mla": ["attention=mla"],
    "mla_full": [*MLA_FULL],
    "mla_private": [*MLA_FULL, "attention.rank=3"],
    "lrkv": ["attention=lrkv", "attention.rank=5"],
    "lrkv_latent": ["attention=lrkv_latent"],
    "lrkv_shared": ["attention=lrkv", "attention.rope=shared"],
    "lrkv_groups": ["attention=lrkv_latent", "attention.kv_heads=2"],
    "lrkv_ranks": ["attention=lrkv", "attention.rank_key=3", "attention.rank_value=6"],
}
SCALES = ("quickstart", "nano", "128m", "512m_8k", "1.2b", "2.5b", "6.3b")


def processor() -> str:
    """The kind of processor, as Linux names it."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    fields = dict(line.partition("\t: ")[::2] for line in lines)
    fields = {name.strip(): value.strip(": \t") for name, value in fields.items()}
    return " ".join(fields.get(name, "") for name in ("vendor_id", "cpu family", "model"))


def trained(folder, settings, devices):
    """A run's configuration, and the loss and gradient norm of each of its steps."""
    from rich.console import Console

    from lrkv_jax.config import load_config
    from lrkv_jax.training.loop import train

    changes = [f"run_dir={folder}", f"train.steps={STEPS}", "train.log_every=1"]
    config = load_config("quickstart", [*settings, *changes])
    train(config, console=Console(file=io.StringIO()), devices=devices)
    rows = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    found = [[row["loss"], row["grad_norm"]] for row in rows if "loss" in row]
    assert len(found) == STEPS
    return config, found


def counts():
    """Parameters, cached values and training FLOPs of every variant of every scale."""
    from lrkv_jax.config import load_config
    from lrkv_jax.models.accounting.counts import parameter_counts, training_flops_per_token

    found = {}
    for scale in SCALES:
        for variant in ("mha", "gqa", "mqa", "mla", "lrkv", "lrkv_latent"):
            model = (config := load_config(scale, [f"attention={variant}"])).model
            found[f"{scale} {variant}"] = [
                parameter_counts(model).total,
                model.layers * model.attention.cache_values(model),
                training_flops_per_token(model, config.train.seq_len),
            ]
    return found


def record(folder: Path) -> dict:
    """All of it, with runs in this folder."""
    import jax
    import numpy as np
    from support.tiny import TINY, few_pages

    from lrkv_jax.evaluation import evaluate
    from lrkv_jax.inference import Sampling
    from lrkv_jax.interop.convert import convert
    from lrkv_jax.training.restore import load_run

    (folder / "pages").mkdir()
    base = [*TINY, *few_pages(folder / "pages")]
    found = {"processor": processor(), "jax": jax.__version__, "counts": counts()}
    found |= {"alone": {}, "mesh": {}, "texts": {}}
    for name, settings in VARIANTS.items():
        here = folder / name
        _, found["alone"][name] = trained(here, [*base, *settings], jax.devices()[:1])
        meshes = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"]
        _, found["mesh"][name] = trained(f"{here}-mesh", [*base, *settings, *meshes], jax.devices())
        run = load_run(here)
        found["texts"][name] = [
            run.generate("My fellow", 24, sampling=Sampling()),
            run.generate("We", 24, sampling=Sampling(0.8, top_p=0.95), seed=3),
        ]
        print(name, found["alone"][name][-1], found["mesh"][name][-1], flush=True)
    evaluation = evaluate(folder / "lrkv", tasks=["bpb"])
    found["evaluation"] = {name: one for name, one in evaluation.items() if name != "run"}
    settings = ["attention=mla", "attention.rope=full", "attention.kv_lora_rank=20"]
    convert(folder / "mha", folder / "converted", settings, tokens=512, heldout=512)
    run = load_run(folder / "converted")
    ids = run.ids("My fellow citizens of the United States")
    found["converted"] = [float(x) for x in np.asarray(run.model(ids))[:, :50].sum(-1)]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        made = record(Path(directory))
    Path(sys.argv[1]).write_text(json.dumps(made, indent=1) + "\n")
