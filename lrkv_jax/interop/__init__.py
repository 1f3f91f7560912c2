"""Hugging Face import and export, and conversion of pretrained models to smaller caches."""
