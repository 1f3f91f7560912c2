"""A grid of runs: which there are (`grid`), and running those that are not done (`work`)."""
