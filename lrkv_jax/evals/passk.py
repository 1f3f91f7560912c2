"""pass@k of sampled programs."""

from __future__ import annotations

import math

from lrkv_jax.errors import LrkvError
from lrkv_jax.evals.benchmark import Result, measured


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k programs, drawn from n of which c pass, passes.

    The unbiased estimator of Chen et al. (2021), equation 1: 1 - C(n - c, k) / C(n, k), as the
    product over i = n - c + 1 .. n of 1 - k / i, in which nothing overflows. Raises LrkvError for
    k outside 1 .. n and c outside 0 .. n.
    """
    if not 1 <= k <= n:
        raise LrkvError(f"pass@{k} needs at least {max(k, 1)} samples of each problem, not {n}")
    if not 0 <= c <= n:
        raise LrkvError(f"pass@{k}: {c} of {n} samples cannot have passed")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def passed(records: list[dict]) -> Result:
    """pass@1, and pass@k for powers of two up to the samples, from each record's `correct`."""
    samples = len(records[0]["correct"])
    more: dict = {"samples": samples}
    for k in (2**n for n in range(samples.bit_length())):
        rates = [pass_at_k(samples, sum(record["correct"]), k) for record in records]
        more |= measured(f"pass@{k}", rates)
    return Result("pass@1", more["pass@1"], records, more)
