"""The held-out loss of a run as transformers computes it, beside ours: docs/interop.md.

    lrkv evaluate runs/smollm2 --tasks bpb --batch 4
    python experiments/transformers_loss.py runs/smollm2 MY_FOLDER --torch-python PYTHON

MY_FOLDER is what the run was imported from, or what it was exported to. PYTHON has torch and
transformers, and reads the run's records from a file. Ten minutes of a core for SmolLM2-135M.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import numpy as np

THEIRS = """
import sys
import numpy as np, torch
from transformers import AutoModelForCausalLM
folder, rows, bos = sys.argv[1], np.load(sys.argv[2]), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
total, count = 0.0, 0
for row in torch.tensor(rows, dtype=torch.int64):
    with torch.no_grad():
        logits = model(row[None, :-1]).logits[0]
    targets = row[1:]
    losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    counted = targets != bos
    total, count = total + losses[counted].double().sum().item(), count + counted.sum().item()
print(f"{total / count:.6f} nats a token on {count:,} tokens")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run")
    parser.add_argument("folder")
    parser.add_argument("--torch-python", required=True, metavar="PYTHON")
    parser.add_argument("--records", type=int, help="only so many of the held-out records")
    given = parser.parse_args()
    from lrkv_jax.data.loader import heldout_batches
    from lrkv_jax.data.tokenizer import load_tokenizer
    from lrkv_jax.training.run_dir import read_run

    config = read_run(given.run)
    batches = heldout_batches(config.data, config.train.context, 1, some=given.records)
    bos = load_tokenizer(config.data.tokenizer).bos
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.npy"
        np.save(rows, np.concatenate(list(batches)))
        command = [given.torch_python, "-c", THEIRS, given.folder, str(rows), str(bos)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
