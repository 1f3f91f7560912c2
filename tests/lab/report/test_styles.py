"""Whoever cannot tell the colors apart can tell the lines apart."""

from lrkv_jax.config.attention import variants
from lrkv_jax.lab.report.styles import distinct, variant_style

STYLES = [
    variant_style(entry.name, mode)
    for entry in variants().values()
    for mode in entry.modes() or (None,)
]


def differ(styles):
    """Whether they differ in color, and without."""
    shapes = {(one.line, one.marker) for one in styles}
    return len({one.color for one in styles}) == len(shapes) == len(styles)


def test_variants_differ_without_their_colors_and_equal_styles_become_a_ladder():
    assert differ(STYLES)
    one = variant_style("lrkv", "latent")
    made = distinct([variant_style("mha"), *[one] * 5, variant_style("gqa")])
    assert differ(made[1:6]) and made[0] == variant_style("mha")
    assert made[5].color == one.color and {each.name for each in made[1:6]} == {one.name}
