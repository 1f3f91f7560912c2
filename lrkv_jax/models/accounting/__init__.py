"""What a model and a run cost, from configuration alone; nothing here loads JAX."""
