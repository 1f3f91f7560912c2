"""A layer in a model, an optimizer and meshes that are not ours.

B batch  T positions  D model width  V vocabulary
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support.marks import quick

import lrkv_jax as lj

D, V, T = 32, 11, 9
VARIANTS = {
    "lrkv_full": lj.LRKV(rank=3),
    "lrkv_latent": lj.LRKV(rank=4, rope="latent", kv_heads=2),
    "mla": lj.MLA(kv_lora_rank=12, qk_rope_head_dim=4),
    "gqa": lj.GQA(kv_heads=2),
}


class Foreign(nnx.Module):
    """An embedding, two layers of attention with a Linear each, and a head."""

    def __init__(self, variant, *, rngs, axis_rules=()):
        config = lj.ModelConfig(width=D, heads=4, head_width=8, attention=variant, dtype="float32")
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.attention, self.linear = nnx.List(), nnx.List()
        for _ in range(2):
            self.attention.append(lj.make_attention(config, rngs=rngs, axis_rules=axis_rules))
            self.linear.append(nnx.Linear(D, D, rngs=rngs))
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens_BT):
        x_BTD = self.embed(tokens_BT)
        for attention, linear in zip(self.attention, self.linear, strict=True):
            x_BTD = x_BTD + attention(x_BTD)
            x_BTD = x_BTD + jax.nn.silu(linear(x_BTD))
        return self.head(x_BTD)

    def decode(self, tokens_BT, caches, lengths_B):
        x_BTD, new = self.embed(tokens_BT), []
        for attention, linear, cache in zip(self.attention, self.linear, caches, strict=True):
            out_BTD, cache = attention.decode(x_BTD, cache, lengths_B)
            x_BTD = x_BTD + out_BTD
            x_BTD = x_BTD + jax.nn.silu(linear(x_BTD))
            new.append(cache)
        return self.head(x_BTD), new


def loss(model, tokens_BT):
    logits = model(tokens_BT[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()


@nnx.jit
def step(model, optimizer, tokens_BT):
    value, grads = nnx.value_and_grad(loss)(model, tokens_BT)
    optimizer.update(model, grads)
    return value


TOKENS_BT = jax.random.randint(jax.random.key(2), (4, T + 1), 0, V)


@functools.cache
def trained(name):
    """A model after a few steps of Adam, so that its output projections are not zero."""
    model = Foreign(VARIANTS[name], rngs=nnx.Rngs(0), axis_rules=(("heads", "model"),))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, [float(step(model, optimizer, TOKENS_BT)) for _ in range(4)]


@pytest.mark.parametrize("name", quick("lrkv_full", slow=VARIANTS))
def test_a_layer_trains_in_a_model_of_somebody_else_and_decodes_as_it_trained(name):
    model, losses = trained(name)
    assert losses[-1] < losses[0] - 0.1
    grads = nnx.jit(nnx.grad(loss))(model, TOKENS_BT)
    still = [path for path, leaf in jax.tree.leaves_with_path(grads) if not np.any(leaf)]
    assert not still, "weights that nothing moves"
    expected = nnx.jit(Foreign.__call__)(model, TOKENS_BT)
    caches = [layer.init_cache(batch=4, length=T + 1) for layer in model.attention]
    decode = nnx.jit(Foreign.decode)
    first, caches = decode(model, TOKENS_BT[:, :-1], caches, jnp.zeros(4, jnp.int32))
    last, _ = decode(model, TOKENS_BT[:, -1:], caches, jnp.full(4, T))
    np.testing.assert_allclose(jnp.concatenate([first, last], 1), expected, atol=1e-5)


ON_TWO = [
    ("gqa", ("data", "model"), AxisType.Auto),
    ("gqa", ("data", "fsdp"), AxisType.Explicit),
    ("lrkv_full", ("data", "fsdp"), AxisType.Auto),
]
ON_HEADS = ("lrkv_full", ("data", "model"), AxisType.Explicit)


@pytest.mark.parametrize(("name", "axes", "types"), quick(slow=[ON_HEADS, *ON_TWO]))
def test_a_layer_computes_the_same_on_a_mesh_of_other_axes(name, axes, types):
    layer = trained(name)[0].attention[0]
    x_BTD = jax.random.normal(jax.random.key(5), (4, 12, D))
    lengths_B = jnp.zeros(4, jnp.int32)

    def everything(layer, x_BTD, cache):
        out_BTD, backward = jax.vjp(lambda layer, x: layer(x), layer, x_BTD)
        return out_BTD, backward(out_BTD), layer.decode(x_BTD, cache, lengths_B)[0]

    expected = jax.jit(everything)(layer, x_BTD, layer.init_cache(4, 16))
    mesh = jax.make_mesh((2, 2), axes, devices=jax.devices()[:4], axis_types=(types,) * 2)
    with jax.set_mesh(mesh):
        specs = nnx.get_partition_spec(layer) if "model" in axes else PartitionSpec()
        where = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        placed = jax.device_put(layer, where)
        rows = jax.device_put(x_BTD, NamedSharding(mesh, PartitionSpec("data")))
        found = jax.jit(everything)(placed, rows, layer.init_cache(4, 16))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_a_layer_computes_the_same_in_a_shard_map_over_an_axis_called_fsdp():
    layer = trained("lrkv_full")[0].attention[0]
    x_BTD = jax.random.normal(jax.random.key(5), (4, 12, D))
    rows = PartitionSpec("fsdp")

    def both(layer, x_BTD, cache):
        return layer(x_BTD), layer.decode(x_BTD, cache, jnp.zeros(len(x_BTD), jnp.int32))[0]

    types = (AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("fsdp",), devices=jax.devices()[:4], axis_types=types)
    specs = (PartitionSpec(), rows, rows)
    mapped = jax.shard_map(both, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)
    found = jax.jit(mapped)(layer, x_BTD, layer.init_cache(4, 16))
    expected_BTD = jax.jit(lambda layer, x_BTD: layer(x_BTD))(layer, x_BTD)
    for array in found:
        np.testing.assert_allclose(array, expected_BTD, atol=1e-5)


@pytest.mark.parametrize(("sequences", "pages"), [(3, 8), (4, 7)])
def test_sequences_and_their_pool_are_both_split_over_a_mesh_or_refused(sequences, pages):
    layer = trained("lrkv_full")[0].attention[0]
    x_BTD, pages_BN = jnp.ones((sequences, 1, D)), jnp.zeros((sequences, 1), jnp.int32)
    pool, lengths_B = layer.init_cache(pages, 16), jnp.zeros(sequences, jnp.int32)
    types, message = (AxisType.Auto,), f"{sequences} sequences and a pool of {pages} pages"
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=types)
    with jax.set_mesh(mesh), pytest.raises(lj.LrkvError, match=message):
        layer.decode(x_BTD, pool, lengths_B, pages_BN)


def spec_of_keys(layer):
    return nnx.get_partition_spec(nnx.state(layer))["key_down"].get_value()


def test_the_weights_carry_their_axes_where_flax_looks_for_them():
    config = lj.ModelConfig(width=D, heads=4, head_width=8, attention=lj.LRKV(rank=3))
    layer = lj.make_attention(config, rngs=nnx.Rngs(0), axis_rules=())
    assert spec_of_keys(layer) == PartitionSpec("heads", "embed", "rank")
    rules = {"embed": "fsdp", "heads": ("x", "y")}
    ruled = lj.make_attention(config, rngs=nnx.Rngs(0), axis_rules=rules)
    assert spec_of_keys(ruled) == PartitionSpec(("x", "y"), "fsdp", None)
    with pytest.raises(lj.LrkvError, match="no logical axis head: did you mean heads"):
        lj.make_attention(config, rngs=nnx.Rngs(0), axis_rules=(("head", "model"),))
