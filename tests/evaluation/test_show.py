"""What an evaluation prints."""

import io

from rich.console import Console

from lrkv_jax.evaluation.show import print_evaluation


def test_bytes_of_a_cache_stand_beside_their_dtype():
    """A float32 run on a CPU: the bfloat16 figure is the one of plan, card and quickstart."""
    result = {
        "run": "runs/quickstart-lrkv", "attention": "lrkv", "step": 200, "parameters": 1,
        "kv_cache_dtype": "float32", "kv_cache_bytes_per_token": 2112.0,
        "kv_cache_bytes_per_token_bfloat16": 1088,
    }  # fmt: skip
    text = io.StringIO()
    print_evaluation(result, Console(file=text, width=100, markup=False))
    lines = [line.split() for line in text.getvalue().splitlines() if "bytes per token" in line]
    assert [line[-1] for line in lines] == ["1,088", "2,112"]
    assert [line[4].rstrip(",") for line in lines] == ["bfloat16", "float32"]
