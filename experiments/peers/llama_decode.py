"""A folder of transformers' Llama class in llama.cpp, float32 and greedily: a peer of `peers.py`.

Needs llama-cpp-python, gguf and safetensors, and takes transformers_decode.py's orders. The folder
is first written as a GGUF file without a vocabulary: requests are token ids.
"""

import json
import tempfile
import time
from pathlib import Path

import gguf
import llama_cpp as api
import numpy as np
from answering import answer
from safetensors.numpy import load_file

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(folder, path):
    config = json.loads((Path(folder) / "config.json").read_text())
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"{folder} is a {config['architectures'][0]}, and not of Llama's class")
    H, G, D = (config[n] for n in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    K = config.get("head_dim") or D // H
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(D)
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(H)
    out.add_head_count_kv(G)
    out.add_key_length(K)
    out.add_value_length(K)
    out.add_rope_dimension_count(K)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    out.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    out.add_vocab_size(config["vocab_size"])
    out.add_tokenizer_model("no_vocab")
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    for name, array in tensors.items():
        array = array.astype(np.float32)
        if name == "model.embed_tokens.weight":
            out.add_tensor("token_embd.weight", array)
        elif name == "model.norm.weight":
            out.add_tensor("output_norm.weight", array)
        elif name == "lm_head.weight":
            out.add_tensor("output.weight", array)
        else:
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            if part.endswith(("q_proj", "k_proj")):  # pairs of neighbours, not of halves
                n = H if part.endswith("q_proj") else G
                array = array.reshape(n, 2, K // 2, D).swapaxes(1, 2).reshape(n * K, D)
            out.add_tensor(f"blk.{layer}.{NAMES[part]}.weight", np.ascontiguousarray(array))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


class Model:
    def __init__(self, folder, requests, length, threads):
        api.llama_backend_init()
        with tempfile.TemporaryDirectory() as made:
            path = f"{made}/model.gguf"
            write_gguf(folder, path)
            self.model = api.llama_model_load_from_file(
                path.encode(), api.llama_model_default_params()
            )
        how = api.llama_context_default_params()
        how.n_ctx = requests * length
        how.n_batch = how.n_ubatch = 512
        how.n_seq_max = requests
        how.n_threads = how.n_threads_batch = threads
        how.type_k = how.type_v = api.GGML_TYPE_F32
        self.context = api.llama_init_from_model(self.model, how)
        self.vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch = api.llama_batch_init(512, 0, 1)

    def decode(self, rows):
        """Read (token, position, sequence, whether its logits are wanted); → likeliest tokens."""
        b = self.batch
        b.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            b.token[i], b.pos[i], b.n_seq_id[i] = token, position, 1
            b.seq_id[i][0], b.logits[i] = sequence, wanted
        if api.llama_decode(self.context, b):
            raise RuntimeError("llama_decode failed")
        logits = {
            row[2]: np.ctypeslib.as_array(
                api.llama_get_logits_ith(self.context, i), (self.vocabulary,)
            ).argmax()
            for i, row in enumerate(rows)
            if row[3]
        }
        return {sequence: int(token) for sequence, token in logits.items()}

    def generate(self, prompts, new):
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        last, texts = {}, [[] for _ in prompts]
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(rows), 512):
            last |= self.decode(rows[start : start + 512])
        for _ in range(new - 1):
            for sequence, token in last.items():
                texts[sequence].append(token)
            last = self.decode([
                (last[s], len(prompts[s]) + len(text) - 1, s, True) for s, text in enumerate(texts)
            ])  # fmt: skip
        for sequence, token in last.items():
            texts[sequence].append(token)
        return texts


def make(folder, requests, length, threads, **_):
    model = Model(folder, requests, length, threads)

    def generate(prompts, new):
        start = time.perf_counter()
        tokens = model.generate(prompts, new)
        return {"seconds": time.perf_counter() - start, "tokens": tokens}

    return f"llama.cpp of llama-cpp-python {api.__version__}", generate


if __name__ == "__main__":
    quiet = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(quiet, None)
    answer(make)
