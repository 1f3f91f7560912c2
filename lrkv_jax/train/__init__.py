"""Training: state, step, validation, metrics and the loop that ties them together."""
