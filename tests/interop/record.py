"""Record what transformers makes of tiny models, chats and texts, for tests without it.

`python record.py [FOLDER_OF_SMOLLM2]` needs torch, transformers, and tests/ on PYTHONPATH.
`recorded.json` holds each model's configuration, the shapes of its tensors, and a few columns of
its logits; its weights are `support.planted_models.drawn` from the shapes. `recorded_chats.json`
holds the chats, the texts, and for each tokenizer of `support.chat_folders` the rendered chats
(null: the template refuses it) and ids. SmolLM2's own are recorded too where its folder is given;
else those that are there stay.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import torch
from support.chat_folders import FOLDERS
from support.planted_models import IDS, drawn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

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
    "mistral-window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "nanochat": ("nanochat", {"num_key_value_heads": 1}),
    "arcee": ("arcee", {}),
}
WORDS = (
    "the", "state of", "Union,", "cache\n", " 128", "\n\n", "  ", "\t", "it's", "日本", "é",
    "e\u0301", "👩\u200d👩", "don't", "{{ x }}", "{% if %}", "<b>", "&amp;", "'quoted'", '"', "\\n",
    "1,024.5", "ÿ", "…", "A", "▁", "\r\n", "naïve", "Ω≈ç", "def f(x):\n    return x", "#",
    "</think>", "<think>",
)  # fmt: skip


def model(kind, changes):
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


def texts(count):
    draw = random.Random(0)
    made = ["", " ", "\n", "a", "  leading", "trailing  ", "日本語", "\n\n\n"]
    while len(made) < count:
        made.append(
            "".join(draw.choice(["", " "]) + draw.choice(WORDS) for _ in range(draw.randint(1, 7)))
        )
    return made


def chats(count):
    draw, made = random.Random(1), []

    def words():
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(1, 6)))
        return text if text.strip() else "x"

    while len(made) < count:
        turns = [{"role": "system", "content": words()}] if draw.random() < 0.4 else []
        for number in range(2 * draw.randint(0, 2) + 1):
            turns.append({"role": ("user", "assistant")[number % 2], "content": words()})
        if draw.random() < 0.15:  # which some templates refuse
            turns.append({"role": draw.choice(["user", "system"]), "content": words()})
        made.append(turns)
    return made


def tokenizer(folder, said, asked):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rendered, ids = [], []
    for turns in said:
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            found = tokenizer.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        except Exception:
            text = found = None
        rendered.append(text)
        ids.append(found)
    return {"chats": rendered, "chat_ids": ids, "text_ids": tokenizer(asked)["input_ids"]}


def written(found, **how):
    """A mapping with each of its values on a line."""
    lines = (f'"{name}": {json.dumps(value, **how)}' for name, value in found.items())
    return "{\n" + ",\n".join(lines) + "\n}"


if __name__ == "__main__":
    (HERE / "recorded.json").write_text(written({n: model(*c) for n, c in CASES.items()}) + "\n")
    target = HERE / "recorded_chats.json"
    before = json.loads(target.read_text())["of"] if target.is_file() else {}
    said, asked = chats(60), texts(500)
    found = {"smollm2": before["smollm2"]} if "smollm2" in before else {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, make in FOLDERS.items():
            found[name] = tokenizer(make(Path(scratch) / name), said, asked)
    for folder in sys.argv[1:]:
        found["smollm2"] = tokenizer(folder, said, asked)
    small = {"separators": (",", ":")}
    parts = written({"messages": said, "texts": asked}, **small).removesuffix("\n}")
    target.write_text(f'{parts},\n"of": {written(found, **small)}\n}}\n')
