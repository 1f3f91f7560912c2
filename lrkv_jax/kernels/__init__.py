"""Attention and loss as functions of arrays: jax alone, no parameters, no configuration.

B batch  T query positions  S key positions  H heads  G key/value heads  N heads per group (H / G)
K head width  R residual rank  C latent width  P rope-key width  V vocabulary
"""
