"""The tools that tables, figures and pages are made with."""
