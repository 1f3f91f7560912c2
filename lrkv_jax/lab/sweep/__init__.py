"""A grid of runs: its points (`grid`), and training and evaluating them (`work`)."""
