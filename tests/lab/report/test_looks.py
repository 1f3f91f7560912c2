"""Whoever cannot tell the colours apart can tell the lines apart."""

import pytest

from lrkv_jax.config.attention import KINDS
from lrkv_jax.lab.report.looks import ladder, look

LOOKS = [look(entry.name, mode) for entry in KINDS.values() for mode in entry.modes() or (None,)]


def test_lines_differ_without_their_colours():
    assert len({(one.line, one.marker) for one in LOOKS}) == len(LOOKS)
    assert len({one.colour for one in LOOKS}) == len(LOOKS)


@pytest.mark.parametrize("kind", ["lrkv", "mla"])
def test_a_ladder_s_steps_differ_in_colour_and_without(kind):
    steps = ladder(kind, [128, 8, 16, 64, 32])
    assert list(steps) == [8, 16, 32, 64, 128]
    assert len({one.colour for one in steps.values()}) == 5
    assert len({(one.line, one.marker) for one in steps.values()}) == 5
    assert steps[128].colour == ladder(kind, [4])[4].colour  # the largest is the kind's own


def test_a_variant_without_a_look_gets_one_of_its_own():
    one = look("sixth")
    assert one.name == "SIXTH" and one.colour not in {known.colour for known in LOOKS}
