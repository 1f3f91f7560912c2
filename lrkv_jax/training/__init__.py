"""Training: the step as functions of arrays, and a run on disk with its callbacks."""
