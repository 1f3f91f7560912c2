"""A run on disk and on a screen: the loop, its callbacks, metrics, checkpoints to resume from."""
