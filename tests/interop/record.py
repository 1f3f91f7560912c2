"""Record the logits of tiny models of transformers, for tests without it: `python record.py`.

Needs torch, transformers, and tests/ on PYTHONPATH. `recorded.json` holds each model's
configuration, the shapes of its tensors, and a few columns of its logits; its weights are
`support.planted_models.drawn` from the shapes.
"""

import json
from pathlib import Path

import torch
from support.planted_models import IDS, drawn
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
SHAPE = {
    "vocab_size": 272, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
CASES = {
    "llama-2": ("llama", {"num_key_value_heads": 4}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "rope_theta": 100000.0}),
    "mistral": ("mistral", {"sliding_window": 64, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "nanochat": ("nanochat", {"num_key_value_heads": 1}),
    "arcee": ("arcee", {}),
}


def recorded(kind, changes):
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **changes}))
    tied = model.config.tie_word_embeddings
    held = {n: p for n, p in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    shapes = {name: list(held[name].shape) for name in sorted(held)}
    model.load_state_dict({n: torch.tensor(a) for n, a in drawn(shapes).items()}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        logits = model.eval()(torch.tensor(IDS)).logits[0, :, :16]
    config = model.config.to_diff_dict()
    config["architectures"] = [type(model).__name__]
    numbers = [[round(x, 6) for x in row] for row in logits.tolist()]
    return {"config": config, "shapes": shapes, "logits": numbers}


if __name__ == "__main__":
    lines = {name: json.dumps(recorded(*case)) for name, case in CASES.items()}
    text = ",\n".join(f'"{name}": {line}' for name, line in lines.items())
    (HERE / "recorded.json").write_text(f"{{\n{text}\n}}\n")
