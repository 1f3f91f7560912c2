"""The training state, which a step reads and replaces, and the shardings of its arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array, Int, Key

from lrkv_jax.config import ModelConfig, RunConfig
from lrkv_jax.distributed.rules import parameter_shardings, replicated
from lrkv_jax.models.layers import resolve_dtype
from lrkv_jax.models.transformer import abstract_parameters, init_parameters, specs
from lrkv_jax.optim import make_optimizer
from lrkv_jax.training.guard import GuardState


def resolve(config: RunConfig) -> RunConfig:
    """The configuration with `auto` dtypes replaced by what this platform makes of them."""
    muon = config.optimizer.muon
    muon = muon.model_copy(update={"dtype": resolve_dtype(muon.dtype).name})
    return config.model_copy(
        update={
            "model": config.model.model_copy(
                update={"dtype": resolve_dtype(config.model.dtype).name}
            ),
            "optimizer": config.optimizer.model_copy(update={"muon": muon}),
        }
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Parameters, optimizer state, and the number of steps done, skipped ones included.

    `rng` is the key that samples draw from, `guard` what the guard remembers. `teacher` are the
    parameters of `train.teacher`, () without one: a step passes them on, no checkpoint has them.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    rng: Key[Array, ""]
    guard: GuardState
    teacher: Any = ()


def learning_specs(config: RunConfig) -> Any:
    """The specs of the run's parameters; those that do not learn are of the group `still`."""
    every = specs(config.model)
    if config.train.trainable == "all":
        return every

    def of(path, spec):
        *_, module, name = (step.key for step in path)
        read = name.startswith(("query", "output"))
        return spec if module == "attention" and not read else replace(spec, group="still")

    return jax.tree.map_with_path(of, every)


def optimizer_of(config: RunConfig) -> optax.GradientTransformation:
    """The run's optimizer, its Newton–Schulz dtype resolved for this platform."""
    return make_optimizer(
        config.optimizer,
        learning_specs(config),
        config.train.total_steps,
        muon_dtype=resolve_dtype(config.optimizer.muon.dtype),
    )


def new_state(config: RunConfig) -> TrainState:
    """The state before the first step: a pure function of `config`, for jit or eval_shape.

    It has no teacher: that one is restored, not made.
    """
    params = init_parameters(config.model, config.train.seed)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer_of(config).init(params),
        rng=jax.random.key(config.train.seed),
        guard=GuardState.fresh(),
    )


def placed_parameters(model: ModelConfig, mesh: Mesh | AbstractMesh) -> Any:
    """A model's parameters as `jax.ShapeDtypeStruct`s with their placement in training."""
    shapes = abstract_parameters(model)
    return jax.tree.map(_at, shapes, parameter_shardings(specs(model), shapes, mesh))


def _at(leaf, where):
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)


def abstract_state(config: RunConfig, mesh: Mesh | AbstractMesh) -> TrainState:
    """The state as `jax.ShapeDtypeStruct`s with their placement, for restoring into.

    Moments are next to their parameter, scalars everywhere.
    """

    def next_to(moment, param):
        return moment if isinstance(moment, optax.MaskedNode) else _at(moment, param.sharding)

    abstract = jax.eval_shape(lambda: new_state(config))
    abstract = jax.tree.map(lambda leaf: _at(leaf, replicated(mesh)), abstract)
    params, taught = placed_parameters(config.model, mesh), config.train.teacher_model
    opt_state = optax.tree_map_params(
        optimizer_of(config),
        next_to,
        abstract.opt_state,
        params,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )
    teacher = () if taught is None else placed_parameters(taught, mesh)
    return replace(abstract, params=params, opt_state=opt_state, teacher=teacher)


def state_shardings(config: RunConfig, mesh: Mesh | AbstractMesh) -> TrainState:
    """The shardings of the state, each in its array's place."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))


def init_state(config: RunConfig, mesh: Mesh) -> TrainState:
    """A `new_state`, made where it lives: no device ever holds more than its share."""
    where = replace(state_shardings(config, mesh), teacher=())
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return jax.jit(
        lambda: new_state(config),
        out_shardings=where,
        # It runs once: made in 1 s instead of 2 to 3, it gives the same bits.
        compiler_options={"xla_backend_optimization_level": "1"} if on_cpu else None,
    )()


def checkpoint_items(state: TrainState) -> dict[str, Any]:
    """The state as the items of a checkpoint; the optimizer's arrays are named by their paths.

    `state` holds arrays, or `jax.ShapeDtypeStruct`s to restore into.
    """
    return {
        "params": state.params,
        "optimizer": {_name(path): leaf for path, leaf in _optimizer_leaves(state)},
        "run": {"step": state.step, "rng": _key_data(state.rng), "guard": dict(vars(state.guard))},
    }


def from_checkpoint_items(
    abstract: TrainState, items: dict[str, Any], teacher: Any = ()
) -> TrainState:
    """The inverse: restored items in the structure of `abstract`, and the teacher with them."""
    moments = [items["optimizer"][_name(path)] for path, _ in _optimizer_leaves(abstract)]
    return TrainState(
        step=items["run"]["step"],
        params=items["params"],
        opt_state=jax.tree.unflatten(jax.tree.structure(abstract.opt_state), moments),
        rng=jax.random.wrap_key_data(items["run"]["rng"]),
        guard=GuardState(**items["run"]["guard"]),
        teacher=teacher,
    )


def _optimizer_leaves(state: TrainState):
    return jax.tree.leaves_with_path(state.opt_state)


def _name(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _key_data(key):
    if not isinstance(key, jax.ShapeDtypeStruct):
        return jax.random.key_data(key)
    data = jax.eval_shape(jax.random.key_data, key)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=key.sharding)
