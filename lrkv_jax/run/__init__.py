"""A run on disk and on a screen: the loop, its pauses, metrics, checkpoints to resume from."""
