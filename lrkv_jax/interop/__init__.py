"""Models come in and go out: Hugging Face folders from runs, and runs from Hugging Face folders."""
