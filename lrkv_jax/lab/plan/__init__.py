"""`lrkv plan`: what a run will need, before it is paid for.

`report` has everything as a dictionary and as text. `training` compiles a step for a mesh of named
devices and says whether it fits; `estimate` has closed forms of its memory and time.
"""
