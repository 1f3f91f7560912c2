"""The loss of a batch and its gradient, computed by each device for its rows and positions.

Both run in one `jax.shard_map`, manual over data, fsdp and context
(`lrkv_jax.distributed.manual_sharding`).

B sequences  T positions  b, t a device's  M microbatches  V vocabulary  E width of a teacher
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jaxtyping import Array, Float

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.distributed import manual_sharding
from lrkv_jax.distributed.rules import BATCH, CONTEXT, TENSOR, partition
from lrkv_jax.kernels.cross_entropy import Teacher, mean_cross_entropy
from lrkv_jax.models.transformer import abstract_parameters, specs, with_parameters
from lrkv_jax.models.weights import LAYERS
from lrkv_jax.training.token_batch import PLAIN, BatchFormat, TokenBatch

HERE = PartitionSpec()  # tensor does not split it


def bits_per_byte(nats, num_bytes):
    """Nats over the tokens of text, and those tokens' UTF-8 bytes, to bits per byte."""
    return nats / (num_bytes * np.log(2.0))


def make_loss(
    config: ModelConfig, mesh: Mesh | AbstractMesh, *, chunk: int, batch_format: BatchFormat = PLAIN
) -> Callable[..., Float[Array, "B T"]]:
    """(params, tokens [B, U]) → −log p in nats of each token after the first, U = T + 1.

    A pure function, to be jitted; it makes no logits for more than about `chunk` tokens a device.
    Tokens that are no targets have their nats too: the caller leaves them out of its sum.
    """

    def local(params, tokens_bU):
        here = _own_positions(tokens_bU, batch_format)
        model = with_parameters(config, params)
        x_btD = model.hidden(here.inputs_bt, here.positions_bt, here.segments_bt)
        return _on_vocabulary(config, chunk)(x_btD, model.head_kernel(), here.targets_bt)[1]

    parts = _parameter_parts(config, mesh), PartitionSpec(BATCH)
    return manual_sharding.train_step(local, mesh, parts, PartitionSpec(BATCH, CONTEXT))


def make_gradient(
    config: RunConfig,
    mesh: Mesh | AbstractMesh,
    token_bytes_V: np.ndarray,
    batch_format: BatchFormat = PLAIN,
) -> Callable[..., tuple[tuple[Array, Array, Array], Any]]:
    """(params, tokens [B, U], teacher = ()) → ((loss, nats, bytes), gradients), to be jitted.

    The loss is the mean over all targets, nats; with `train.teacher_model`, whose parameters are
    `teacher`, it is the mean of KL(teacher ‖ model) over the same places. `nats` and `bytes` are
    sums over the targets that are text. Gradients are float32, and sharded as their
    parameters; those of `train.grad_accum_steps` microbatches are averaged. Sums over data and
    context happen once a step.
    """
    model, train = config.model, config.train
    microbatches = train.grad_accum_steps
    parts = math.prod(mesh.shape[axis] for axis in manual_sharding.MANUAL_AXES) * microbatches
    axes = [spec.axes for spec in jax.tree.leaves(specs(model))]
    in_layers = [names[0] == LAYERS for names in axes]
    sums_in_turn = microbatches == 1  # else once, after the last microbatch

    taught = train.teacher_model

    def loss(params, here, count, theirs):
        transformer = with_parameters(model, params)
        x_btD = transformer.hidden(
            here.inputs_bt, here.positions_bt, here.segments_bt,
            remat=train.remat, sums=sums_in_turn,
        )  # fmt: skip
        targets = here.targets_bt, here.counted_bt, count
        teacher = None
        if taught is not None:
            other = with_parameters(taught, jax.lax.stop_gradient(theirs))
            read_btE = other.hidden(here.inputs_bt, here.positions_bt, here.segments_bt)
            teacher = Teacher(read_btE, other.head_kernel(), taught.softcap)
        mean, nll_bt = _on_vocabulary(model, train.loss_chunk)(
            x_btD,
            transformer.head_kernel(),
            *targets[: 3 if batch_format.masked else 1],
            teacher=teacher,
        )
        bytes_bt = jnp.asarray(token_bytes_V)[here.targets_bt]  # a concrete array brings a mesh
        if batch_format.masked:  # the mean is over all devices' and microbatches' targets already
            bytes_bt = bytes_bt * here.counted_bt
        else:
            mean = mean / parts
        return mean, (jnp.sum(nll_bt * (bytes_bt > 0)), jnp.sum(bytes_bt))

    def local(params, tokens_bU, theirs):
        here, count = _own_positions(tokens_bU, batch_format), None
        if batch_format.masked:
            # One, where a batch has no target: its loss is then 0, not a NaN.
            count = jnp.maximum(
                1, jax.lax.psum(jnp.sum(here.counted_bt), manual_sharding.MANUAL_AXES)
            )
        differentiate = jax.value_and_grad(loss, has_aux=True)
        if microbatches == 1:
            (value, aux), grads = differentiate(params, here, count, theirs)
        else:
            # Row i goes to microbatch i mod M: each device splits the rows that it already has.
            def split(x_bt):
                return x_bt.reshape(-1, microbatches, x_bt.shape[1]).swapaxes(0, 1)

            def add(total, here):
                more = differentiate(params, here, count, theirs)
                return jax.tree.map(jnp.add, total, more), None

            some = jax.tree.map(split, here)
            one = jax.tree.map(lambda x_Mbt: x_Mbt[0], some)
            shapes = jax.eval_shape(differentiate, params, one, count, theirs)
            zero = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
            ((value, aux), grads), _ = jax.lax.scan(add, zero, some)
        value, aux = jax.lax.psum((value, aux), manual_sharding.MANUAL_AXES)
        return (value, *aux), _sum_rest(grads)

    def _sum_rest(grads):
        leaves, tree = jax.tree.flatten(grads)
        late = [i for i, stacked in enumerate(in_layers) if not (stacked and sums_in_turn)]
        sums = manual_sharding.sum_rest([leaves[i] for i in late], [axes[i] for i in late])
        for i, total in zip(late, sums, strict=True):
            leaves[i] = total
        return tree.unflatten(leaves)

    scalars, own = (PartitionSpec(),) * 3, _parameter_parts(model, mesh)
    teacher_s = () if taught is None else _parameter_parts(taught, mesh)
    in_specs = own, PartitionSpec(BATCH), teacher_s
    mapped = manual_sharding.train_step(local, mesh, in_specs, (scalars, own))
    return lambda params, tokens_BU, teacher=(): mapped(params, tokens_BU, teacher)


def _own_positions(tokens_bU, batch_format):
    """This device's positions of its rows of the batch."""
    t = (tokens_bU.shape[1] - 1) // manual_sharding.size(CONTEXT)
    return TokenBatch.read(tokens_bU, batch_format, manual_sharding.first_position(t), t)


def _parameter_parts(config: ModelConfig, mesh: Mesh | AbstractMesh) -> Any:
    """How the manual region sees each parameter."""
    return jax.tree.map(
        lambda spec, leaf: manual_sharding.manual_part(partition(spec.axes, leaf.shape, mesh)),
        specs(config),
        abstract_parameters(config),
    )


def _on_vocabulary(config, chunk):
    """`mean_cross_entropy` of (x, kernel [D, V], targets), each tensor shard with its columns."""
    shards = manual_sharding.size(TENSOR)
    axis = TENSOR if shards > 1 and config.vocabulary % shards == 0 else None
    columns = PartitionSpec(None, axis)

    def on(x_btD, kernel_DV, *targets, teacher=None):
        theirs = () if teacher is None else (teacher.x_BTE, teacher.kernel_EV)

        def local(x_btD, kernel_DV, targets, *theirs):
            how = {"softcap": config.softcap, "chunk": chunk, "axis": axis}
            if theirs:
                how["teacher"] = Teacher(*theirs, teacher.softcap)
            return mean_cross_entropy(x_btD, kernel_DV, *targets, **how)

        parts = (HERE, columns, HERE, HERE, columns)[: 3 + len(theirs)]
        return manual_sharding.over_tensor(local, parts, (HERE, HERE))(
            x_btD, kernel_DV, targets, *theirs
        )

    return on
