"""What transformers makes of exported folders, in JSON.

`python reload.py OUT "[IDS, PROMPT, CHAT]" FOLDER...`
Needs torch and transformers; the tests run it with the interpreter that has them.
"""

import json
import sys
import tempfile

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    StaticCache,
    pipeline,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

TARGET, GIVEN, *FOLDERS = sys.argv[1:]
IDS, PROMPT, CHAT = json.loads(GIVEN)
CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"
STEPS = 8


def reloaded(folder, ids):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=True, output_loading_info=True
    )
    # The tokenizer is transformers' own: it runs no code of the folder.
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = torch.tensor(ids)
    with torch.no_grad():
        out = model(ids, use_cache=True)
        new = model.generate(**prompt, max_new_tokens=24, do_sample=False)
        factored = None
        if type(model).__name__ == "LrkvForCausalLM":
            decodes = [decoded(model, ids[0], **how) for how in DECODES]
            factored = {
                "decodes": [*decodes, *padded(model, ids[0]), continued(model, ids[0])],
                "differences": differences(model, ids, folder),
                "refusals": refusals(model, ids),
                "pipeline": piped(folder),
            }
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
        "cache_bytes_per_token": cache_bytes(getattr(out, CACHE)) / ids.shape[1],
        "chat": chat,
        "factored": factored,
    }


def cache_bytes(cache):
    """What the layers hold of tokens; positions are the whole model's, not a layer's."""
    held = [
        x for layer in cache.layers for name, x in vars(layer).items()
        if isinstance(x, torch.Tensor) and name != "positions"
    ]  # fmt: skip
    return sum(x.numel() * x.element_size() for x in held)


DECODES = (
    {"name": "greedy"},
    {"name": "greedy-no-cache", "use_cache": False},
    {"name": "sampled", "do_sample": True, "temperature": 0.8, "top_k": 50},
    {"name": "sampled-no-cache", "do_sample": True, "temperature": 0.8, "top_k": 50,
     "use_cache": False},
    {"name": "beams", "num_beams": 3},
    {"name": "beams-no-cache", "num_beams": 3, "use_cache": False},
    {"name": "prompt-lookup", "prompt_lookup_num_tokens": 3},
)  # fmt: skip


def decoded(model, prompt, name, do_sample=False, **how):
    """One of `generate`'s ways: its sequence, and the logits that each new token was chosen by."""
    torch.manual_seed(0)
    out = model.generate(
        prompt[None], attention_mask=torch.ones_like(prompt[None]), do_sample=do_sample,
        max_new_tokens=STEPS, min_new_tokens=STEPS, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **how,
    )  # fmt: skip
    beams = out.get("beam_indices")
    rows = [0] * STEPS if beams is None else beams[0, :STEPS].tolist()
    logits = [step[row].tolist() for step, row in zip(out.logits, rows, strict=True)]
    return {"name": name, "sequence": out.sequences[0].tolist(), "logits": logits}


def padded(model, prompt):
    """Two prompts of different lengths in one batch, the shorter with padding on its left."""
    short = prompt[:5]
    ids = torch.stack([prompt, torch.cat([torch.zeros_like(prompt[5:]), short])])
    mask = torch.ones_like(ids)
    mask[1, : len(prompt) - 5] = 0
    for ending, use_cache in (("", True), ("-no-cache", False)):
        out = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=STEPS, min_new_tokens=STEPS,
            pad_token_id=0, output_logits=True, return_dict_in_generate=True, use_cache=use_cache,
        )  # fmt: skip
        for row in range(2):
            there = out.sequences[row, 0 if row == 0 else len(prompt) - 5 :]
            logits = [step[row].tolist() for step in out.logits]
            yield {"name": f"padded-{row}{ending}", "sequence": there.tolist(), "logits": logits}


def continued(model, prompt):
    """A second turn, whose prompt goes on where the first one's cache ends."""
    first = model.generate(
        prompt[None, :6], do_sample=False, max_new_tokens=4, min_new_tokens=4, pad_token_id=0,
        return_dict_in_generate=True,
    )  # fmt: skip
    ids = torch.cat([first.sequences[0], prompt[:4]])
    return decoded(model, ids, name="second-turn", **{CACHE: getattr(first, CACHE)})


def differences(model, ids, folder):
    """The largest differences of logits between two ways to the same ones."""
    whole = model(ids).logits
    T = ids.shape[1]
    cache, steps = None, []
    for first, last in ((0, 5), (5, 6), (6, 11), *((t, t + 1) for t in range(11, T))):
        out = model(ids[:, first:last], use_cache=True, **{CACHE: cache})
        cache = getattr(out, CACHE)
        steps.append(out.logits)
    # Positions with gaps, by themselves and shifted: rotation depends on their differences alone.
    gaps = (torch.arange(T) + 3 * (torch.arange(T) > 7))[None]
    gapped, shifted = (model(ids, position_ids=gaps + by).logits for by in (0, 4))
    out = model(ids[:, :10], position_ids=gaps[:, :10], use_cache=True)
    rest = model(ids[:, 10:], position_ids=gaps[:, 10:], **{CACHE: getattr(out, CACHE)}).logits
    cached_gaps = torch.cat([out.logits, rest], 1)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        again = AutoModelForCausalLM.from_pretrained(
            saved, dtype=torch.float32, trust_remote_code=True
        )
        resaved = again(ids).logits
    labels = torch.where(torch.arange(T) < 4, -100, ids)
    nats = -whole[0, 3:-1].log_softmax(-1)[torch.arange(T - 4), ids[0, 4:]]
    columns = torch.tensor([2, 7])
    pairs = {
        "no cache": (whole, model(ids, use_cache=False).logits),
        "steps": (whole, torch.cat(steps, 1)),
        "default positions": (whole, model(ids, position_ids=torch.arange(T)[None]).logits),
        "shifted gaps": (gapped, shifted),
        "cached gaps": (gapped, cached_gaps),
        "embedded": (whole, embedded),
        "saved": (whole, resaved),
        "kept columns": (whole[:, columns], model(ids, logits_to_keep=columns).logits),
        "tuple": (whole, model(ids, return_dict=False)[0]),
        "loss": (nats.mean(), model(ids, labels=labels).loss),
    }  # fmt: skip
    found = {name: (a - b).abs().max().item() for name, (a, b) in pairs.items()}
    return found | {"gaps matter": (whole - gapped).abs().max().item()}


def refusals(model, ids):
    """The error of each thing that the class does not do."""
    full = DynamicCache()
    full.update(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8), 0)
    T = ids.shape[1]
    calls = {
        "unknown": {"kv_state": DynamicCache()},
        "static": {CACHE: StaticCache(config=model.config, max_cache_len=32)},
        "other": {CACHE: full},
        "mask": {"attention_mask": torch.ones(1, 1, T, T)},
        "positions": {"position_ids": torch.arange(T + 1)[None]},
        "attentions": {"output_attentions": True},
    }
    found = dict.fromkeys(calls)
    for name, how in calls.items():
        try:
            model(ids, **how)
        except (TypeError, ValueError, NotImplementedError) as error:
            found[name] = str(error)
    return found


def piped(folder):
    generator = pipeline("text-generation", model=str(folder), trust_remote_code=True,
                         dtype=torch.float32)  # fmt: skip
    out = generator(PROMPT, max_new_tokens=24, do_sample=False, return_full_text=False)
    return out[0]["generated_text"]


if __name__ == "__main__":
    found = {folder: reloaded(folder, IDS) for folder in FOLDERS}
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    with open(TARGET, "w") as file:
        json.dump({**versions, "folders": found}, file)
