"""`lrkv doctor`: checks of this machine and its devices.

`checks` lists them; `host` has those of the machine, its disk, driver and packages, `devices`
those of JAX's devices. `examine` runs them, stops if one hangs, and sums up.
"""
