"""What a server of DeepSeek's models is tested with: `python deepseek_folder.py FOLDER`.

FOLDER is the export of a run that it trains for a minute, in DeepSeek's widths, 512 + 64;
FOLDER.json has prompts, the text and ids that lrkv_jax continues them with, and the cache's size.
"""

import json
import sys
from pathlib import Path

from lrkv_jax import Engine, load_config, load_run, train
from lrkv_jax.interop.export import export

SETTINGS = (
    "attention=lrkv_deepseek", "model.heads=14", "model.head_width=64", "attention.rank=16",
    "model.layers=2", "model.unroll=2", "model.gated=true", "model.activation=silu",
    "model.softcap=null", "train.global_batch_size=4", "train.validate_every=0",
    "train.save_every=0",
)  # fmt: skip
OPENING = "Mr. Speaker, Mr. Vice President, Members of Congress, and fellow Americans: "
PROMPTS = (
    "The", "We will not", "The state of our union", "My fellow Americans, tonight I",
    "In the year 1862", "War", "Our navy is",
    "Peace in the world depends on the strength of its free nations, and",
    *(OPENING + more for more in ("our economy", "the schools of our country", "as I")),
    "The Congress and the President must act together on taxes, on roads and on the army. " * 3,
)  # fmt: skip
NEW, LENGTH = 180, 256


def make(folder: Path, steps: int = 100) -> None:
    run_dir = folder.with_name(f"{folder.name}.run")
    train(load_config("nano", [*SETTINGS, f"train.steps={steps}", f"run_dir={run_dir}"]))
    export(run_dir, folder, deepseek=True)
    run = load_run(run_dir)
    prompts = [run.ids(text) for text in PROMPTS]
    continued = Engine(run, batch=len(prompts), length=LENGTH).generate(prompts, NEW)
    model = run.config.model
    expected = {
        "layers": model.layers, "heads": model.heads, "head_width": model.head_width,
        "cached_values": model.attention.cache_values(model), "length": LENGTH,
        "prompts": prompts, "ids": continued, "texts": [run.tokenizer.decode(i) for i in continued],
    }  # fmt: skip
    folder.with_name(f"{folder.name}.json").write_text(json.dumps(expected))


if __name__ == "__main__":
    make(Path(sys.argv[1]))
