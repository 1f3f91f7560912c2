"""`lrkv doctor`: what this machine is, and whether it is right for the work.

| module | |
|---|---|
| `examine` | which checks there are, in which order, and what is said of all |
| `finding` | a line of the report |
| `child` | the process that checks run in: one that hangs or crashes ends with a line |
| `versions`, `machine` | packages, CUDA and driver; cores, memory and disk |
| `devices` | JAX's devices and their rates |
"""
