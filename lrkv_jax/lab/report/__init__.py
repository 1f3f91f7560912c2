"""Tables, figures and pages from runs: the tools, those of the paper, and comparisons."""
