"""The same model in two forms, served from equal bytes: `python bench_serve.py NAME=FOLDER ...`.

Serves each folder in turn by `vllm serve` on this machine, sends it the requests of `vllm bench
serve`, and prints pages, requests that ran at once, and times, over the first folder's.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "tests"))
from servers import label, metric, served  # noqa: E402

ROWS = {
    "pages of the pool": "pages",
    "requests running, at most": "running",
    "median time to the first token, ms": "median_ttft_ms",
    "90th percentile of the same, ms": "p90_ttft_ms",
    "median time per output token, ms": "median_tpot_ms",
    "output tokens per second": "output_throughput",
}


def measured(folder, options):
    """What `vllm bench serve` and the server's own metrics say of a folder."""
    server = (
        "--kv-cache-memory-bytes", str(options.bytes), "--block-size", str(options.block_size),
        "--max-num-seqs", "256", "--no-enable-prefix-caching",
    )  # fmt: skip
    with served(folder, *server) as address, tempfile.TemporaryDirectory() as out:
        running, done = [], threading.Event()

        def watch():
            while not done.wait(0.2):
                running.append(metric(address, "vllm:num_requests_running"))

        client = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url",
            address, "--model", "model", "--tokenizer", str(folder), "--dataset-name", "random",
            "--random-input-len", str(options.input), "--random-output-len", str(options.output),
            "--num-prompts", str(options.requests), "--request-rate", options.rate, "--seed", "0",
            "--ignore-eos", "--percentile-metrics", "ttft,tpot", "--metric-percentiles", "90",
            "--disable-tqdm", "--save-result", "--result-dir", out, "--result-filename", "r.json",
        ]  # fmt: skip
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            subprocess.run(client, check=True, stdout=subprocess.DEVNULL)
        finally:
            done.set()
            watcher.join()
        found = json.loads((Path(out) / "r.json").read_text())
        if found["completed"] != options.requests:
            raise RuntimeError(
                f"{folder}: {found['completed']} of {options.requests} were answered"
            )
        pages = label(address, "vllm:cache_config_info", "num_gpu_blocks")
    return found | {"running": max(running), "pages": pages}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--bytes", type=int, default=8 << 20, help="of the pool of pages")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--input", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=96, help="tokens of an answer")
    parser.add_argument("--rate", default="inf", help="requests per second")
    parser.add_argument("--samples", type=int, default=1, help="of each, in turn")
    options = parser.parse_args()
    folders = dict(each.split("=", 1) for each in options.folders)
    samples = {name: [] for name in folders}
    for _ in range(options.samples):
        for name, folder in folders.items():
            samples[name].append(measured(Path(folder).resolve(), options))
    first = next(iter(folders))
    for title, key in ROWS.items():
        line = f"{title:36}"
        for name, found in samples.items():
            line += f"  {name} {statistics.median(one[key] for one in found):.1f}"
            if name != first:
                ratios = [one[key] / of[key] for one, of in zip(found, samples[first], strict=True)]
                line += (
                    f" ({statistics.median(ratios):.2f}: {min(ratios):.2f} to {max(ratios):.2f})"
                )
        print(line)


if __name__ == "__main__":
    main()
