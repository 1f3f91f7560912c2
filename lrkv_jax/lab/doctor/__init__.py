"""`lrkv doctor`: what this machine is, and whether it is right for the work.

`checks` lists what is looked at; `host` has the checks of the machine, its disk, driver and
packages, `devices` those of JAX's devices. `examine` runs them, ends where one hangs, and sums up.
"""
