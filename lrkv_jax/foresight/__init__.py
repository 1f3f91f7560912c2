"""A training step foreseen: its memory and its messages, from its trace alone."""
