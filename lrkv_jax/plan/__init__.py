"""`lrkv plan`: what a run will need, before it is paid for.

| module | |
|---|---|
| `report` | everything as one dictionary, ready for JSON |
| `live_cache` | caches that are really allocated, and their live bytes |
| `training` | a step on a mesh of named devices: memory, collectives, time, Muon's share |
| `compiled`, `hlo` | XLA's own figures of the same step |
| `show` | the dictionary as text for a terminal |
"""

from lrkv_jax.plan.live_cache import LiveCache, live_cache_bytes_per_token, measure_cache
from lrkv_jax.plan.report import Question, report
from lrkv_jax.plan.show import print_plan

__all__ = [
    "LiveCache",
    "Question",
    "live_cache_bytes_per_token",
    "measure_cache",
    "print_plan",
    "report",
]
