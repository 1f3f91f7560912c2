"""The model of a factored export, with vLLM's cache: blocks of attention and MLP.

D model width  F hidden width of the MLP  V vocabulary
"""

from functools import partial

import torch
from torch import nn
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce

from lrkv_vllm.attention import FactoredAttention, rms_norm
from lrkv_vllm.weights import load, weight

ACTIVATIONS = {
    "relu2": lambda x: x.relu().square(),
    "silu": nn.functional.silu,
    "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


def gains(config) -> nn.ParameterDict:
    """The gain of a norm over the model's width, if the model has gains."""
    return nn.ParameterDict({"gain": weight(config.hidden_size)} if config.norm_gain else {})


def normed(x: torch.Tensor, gains: nn.ParameterDict, eps: float) -> torch.Tensor:
    y = rms_norm(x, eps)
    return y * gains["gain"] if gains else y


class Block(nn.Module):
    def __init__(self, config, vllm_config, prefix):
        super().__init__()
        D, F = config.hidden_size, config.intermediate_size
        self.eps, self.activation = config.rms_norm_eps, ACTIVATIONS[config.hidden_act]
        self.norm_attention, self.norm_mlp = gains(config), gains(config)
        self.attention = FactoredAttention(config, vllm_config, f"{prefix}.attention")
        columns = ("up", "gate") if config.gated else ("up",)
        self.mlp = nn.ParameterDict({name: weight(D, F, axis=1) for name in columns})
        self.mlp["down"] = weight(F, D, axis=0)

    def forward(self, x, positions):
        x = x + self.attention(normed(x, self.norm_attention, self.eps), positions)
        y = normed(x, self.norm_mlp, self.eps)
        h = self.activation(y @ self.mlp["gate" if "gate" in self.mlp else "up"])
        h = h * (y @ self.mlp["up"]) if "gate" in self.mlp else h
        return x + tensor_model_parallel_all_reduce(h @ self.mlp["down"])


class LrkvForCausalLM(nn.Module):
    """`lrkv export --as factored` in vLLM. Parameters have the export's names."""

    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()
        config = self.config = vllm_config.model_config.hf_config
        self.embedding = nn.ParameterDict({"table": weight(config.vocab_size, config.hidden_size)})
        self.blocks = nn.ModuleList(
            Block(config, vllm_config, f"blocks.{layer}")
            for layer in range(config.num_hidden_layers)
        )
        self.norm = gains(config)
        if not config.tied_head:
            kernel = weight(config.hidden_size, config.vocab_size, axis=1)
            self.head = nn.ParameterDict({"kernel": kernel})

    def embed_input_ids(self, input_ids):
        return self.embedding["table"][input_ids]

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        x = rms_norm(x, self.config.rms_norm_eps) if self.config.embedding_norm else x
        for block in self.blocks:
            x = block(x, positions)
        return normed(x, self.norm, self.config.rms_norm_eps)

    def compute_logits(self, hidden_states):
        if self.config.tied_head:
            logits = (hidden_states @ self.embedding["table"].T).float()
            logits = logits * self.config.hidden_size**-0.5
        else:
            logits = (hidden_states @ self.head["kernel"]).float()
            logits = tensor_model_parallel_all_gather(logits)[..., : self.config.vocab_size]
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def load_weights(self, weights):
        """Take the export's tensors; raises `ValueError` unless they are the parameters."""
        own, loaded = {n: p for n, p in self.named_parameters() if p.numel()}, set()
        for name, tensor in weights:
            if name not in own:
                raise ValueError(f"{name} is no weight of this model: export the run again")
            load(name, own[name], tensor)
            loaded.add(name)
        if missing := own.keys() - loaded:
            raise ValueError(f"the weights have no {min(missing)}: export the run again")
        return {name for name, _ in self.named_parameters()}  # those of no size, too

    def process_weights_after_loading(self):
        """vLLM's hook behind every loader, that of drawn weights included."""
        layers = [block.attention for block in self.blocks]
        for layer in layers:
            layer.prepare()
        if layers[0].input.is_cuda:
            from lrkv_vllm.decode_kernel import checked

            kernel = checked(layers[0])
            for layer in layers:
                layer.kernel = kernel and partial(kernel, layer)
