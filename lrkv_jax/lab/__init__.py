"""Benchmarks, plans, analyses, reports and sweeps; the core never imports them."""
