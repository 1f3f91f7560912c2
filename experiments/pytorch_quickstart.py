"""The quickstart model and its optimiser in PyTorch, eager, written as its users write it.

The other side of `compare_pytorch.py`, which starts it in an interpreter that has PyTorch and
NumPy and needs nothing else. It reads one JSON object a line and answers each with one:

    {"do": "load", "model": {...}, "optimizer": {...}, "parameters": NPZ, "tokens": NPY}
    {"do": "steps", "count": N}     N optimiser steps -> {"seconds", "loss": [...], "grad_norm"}

The mathematics is lrkv_jax's: gain-free RMSNorm, half-split RoPE, QK-norm, ReLU² MLP, norm after
the embedding, soft-capped float32 logits, Muon on the matrices and AdamW on embedding and head.

B sequences  T positions  D width  H heads  K head width  R residual rank  V vocabulary
"""

import itertools
import json
import math
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x, eps):
    return F.rms_norm(x, x.shape[-1:], eps=eps)


class Rope(nn.Module):
    """(x1, x2) → (x1·cos − x2·sin, x2·cos + x1·sin) for the two halves of a head."""

    def __init__(self, context, width, base):
        super().__init__()
        frequencies_J = base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles_TJ = torch.outer(torch.arange(context, dtype=torch.float32), frequencies_J)
        self.register_buffer("cos", angles_TJ.cos())
        self.register_buffer("sin", angles_TJ.sin())

    def forward(self, x_BHTK):
        x1, x2 = x_BHTK.chunk(2, dim=-1)
        return torch.cat([x1 * self.cos - x2 * self.sin, x2 * self.cos + x1 * self.sin], dim=-1)


class Heads(nn.Module):
    """MHA's keys or values: [B, T, D] → [B, H, T, K]."""

    def __init__(self, model):
        super().__init__()
        self.heads = model["heads"]
        self.linear = nn.Linear(model["width"], self.heads * model["head_width"], bias=False)

    def forward(self, x_BTD):
        return self.linear(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2)


class LowRankHeads(nn.Module):
    """LRKV's keys or values: x (W + U_h B_hᵀ) of each head."""

    def __init__(self, model):
        super().__init__()
        D, H, K = model["width"], model["heads"], model["head_width"]
        R = model["attention"]["rank"]
        self.shared = nn.Linear(D, K, bias=False)
        self.down = nn.Parameter(torch.empty(H, D, R))
        self.up = nn.Parameter(torch.empty(H, R, K))

    def forward(self, x_BTD):
        latent_BHTR = torch.einsum("btd,hdr->bhtr", x_BTD, self.down)
        return self.shared(x_BTD)[:, None] + latent_BHTR @ self.up


class Block(nn.Module):
    def __init__(self, model, rope):
        super().__init__()
        D, H, K = model["width"], model["heads"], model["head_width"]
        make = {"mha": Heads, "lrkv": LowRankHeads}[model["attention"]["kind"]]
        self.query, self.key, self.value = Heads(model), make(model), make(model)
        self.output = nn.Linear(H * K, D, bias=False)
        self.up = nn.Linear(D, model["feed_forward"], bias=False)
        self.down = nn.Linear(model["feed_forward"], D, bias=False)
        self.rope, self.eps = rope, model["norm_eps"]

    def attention(self, x_BTD):
        q_BHTK = rms_norm(self.rope(self.query(x_BTD)), self.eps)
        k_BHTK = rms_norm(self.rope(self.key(x_BTD)), self.eps)
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, self.value(x_BTD), is_causal=True)
        return self.output(out_BHTK.transpose(1, 2).flatten(2))

    def forward(self, x_BTD):
        x_BTD = x_BTD + self.attention(rms_norm(x_BTD, self.eps))
        return x_BTD + self.down(F.relu(self.up(rms_norm(x_BTD, self.eps))).square())


class Transformer(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.eps, self.softcap = model["norm_eps"], model["softcap"]
        self.embedding = nn.Embedding(model["vocabulary"], model["width"])
        rope = Rope(model["context"], model["head_width"], model["rope_base"])
        self.blocks = nn.ModuleList(Block(model, rope) for _ in range(model["layers"]))
        self.head = nn.Linear(model["width"], model["vocabulary"], bias=False)

    def forward(self, tokens_BU):
        """The mean −log p in nats of each token after the first, U = T + 1."""
        x_BTD = rms_norm(self.embedding(tokens_BU[:, :-1]), self.eps)
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = self.head(rms_norm(x_BTD, self.eps)).float()
        logits_BTV = self.softcap * torch.tanh(logits_BTV / self.softcap)
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BU[:, 1:].flatten())


def orthogonalize(u, steps, dtype):
    """Keller Jordan's Newton–Schulz iteration on the last two axes."""
    x = u.float() / (u.float().norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = x.to(dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """A loop over the parameters; of an array of three axes, each matrix by itself."""

    def __init__(self, params, lr, momentum, steps, dtype):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.steps, self.dtype = steps, dtype

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                average = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                direction = p.grad.lerp(average, group["momentum"])
                direction = orthogonalize(direction, self.steps, self.dtype)
                # A Linear's weight is [out, in], LRKV's factors are [H, in, out].
                fan_out, fan_in = p.shape if p.ndim == 2 else (p.shape[2], p.shape[1])
                p.add_(direction, alpha=-group["lr"] * math.sqrt(max(1.0, fan_out / fan_in)))


class Trainer:
    """The model with lrkv_jax's parameters, its optimisers and its batches."""

    def __init__(self, order):
        model, optimizer = order["model"], order["optimizer"]
        self.model = Transformer(model)
        self.copy(np.load(order["parameters"]), model)
        matrices = list(self.model.blocks.parameters())
        rest = [
            {"params": self.model.embedding.parameters(), "lr": optimizer["embedding_lr"]},
            {"params": self.model.head.parameters(), "lr": optimizer["head_lr"]},
        ]
        self.clip = optimizer["clip"]
        self.optimizers = [
            Muon(
                matrices, optimizer["matrix_lr"], optimizer["momentum"], optimizer["iterations"],
                getattr(torch, optimizer["muon_dtype"]),
            ),
            torch.optim.AdamW(
                rest, betas=(optimizer["beta1"], optimizer["beta2"]), eps=optimizer["adam_eps"],
                weight_decay=0.0, fused=True,  # faster on a CPU than the default loop
            ),
        ]  # fmt: skip
        self.batches = itertools.cycle(np.load(order["tokens"]))

    @torch.no_grad()
    def copy(self, arrays, model):
        """Take lrkv_jax's arrays, whose kernels are [layers, inputs..., outputs...]."""

        def linear(module, kernel, inputs):
            module.weight.copy_(torch.from_numpy(kernel.reshape(inputs, -1).T.copy()))

        D, HK = model["width"], model["heads"] * model["head_width"]
        self.model.embedding.weight.copy_(torch.from_numpy(arrays["embedding.table"]))
        linear(self.model.head, arrays["head.kernel"], D)
        for layer, block in enumerate(self.model.blocks):

            def of(name, layer=layer):
                return arrays[f"blocks.{name}"][layer]

            linear(block.query.linear, of("attention.query"), D)
            linear(block.output, of("attention.output"), HK)
            linear(block.up, of("mlp.up"), D)
            linear(block.down, of("mlp.down"), model["feed_forward"])
            for name, module in (("key", block.key), ("value", block.value)):
                if model["attention"]["kind"] == "mha":
                    linear(module.linear, of(f"attention.{name}"), D)
                    continue
                linear(module.shared, of(f"attention.{name}"), D)
                module.down.copy_(torch.from_numpy(of(f"attention.{name}_down")))
                module.up.copy_(torch.from_numpy(of(f"attention.{name}_up")))

    def steps(self, count):
        """`count` steps; the clock runs from the first batch in NumPy to the last update."""
        start, losses = time.perf_counter(), []
        for _ in range(count):
            tokens_BU = torch.from_numpy(next(self.batches)).long()
            loss = self.model(tokens_BU)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "loss": losses, "grad_norm": float(norm)}


def main():
    torch.set_num_threads(int(sys.argv[1]))
    torch.manual_seed(0)
    trainer = None
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "load":
            trainer = Trainer(order)
            answer = {"torch": torch.__version__, "threads": torch.get_num_threads()}
        else:
            answer = trainer.steps(order["count"])
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
