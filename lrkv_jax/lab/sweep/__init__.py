"""A grid of runs: which there are (`grid`), how far each is (`state`), running them (`working`)."""
