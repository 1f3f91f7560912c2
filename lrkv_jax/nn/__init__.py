"""Layers that know no attention variant: weights, norm, rotation, MLP, embedding and head."""
