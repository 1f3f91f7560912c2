"""The quickstart's kind of model and its optimizer in PyTorch, as its users write it.

A peer of `peers.py`, which starts it in an interpreter with PyTorch and NumPy:

    {"model": {}, "optimizer": {}, "parameters": NPZ, "tokens": NPY, "threads": N, "compile": bool}
    {"steps": N}     N optimizer steps -> {"seconds", "loss": [...], "grad_norm"}

The mathematics is lrkv_jax's: RMSNorm without gains, half-split RoPE, QK-norm, ReLU² MLP, norm
after the embedding, soft-capped float32 logits, Muon on the matrices, AdamW on embedding and head.

B sequences  T positions  D width  H heads  K head width  R residual rank  V vocabulary
"""

import itertools
import math
import time

import numpy as np
import torch
import torch.nn.functional as F
from answering import answer
from torch import nn


def rms_norm(x, eps):
    return F.rms_norm(x, x.shape[-1:], eps=eps)


class Rope(nn.Module):
    """(x1, x2) → (x1·cos − x2·sin, x2·cos + x1·sin) for the two halves of a head."""

    def __init__(self, length, width, base):
        super().__init__()
        frequencies_J = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles_TJ = torch.outer(torch.arange(length, dtype=torch.float32), frequencies_J)
        self.register_buffer("cos", angles_TJ.cos())
        self.register_buffer("sin", angles_TJ.sin())

    def forward(self, x):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * self.cos - x2 * self.sin, x2 * self.cos + x1 * self.sin], dim=-1)


class Block(nn.Module):
    """MHA, or LRKV in `rope: full` or `latent`, and the MLP."""

    def __init__(self, model):
        super().__init__()
        D, self.H, K = model["width"], model["heads"], model["head_width"]
        self.attention_kind, self.mode = model["attention"]["kind"], model["attention"].get("rope")
        self.eps = model["norm_eps"]
        self.query, self.output = self._linear(D, self.H * K), self._linear(self.H * K, D)
        self.rope = Rope(model["length"], K, model["rope_base"])
        if self.attention_kind == "mha":
            self.key, self.value = self._linear(D, self.H * K), self._linear(D, self.H * K)
        else:
            R = model["attention"]["rank"]
            self.key, self.value = self._linear(D, K), self._linear(D, K)
            self.key_down, self.value_down = (
                nn.Parameter(torch.empty(self.H, D, R)) for _ in range(2)
            )
            self.key_up, self.value_up = (nn.Parameter(torch.empty(self.H, R, K)) for _ in range(2))
            self.latent_rope = Rope(model["length"], R, model["rope_base"])
        self.up = self._linear(D, model["feed_forward"])
        self.down = self._linear(model["feed_forward"], D)

    @staticmethod
    def _linear(inputs, outputs):
        return nn.Linear(inputs, outputs, bias=False)

    def heads(self, x_BTD, linear):
        return linear(x_BTD).unflatten(-1, (self.H, -1)).transpose(1, 2)

    def attend(self, x_BTD):
        q = rms_norm(self.heads(x_BTD, self.query), self.eps)
        if self.attention_kind == "mha":
            k = self.rope(rms_norm(self.heads(x_BTD, self.key), self.eps))
            q, v = self.rope(q), self.heads(x_BTD, self.value)
        else:
            shared, latents = self.key(x_BTD)[:, None], self.down_of(x_BTD, self.key_down)
            v = self.value(x_BTD)[:, None] + self.down_of(x_BTD, self.value_down) @ self.value_up
            k = shared + latents @ self.key_up
            if self.mode == "full":
                q, k = self.rope(q), self.rope(rms_norm(k, self.eps))
            else:  # the shared part and the latents are rotated, each with its own frequencies
                inverse = torch.rsqrt(k.square().mean(-1, keepdim=True) + self.eps)
                in_latents = self.latent_rope(q @ self.key_up.transpose(-1, -2))
                shared = self.rope(shared).expand_as(k)
                k = inverse * torch.cat([shared, self.latent_rope(latents)], -1)
                q = torch.cat([self.rope(q), in_latents], -1)
        scale = v.shape[-1] ** -0.5
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.output(out.transpose(1, 2).flatten(2))

    def down_of(self, x_BTD, down_HDR):
        return torch.einsum("btd,hdr->bhtr", x_BTD, down_HDR)

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attend(rms_norm(x_BTD, self.eps))
        return x_BTD + self.down(F.relu(self.up(rms_norm(x_BTD, self.eps))).square())


class Transformer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.eps, self.softcap = model["norm_eps"], model["softcap"]
        self.embedding = nn.Embedding(model["vocabulary"], model["width"])
        self.blocks = nn.ModuleList(Block(model) for _ in range(model["layers"]))
        self.head = nn.Linear(model["width"], model["vocabulary"], bias=False)

    def forward(self, tokens_BU):
        """The mean −log p in nats of each token after the first, U = T + 1."""
        x_BTD = rms_norm(self.embedding(tokens_BU[:, :-1]), self.eps)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(rms_norm(x_BTD, self.eps)).float()
        logits_BTV = self.softcap * torch.tanh(logits_BTV / self.softcap)
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BU[:, 1:].flatten())


def orthogonalize(u, steps):
    """Keller Jordan's Newton–Schulz iteration on the last two axes."""
    x = u / (u.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """A loop over the parameters; of an array of three axes, each matrix by itself."""

    def __init__(self, params, lr, momentum, orthogonalize):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.orthogonalize = orthogonalize

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                average = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                direction = self.orthogonalize(p.grad.lerp(average, group["momentum"]))
                # A Linear's weight is [out, in], LRKV's factors are [H, in, out].
                fan_out, fan_in = p.shape if p.ndim == 2 else (p.shape[2], p.shape[1])
                p.add_(direction, alpha=-group["lr"] * math.sqrt(max(1.0, fan_out / fan_in)))


class Trainer:
    """The model with lrkv_jax's parameters, its optimizers and its batches."""

    def __init__(self, model, optimizer, parameters, tokens, threads, compile, **_):
        torch.set_num_threads(threads)
        self.model = Transformer(model)
        self.copy(np.load(parameters))
        rest = [
            {"params": self.model.embedding.parameters(), "lr": optimizer["embedding_lr"]},
            {"params": self.model.head.parameters(), "lr": optimizer["head_lr"]},
        ]

        def turned(u):
            return orthogonalize(u, optimizer["iterations"])

        self.loss, self.clip = self.model, optimizer["grad_clip"]
        if compile:
            self.loss, turned = torch.compile(self.model), torch.compile(turned)
        matrices = list(self.model.blocks.parameters())
        self.optimizers = [
            Muon(matrices, optimizer["matrix_lr"], optimizer["momentum"], turned),
            torch.optim.AdamW(
                rest, betas=(optimizer["beta1"], optimizer["beta2"]), eps=optimizer["adam_eps"],
                weight_decay=0.0, fused=True,  # faster on a CPU than the default loop
            ),
        ]  # fmt: skip
        self.batches = itertools.cycle(np.load(tokens))

    @torch.no_grad()
    def copy(self, arrays):
        """Take lrkv_jax's arrays, whose kernels are [layers, inputs..., outputs...]."""

        def linear(module, kernel):
            module.weight.copy_(torch.from_numpy(kernel.reshape(module.in_features, -1).T.copy()))

        self.model.embedding.weight.copy_(torch.from_numpy(arrays["embedding.table"]))
        linear(self.model.head, arrays["head.kernel"])
        for layer, block in enumerate(self.model.blocks):
            for name, module in block.named_children():
                if isinstance(module, nn.Linear):
                    part = "mlp" if name in ("up", "down") else "attention"
                    linear(module, arrays[f"blocks.{part}.{name}"][layer])
            for name, parameter in block.named_parameters(recurse=False):
                parameter.copy_(torch.from_numpy(arrays[f"blocks.attention.{name}"][layer]))

    def steps(self, steps):
        """`steps` steps; the clock runs from the first batch in NumPy to the last update."""
        start, losses = time.perf_counter(), []
        for _ in range(steps):
            tokens_BU = torch.from_numpy(next(self.batches)).long()
            loss = self.loss(tokens_BU)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "loss": losses, "grad_norm": float(norm)}


if __name__ == "__main__":
    answer(lambda **order: (f"torch {torch.__version__}", Trainer(**order).steps))
