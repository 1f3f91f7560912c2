"""Documents packed into one row never see each other, and targets that do not count do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.meshes import mesh_of
from support.variants import FIVE, VOCABULARY, random_params, small

from lrkv_jax.distributed.rules import batch_sharding
from lrkv_jax.models.transformer import with_parameters
from lrkv_jax.training.loss import make_gradient, make_loss
from lrkv_jax.training.state import resolve
from lrkv_jax.training.token_batch import BatchFormat, TokenBatch
from lrkv_jax.training.validate import make_validation

BOS = 0
LENGTHS = (7, 1, 9)  # of the documents in a row, BOS included; one is nothing but its BOS


def nats(config, mesh, tokens, rows):
    with jax.set_mesh(mesh):
        loss = jax.jit(make_loss(config, mesh, chunk=16, batch_format=rows))
        tokens = jax.device_put(np.asarray(tokens, np.int32), batch_sharding(mesh))
        return np.asarray(loss(jax.tree.map(np.asarray, random_params(config)), tokens))


@pytest.mark.slow
def test_a_packed_document_has_the_losses_it_has_alone():
    """On a mesh that splits positions too; of one variant: test_contract.py packs for each."""
    config = small(FIVE["lrkv"], layers=1)
    rng = np.random.default_rng(3)
    parts = [[np.append(BOS, rng.integers(1, VOCABULARY, n - 1)) for n in LENGTHS] for _ in "ab"]
    packed = np.stack([np.concatenate(row) for row in parts])
    how = BatchFormat(bos=BOS, separate_documents=True, restart_positions=True)
    got = nats(config, mesh_of(), packed, how)
    mesh = mesh_of(fsdp=2, context=2, tensor=2)
    np.testing.assert_allclose(nats(config, mesh, packed, how), got, atol=2e-5)
    model = with_parameters(config, random_params(config))
    log_p = jax.jit(lambda model, tokens: jax.nn.log_softmax(model(tokens)))
    start = 0
    for length, *pair in zip(LENGTHS, *parts, strict=True):
        # What follows a document cannot matter to it: one program for all lengths.
        padded = np.pad(np.stack(pair), ((0, 0), (0, max(LENGTHS) - length)))
        # Predictions within the document; its last token predicts the next one's BOS.
        alone = np.asarray(log_p(model, padded))[:, : length - 1]
        expected = -np.take_along_axis(alone, padded[:, 1:length, None], -1)[..., 0]
        within = slice(start, start + length - 1)
        np.testing.assert_allclose(got[:, within], expected, rtol=2e-5, atol=2e-5)
        start += length


def test_rows_say_where_documents_start_and_what_counts():
    how = BatchFormat(bos=9, separate_documents=True, restart_positions=True, masked=True)
    row = jnp.array([[4, 5, ~9, 6, ~7, 9, ~9, 1]])
    here = TokenBatch.read(row, how, 0, 7)
    assert here.inputs_bt.tolist() == [[4, 5, 9, 6, 7, 9, 9]]
    assert here.targets_bt.tolist() == [[5, 9, 6, 7, 9, 9, 1]]
    assert here.counted_bt.tolist() == [[True, False, True, False, True, False, True]]
    assert here.positions_bt.tolist() == [[0, 1, 0, 1, 2, 0, 0]]
    assert here.segments_bt.tolist() == [[0, 0, 1, 1, 1, 2, 3]]
    second = TokenBatch.read(row, how, 4, 3)  # another device's share of the same row
    assert second.positions_bt.tolist() == [[2, 0, 0]]
    assert second.segments_bt.tolist() == [[1, 2, 3]]


def test_a_held_out_loss_over_no_target_is_nan():
    """It ended the run, before the step was saved."""
    config = small(FIVE["mha"], layers=1)
    found = make_validation(config, mesh_of(), np.ones(VOCABULARY, int), chunk=16)(None, [])
    assert np.isnan([found.cross_entropy, found.bits_per_byte]).all() and found.tokens == 0


@pytest.mark.parametrize(
    ("sizes", "accumulation"),
    [
        ({}, 1),
        pytest.param({"data": 2, "fsdp": 2, "context": 2}, 2, marks=pytest.mark.slow),
    ],
    ids=["one device", "a mesh, microbatches"],
)
def test_the_gradient_is_that_of_the_mean_over_the_targets_that_count(tiny, sizes, accumulation):
    """On a mesh and in microbatches too, where some hold fewer targets than others; or none."""
    small = "model.layers=1", "model.vocabulary=40", "train.seq_len=16"
    config = resolve(tiny("attention=lrkv", *small))
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 40, (8, 17)).astype(np.int32)
    counted = rng.random((8, 17)) < np.linspace(0, 1, 8)[:, None]  # the first row has none
    batch = np.where(counted, tokens, ~tokens)
    params = jax.tree.map(np.asarray, random_params(config.model))
    token_bytes = np.arange(40)  # token 0 stands for no bytes

    def plain(params):
        log_p = jax.nn.log_softmax(with_parameters(config.model, params)(tokens[:, :-1]))
        nll = -jnp.take_along_axis(log_p, jnp.asarray(tokens[:, 1:, None]), -1)[..., 0]
        return jnp.sum(nll * counted[:, 1:]) / counted[:, 1:].sum(), nll

    (loss, nll), grads = jax.jit(jax.value_and_grad(plain, has_aux=True))(params)
    in_bytes = counted[:, 1:] & (tokens[:, 1:] > 0)
    mesh = mesh_of(**sizes)
    train = config.train.model_copy(update={"grad_accum_steps": accumulation})
    config = config.model_copy(update={"train": train})
    with jax.set_mesh(mesh):
        gradient = make_gradient(config, mesh, token_bytes, BatchFormat(bos=BOS, masked=True))
        run, where = jax.jit(gradient), batch_sharding(mesh)
        (value, nats, num_bytes), got = run(params, jax.device_put(batch, where))
        (nothing, *_), zeros = run(params, jax.device_put(~tokens, where))
    assert nothing == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(zeros))
    np.testing.assert_allclose(value, loss, rtol=1e-5)
    np.testing.assert_allclose(nats, np.sum(np.asarray(nll) * in_bytes), rtol=1e-5)
    assert int(num_bytes) == int((tokens[:, 1:] * counted[:, 1:]).sum())
    jax.tree.map(
        lambda mine, exact: np.testing.assert_allclose(mine, exact, rtol=1e-3, atol=1e-5),
        got, grads,
    )  # fmt: skip
