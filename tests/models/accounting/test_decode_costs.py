"""What a decoding step costs: FLOPs against the programs themselves, bytes against live buffers."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.jaxprs import equations
from support.marks import quick

from lrkv_jax.config import ModelConfig, load_config
from lrkv_jax.kernels import angles, online
from lrkv_jax.lab.bench.problems import make_problem, with_kernel
from lrkv_jax.models.accounting.serving import attention_flops
from lrkv_jax.models.attention import LRKV, MHA, MLA

H, K = 4, 16
ENTRIES = {
    "mha": MHA(),
    "mla": MLA(kv_lora_rank=24, qk_rope_head_dim=8),
    "mla-full": MLA(kv_lora_rank=24, rope="full"),
    "mla-rank": MLA(kv_lora_rank=24, qk_rope_head_dim=8, rank=8),
    # A multiple of 8 is cached without padding, which a program multiplies like anything else.
    "lrkv-shared": LRKV(rank=8, rope="shared"),
    "lrkv-full": LRKV(rank=8, rope="full"),
    "lrkv-rank0": LRKV(rank=0),
}


def products(program, *arguments) -> int:
    """2 · multiplications of all matrix products of a program."""
    total = 0
    for equation in equations(jax.make_jaxpr(program)(*arguments).jaxpr):
        if equation.primitive.name == "dot_general":
            contracted, _ = equation.params["dimension_numbers"][0]
            left = equation.invars[0].aval.shape
            size = math.prod(equation.outvars[0].aval.shape)
            total += 2 * size * math.prod(left[axis] for axis in contracted)
    return total


def as_defined(q_BTHK, up_HRK, angles_SK, rk_BSHR, lengths_B, base, pages_BN):
    """[cos sΘ, sin sΘ] · M_h(q) · rk_h as it stands."""
    # M_h(q) [B, T, H, K, R]: rows for cos, then rows for sin.
    a, b = jnp.split(q_BTHK[..., None], 2, axis=-2)
    first_HJR, second_HJR = jnp.split(up_HRK.swapaxes(1, 2), 2, axis=1)
    cos_sin = a * first_HJR + b * second_HJR, b * first_HJR - a * second_HJR
    mixed_BTHKR = jnp.concatenate(cos_sin, axis=-2)
    view_BTHSR = jnp.einsum("SK,BTHKR->BTHSR", angles_SK, mixed_BTHKR)
    if rk_BSHR.shape[2] == 1:  # one latent for all heads
        return jnp.einsum("BTHSR,BSR->SBTH", view_BTHSR, rk_BSHR[:, :, 0])
    return jnp.einsum("BTHSR,BSHR->SBTH", view_BTHSR, rk_BSHR)


# The rest differs from these by a number.
MARKED = quick("mha", "mla", "lrkv-shared", "lrkv-full", slow=ENTRIES)


@pytest.mark.parametrize("name", MARKED)
def test_flops_of_a_step_are_the_products_of_its_program(name, monkeypatch):
    # Products and sums of a single query on a CPU are as many as those of the matrix products.
    monkeypatch.setattr(online, "is_small_batch", lambda queries: False)
    entry = ENTRIES[name]
    shape = {"layers": 1, "width": H * K, "heads": H, "head_width": K, "vocabulary": 8}
    model = ModelConfig(**shape, attention=entry, dtype="float32")
    flops = attention_flops(model)
    for length in (16, 48):  # fewer than a chunk: the program's loop turns once

        def program(length=length):
            problem = make_problem(model, np.array([length], np.int32), length, "float32", 0)
            return with_kernel(problem, problem.inputs, problem.cache, problem.lengths_B, "xla")

        made = 0
        if name.endswith("-full"):
            # The formula is the definition's, M_h(q) · rk_h; XLA's program compresses the angles.
            monkeypatch.setattr(angles, "logits", as_defined)
            # An element of M_h(q) is two products and a sum.
            made = 3 * H * K * (entry.rank if name == "lrkv-full" else entry.kv_lora_rank)
        assert flops.at(length) == products(program) + made
    three = model.model_copy(update={"layers": 3})
    assert attention_flops(three).at(48) == 3 * flops.at(48)


def test_lrkv_s_extra_work_grows_with_the_cache():
    """The paper's Table 10 says "T-dependence: none"; its own section on decoding says O(T r)."""
    for rope, share in (("shared", 46 / 128), ("full", 46 / 128 + 46 / 2)):
        model = load_config("128m", [f"attention.rope={rope}"]).model
        mha = attention_flops(load_config("128m", ["attention=mha"]).model)
        ours = attention_flops(model)
        assert ours.per_cached_token / mha.per_cached_token == pytest.approx(1 + share)
