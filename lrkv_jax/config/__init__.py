"""Configuration: frozen, validated settings, loaded from YAML with dotted overrides."""

from lrkv_jax.config.attention import AttentionConfig
from lrkv_jax.config.load import dump_config, find_config, load_config
from lrkv_jax.config.schema import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    MuonConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
