"""`lrkv plan`: what a run will need, before it is paid for.

| module | |
|---|---|
| `report` | everything as one dictionary, ready for JSON |
| `live_cache` | caches that are really allocated, and their live bytes |
| `training` | a step on a mesh of named devices, compiled by XLA, and whether it fits |
| `estimate` | closed forms of its memory and collectives |
| `step_time`, `muon` | closed forms of its time, and Muon's share of it |
| `show` | the dictionary as text for a terminal |
"""
