"""The controls of the family's sweep: each decodes as it is trained, and differs in one thing."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.variants import HEAD_WIDTH, error, random_model, random_params, random_tokens, small

from lrkv_jax.config import load_config
from lrkv_jax.config.attention import variant_class
from lrkv_jax.errors import LrkvError
from lrkv_jax.models.attention import LRKV
from lrkv_jax.models.transformer import with_parameters

EXPERIMENTS = Path(__file__).parents[3] / "experiments"


@pytest.fixture(scope="module")
def entries():
    """(WideMHA, OneTable), as a configuration finds them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXPERIMENTS)
        yield tuple(variant_class(f"controls:{name}") for name in ("WideMHA", "OneTable"))
    sys.modules.pop("controls", None)


def test_the_sweep_s_lines_are_those_of_the_family_and_the_controls(entries):
    config, family = load_config(EXPERIMENTS / "controls.yaml"), load_config("nano_family")
    assert {name: e.label for name, e in config.variants.items()} == {
        "mha": "MHA", "lrkv_latent": "LRKV-8 rope latent", "mha_wide": "WIDE_MHA-8",
        "lrkv_one_table": "LRKV_ONE_TABLE-8 rope latent",
    }  # fmt: skip
    assert config.variants["lrkv_latent"] == family.variants["lrkv_latent"]
    model, other = (config.variant(n).model for n in ("mha_wide", "lrkv_latent"))
    assert model.attention.logit_width(model) == other.attention.logit_width(other) == 40


@pytest.mark.parametrize("place", range(2), ids=["wide_mha", "one_table"])
def test_a_control_decodes_what_its_forward_says(entries, place):
    attention = [entries[0](more=4), entries[1](rank=3, rope="latent")][place]
    model = random_model(small(attention, layers=1))
    tokens_BT = random_tokens(2, 9)

    @jax.jit
    def logits(model, tokens_BT):
        whole = model(tokens_BT, jnp.broadcast_to(jnp.arange(9), (2, 9)))
        cache, lengths_B = model.init_cache(2, 16), jnp.zeros(2, jnp.int32)
        _, cache = model.decode(tokens_BT[:, :6], cache, lengths_B)
        steps = []
        for t in range(6, 9):
            x_BTD, cache = model.decode(tokens_BT[:, t : t + 1], cache, jnp.array([t, t]))
            steps.append(model.logits(x_BTD))
        return whole[:, 6:], jnp.concatenate(steps, axis=1)

    whole, steps = logits(model, tokens_BT)
    assert error(steps, whole) < 1e-5


def test_latents_of_one_table_are_lrkv_s_where_they_are_as_wide_as_heads(entries):
    def logits(config, params):
        model = with_parameters(config, params)
        tokens, positions = random_tokens(1, 9), np.arange(9)[None]
        return jax.jit(lambda model: model(tokens, positions))(model)

    for rank, same in ((HEAD_WIDTH, True), (4, False)):
        ours, theirs = (small(kind(rank=rank, rope="latent")) for kind in (entries[1], LRKV))
        params = random_params(theirs)
        assert (error(logits(ours, params), logits(theirs, params)) < 1e-6) == same
    with pytest.raises(LrkvError, match="latents turn in rope: latent alone"):
        small(entries[1](rank=3, rope="full"))
