"""Finished runs, compared: what they reached, how soon, and whether they differ."""
