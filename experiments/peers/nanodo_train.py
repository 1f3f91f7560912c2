"""nanodo's model and loss at the same widths, with its AdamW: a peer of `peers.py` in JAX.

Takes the same orders as torch_train.py; its argument is the folder of a clone of
github.com/google-deepmind/nanodo. That is another model (LayerNorm, learned positions, GELU, a tied
head, no QK-norm), so its losses say nothing here.
"""

import itertools
import sys
import time

sys.path.insert(0, sys.argv[1])

import jax
import numpy as np
import optax
from answering import answer
from nanodo import model as nanodo


class Trainer:
    def __init__(self, model, optimizer, tokens, **_):
        if model["heads"] * model["head_width"] != model["width"]:
            raise ValueError("nanodo's heads have width / heads numbers")
        config = nanodo.DoConfig(
            D=model["width"], H=model["heads"], L=model["length"], N=model["layers"],
            V=model["vocabulary"], F=model["feed_forward"], fsdp_enabled=False,
        )  # fmt: skip
        module = nanodo.TransformerDo(config)
        self.batches = itertools.cycle(np.load(tokens))
        rule = optax.chain(
            optax.clip_by_global_norm(optimizer["grad_clip"]),
            optax.adamw(1e-3, optimizer["beta1"], optimizer["beta2"], optimizer["adam_eps"]),
        )
        tokens_BU = next(self.batches)
        self.params = module.init(jax.random.key(0), tokens_BU[:, :-1])
        self.state = rule.init(self.params)

        def loss(params, tokens_BU):
            logits_BTV = module.apply(params, tokens_BU[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(
                logits_BTV, tokens_BU[:, 1:]
            ).mean()

        def step(params, state, tokens_BU):
            value, gradient = jax.value_and_grad(loss)(params, tokens_BU)
            updates, state = rule.update(gradient, state, params)
            norm = optax.global_norm(gradient)
            return optax.apply_updates(params, updates), state, value, norm

        self.step = jax.jit(step, donate_argnums=(0, 1))

    def steps(self, steps):
        start, losses = time.perf_counter(), []
        for _ in range(steps):
            found = self.step(self.params, self.state, next(self.batches))
            self.params, self.state, loss, norm = found
            losses.append(float(loss))
        jax.block_until_ready(self.params)
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "loss": losses, "grad_norm": float(norm)}


if __name__ == "__main__":
    answer(lambda **order: (f"nanodo, jax {jax.__version__}", Trainer(**order).steps))
