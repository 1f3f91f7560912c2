"""`lrkv plan`: what a run will need, before it is paid for.

| module | |
|---|---|
| `report` | everything as one dictionary, ready for JSON |
| `training` | a step on a mesh of named devices: memory, collectives, time, Muon's share |
| `compiled`, `hlo` | XLA's own figures of the same step |
| `show` | the dictionary as text for a terminal |
"""

from lrkv_jax.plan.report import Question, live_cache_bytes_per_token, report
from lrkv_jax.plan.show import print_plan

__all__ = ["Question", "live_cache_bytes_per_token", "print_plan", "report"]
