"""The sets of midtraining and of the five benchmarks, as text: read, checked, rendered.

`registry.load` reads one by name; each set's `conversation` renders it as the recipe
does. No token ids and no models here.
"""
