"""What transformers makes of exported folders: `python reload.py OUT IDS FOLDER...`, in JSON.

Needs torch and transformers; the tests run it with the interpreter that has them.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "The state of the union"
CHAT = [
    {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Bye"},
]  # fmt: skip


def reloaded(folder, ids):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True, output_loading_info=True
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        out = model(torch.tensor(ids), use_cache=True)
        new = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    held = [
        x for layer in out.past_key_values.layers for x in vars(layer).values()
        if isinstance(x, torch.Tensor)
    ]  # fmt: skip
    length = prompt.input_ids.shape[1]
    chat = None
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        chat = tokenizer(text, add_special_tokens=False).input_ids
    return {
        "class": type(model).__name__,
        "wrong": {key: sorted(map(str, found)) for key, found in report.items() if found},
        "logits": out.logits.tolist(),
        "prompt": prompt.input_ids[0].tolist(),
        "text": tokenizer.decode(new[0, length:], skip_special_tokens=True),
        "cache_bytes_per_token": sum(x.numel() * x.element_size() for x in held) / len(ids[0]),
        "chat": chat,
    }


if __name__ == "__main__":
    target, ids, *folders = sys.argv[1:]
    found = {folder: reloaded(folder, json.loads(ids)) for folder in folders}
    with open(target, "w") as file:
        json.dump(found, file)
