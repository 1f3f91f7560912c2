"""`lrkv plan`: the memory and time of a run, before it starts.

`report` has everything as a dictionary and as text. `training` compiles a step for a mesh of named
devices and reports whether it fits; `estimate` has closed forms of its memory and time.
"""
