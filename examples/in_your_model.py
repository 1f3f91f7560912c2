"""LRKV in a Transformer of your own: plain flax NNX, optax, and one import from lrkv_jax.

    python examples/in_your_model.py

It learns to repeat a sequence, then continues one from the factored cache.

B batch  T positions  D model width  V vocabulary
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import lrkv_jax as lj

D, V, PERIOD = 64, 32, 8


class Transformer(nnx.Module):
    def __init__(self, layers: int, *, rngs: nnx.Rngs):
        config = lj.ModelConfig(width=D, heads=4, head_width=16, attention=lj.LRKV(rank=8))
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.attention = nnx.List(lj.make_attention(config, rngs=rngs) for _ in range(layers))
        self.up = nnx.List(nnx.Linear(D, 4 * D, rngs=rngs) for _ in range(layers))
        self.down = nnx.List(nnx.Linear(4 * D, D, rngs=rngs) for _ in range(layers))
        self.norm = nnx.List(nnx.RMSNorm(D, rngs=rngs) for _ in range(layers))
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens_BT):
        return self.head(self.blocks(self.embed(tokens_BT), lambda layer, x: layer(x)))

    def decode(self, tokens_BT, caches, lengths_B):
        """Logits after each of a few new tokens, and the caches with them."""
        before, after = iter(caches), []

        def attend(layer, x_BTD):
            out_BTD, cache = layer.decode(x_BTD, next(before), lengths_B)
            after.append(cache)
            return out_BTD

        return self.head(self.blocks(self.embed(tokens_BT), attend)), after

    def blocks(self, x_BTD, attend):
        for layer, up, down, norm in zip(
            self.attention, self.up, self.down, self.norm, strict=True
        ):
            x_BTD = x_BTD + attend(layer, norm(x_BTD))
            x_BTD = x_BTD + down(nnx.gelu(up(norm(x_BTD))))
        return x_BTD


@nnx.jit
def train_step(model, optimizer, tokens_BT):
    def loss(model):
        logits_BTV = model(tokens_BT[:, :-1])
        nats_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:])
        return nats_BT[:, PERIOD:].mean()  # what comes before cannot be known

    value, grads = nnx.value_and_grad(loss)(model)
    optimizer.update(model, grads)
    return value


def repeated(key, batch: int, times: int):
    return jnp.tile(jax.random.randint(key, (batch, PERIOD), 0, V), (1, times))


def main(steps: int = 300) -> float:
    model = Transformer(2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    keys = jax.random.split(jax.random.key(1), steps)
    losses = [float(train_step(model, optimizer, repeated(key, 32, 4))) for key in keys]
    print(f"loss {losses[0]:.2f} before, {losses[-1]:.4f} after {steps} steps")

    text_BT = repeated(jax.random.key(2), 4, 4)
    caches = [layer.init_cache(batch=4, length=text_BT.shape[1]) for layer in model.attention]
    decode = nnx.jit(Transformer.decode)
    shown = 2 * PERIOD
    logits_BTV, caches = decode(model, text_BT[:, :shown], caches, jnp.zeros(4, jnp.int32))
    right = []
    for length in range(shown, text_BT.shape[1]):
        token_B = logits_BTV[:, -1].argmax(-1)
        right.append((token_B == text_BT[:, length]).mean())
        logits_BTV, caches = decode(model, token_B[:, None], caches, jnp.full(4, length))
    share = float(jnp.stack(right).mean())
    print(f"{share:.0%} of the decoded tokens are right")
    return share


if __name__ == "__main__":
    main()
