"""Training as functions of arrays: state, step, loss, rows, guard, validation."""
