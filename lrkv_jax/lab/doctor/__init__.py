"""`lrkv doctor`: what this machine is, and whether it is right for the work.

| module | |
|---|---|
| `examine` | starts the process that runs the checks, ends it where one hangs, and sums up |
| `checks` | that process: which checks there are, in which order |
| `finding` | a line of the report |
| `versions`, `machine` | packages and driver; cores, memory and disk |
| `devices` | JAX's devices and their rates |
"""
