"""Parameters of which few run among the fast tests."""

import pytest


def quick(*fast, slow):
    """The fast cases, then those of `slow` that are not among them, with its mark."""
    rest = [case if isinstance(case, tuple) else (case,) for case in slow if case not in fast]
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in rest)]
