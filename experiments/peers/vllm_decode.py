"""A folder in vLLM, float32 and greedily: a peer of `peers.py`, as transformers_decode.py is."""

import os
import time

# Read when vLLM is imported: one process, and no cache of kernels of another machine.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}

import vllm
from answering import answer


def make(folder, requests, length, threads, **_):
    os.environ["OMP_NUM_THREADS"] = str(threads)
    model = vllm.LLM(
        folder, dtype="float32", max_model_len=length, max_num_seqs=requests,
        enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip

    def generate(prompts, new):
        how = vllm.SamplingParams(temperature=0, max_tokens=new, min_tokens=new, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        found = model.generate(asked, how, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "tokens": [list(f.outputs[0].token_ids) for f in found]}

    return f"vllm {vllm.__version__}", generate


if __name__ == "__main__":
    answer(make)
