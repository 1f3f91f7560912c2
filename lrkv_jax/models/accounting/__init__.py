"""The costs of a model and a run, from configuration alone; nothing here loads JAX."""
