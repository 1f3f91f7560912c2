"""A folder in transformers, float32 and greedily: a peer of `peers.py`.

    {"folder": DIR, "requests": N, "length": N, "threads": N, "cache": "dynamic" or "static"}
    {"prompts": [[id, ...], ...], "new": N}     -> {"seconds", "tokens": [[id, ...], ...]}

Prompts are of one length. As its users write it: eager, the whole batch in one `generate`.
"""

import time

import torch
import transformers
from answering import answer


def make(folder, threads, cache, **_):
    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True
    )

    @torch.no_grad()
    def generate(prompts, new):
        ids = torch.tensor(prompts)
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        if cache == "static":
            how["cache_implementation"] = cache
        start = time.perf_counter()
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": out[:, ids.shape[1] :].tolist()}

    return f"transformers {transformers.__version__}, torch {torch.__version__}", generate


if __name__ == "__main__":
    answer(make)
