"""Exported runs, and what lrkv_jax says of prompts: `export_runs.py FOLDER`.

Runs in lrkv_jax's environment; the tests beside it, in vLLM's, read what it writes. Weights are
random, but those of `deepseek`, which is trained for a minute in DeepSeek's widths, 512 + 64.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3] / "tests"))
from support.planted_models import plant  # noqa: E402

from lrkv_jax import Engine, Sampling, load_config, load_run, train  # noqa: E402
from lrkv_jax.interop.export import export  # noqa: E402

GAINS = ("model.qk_gain=true", "model.qkv_bias=true")
MLA = ("attention=mla", "attention.rope=full", "attention.qk_rope_head_dim=0")
CASES = {
    "full": ("attention=lrkv", "attention.rank=3"),
    "shared": ("attention.rope=shared", "attention.kv_heads=2"),
    "latent": ("attention.rank_value=5", "model.tied_head=true"),
    "gains": ("attention=lrkv", "attention.kv_heads=2", *GAINS),
    "mla": (*MLA, "attention.rank=3", "attention.kv_heads=2", *GAINS),
    "mla_plain": (*MLA, "attention.latent_norm=false", "model.qk_norm=false"),
}
DEEPSEEK = (
    "attention=lrkv_deepseek", "model.heads=14", "model.head_width=64", "attention.rank=16",
    "model.layers=2", "model.unroll=2", "model.gated=true", "model.activation=silu",
    "model.softcap=null", "train.global_batch_size=4", "train.validate_every=0",
    "train.save_every=0", "train.steps=100",
)  # fmt: skip
OPENING = "Mr. Speaker, Mr. Vice President, Members of Congress, and fellow Americans: "
TEXTS = (
    "The", "We will not", "The state of our union", "My fellow Americans, tonight I",
    "In the year 1862", "War", "Our navy is",
    "Peace in the world depends on the strength of its free nations, and",
    *(OPENING + more for more in ("our economy", "the schools of our country", "as I")),
    "The Congress and the President must act together on taxes, on roads and on the army. " * 3,
)  # fmt: skip


def ragged(vocabulary, number, longest):
    """Prompts of many lengths, half of which begin alike."""
    random = np.random.RandomState(0)
    shared = random.randint(0, vocabulary, longest // 2).tolist()
    lengths = random.randint(1, longest // 2, number)
    prompts = [random.randint(0, vocabulary, length).tolist() for length in lengths]
    return [shared + prompt if i % 2 else prompt for i, prompt in enumerate(prompts)]


def say(run, file, prompts, tokens):
    """Write prompts and the greedy tokens that follow them, whatever the stop tokens."""
    engine = Engine(run, batch=8, length=max(map(len, prompts)) + tokens)
    answers = engine.generate(prompts, tokens, sampling=Sampling(temperature=0))
    file.write_text(json.dumps({"prompts": prompts, "tokens": answers}))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, settings in CASES.items():
        plant(folder / f"{name}.run", "train.seq_len=256", *settings)
        export(folder / f"{name}.run", folder / name, form="factored")
        run = load_run(folder / f"{name}.run")
        number, tokens = (50, 100) if name == "full" else (6, 20)
        prompts = ragged(run.config.model.vocabulary, number, 120)
        say(run, folder / f"{name}.json", prompts, tokens)
    run_dir = folder / "deepseek.run"
    train(load_config("nano", [*DEEPSEEK, f"run_dir={run_dir}"]))
    export(run_dir, folder / "deepseek", form="deepseek")
    run = load_run(run_dir)
    say(run, folder / "deepseek.json", [run.ids(text) for text in TEXTS], 180)
