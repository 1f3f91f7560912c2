"""`lrkv plan`: what a run will need, before it is paid for.

| module | |
|---|---|
| `report` | everything as one dictionary, ready for JSON |
| `live_cache` | caches that are really allocated, and their live bytes |
| `training` | a step on a mesh of named devices: memory, collectives, time, Muon's share |
| `compiled`, `hlo` | XLA's memory, collectives and products of that step |
| `estimate` | closed forms of the same, where the step is not compiled |
| `show` | the dictionary as text for a terminal |
"""
