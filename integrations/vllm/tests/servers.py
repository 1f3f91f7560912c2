"""`vllm serve` on this machine, and many requests at once."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI


@contextlib.contextmanager
def served(folder, *options, seconds=180, **variables):
    """The address of a server of a folder; it ends with the block. Raises what it printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), "--host",
        "127.0.0.1", "--port", str(port), "--dtype", "float32", "--served-model-name", "model",
        *options,
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env=os.environ | variables,
        )  # fmt: skip
        address = f"http://127.0.0.1:{port}"
        try:
            for _ in range(seconds):
                time.sleep(1)
                if process.poll() is not None:
                    break
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{address}/health", timeout=5)
                    yield address
                    return
            log.seek(0)
            said = log.read()
            # The first failure is the cause of those behind it.
            raise RuntimeError((said.partition("Traceback")[2] or said)[:6000])
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def series(address, pattern):
    """What a pattern finds in the server's series for Prometheus, line by line."""
    text = urllib.request.urlopen(f"{address}/metrics", timeout=30).read().decode()
    return re.findall(pattern, text, re.MULTILINE)


def metric(address, name):
    """The sum of a series."""
    return sum(map(float, series(address, rf"^{name}(?:{{.*}})? (.+)$")))


def label(address, name, which):
    """A number that is a label of a series."""
    return int(series(address, rf'^{name}{{.*{which}="(\d+)"')[0])


def completed(address, prompts, tokens, together=16):
    """The greedy token ids of each prompt, `together` requests at a time."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", timeout=600)

    def one(prompt):
        answer = client.completions.create(
            model="model", prompt=prompt, max_tokens=tokens, temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        return answer.choices[0].token_ids

    with ThreadPoolExecutor(together) as pool:
        return list(pool.map(one, prompts))
