"""Muon on the matrices, AdamW on the rest, and one schedule for every learning rate."""

from lrkv_jax.optim.groups import make_optimizer
from lrkv_jax.optim.muon import MuonState, orthogonalize, scale_by_muon
from lrkv_jax.optim.schedules import learning_rates, momentum_schedule, schedule
