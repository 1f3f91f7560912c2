"""Fits of keys and values: what is there is found, the best is best, the metric is the error."""

import itertools

import numpy as np
import pytest

from lrkv_jax.interop import fits
from lrkv_jax.interop.fits import Calibration

D, G, H, K, R = 40, 3, 6, 8, 2
J = K // 2


@pytest.fixture(scope="module")
def drawn():
    """(calibration, output, keys' reader, values' reader, shared, residuals, turns)."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(D, 2 * D))
    calibration = Calibration(wide @ wide.T / D, rng.uniform(0.5, 2, size=(H, J)))
    output_HKD = rng.normal(size=(H, K, D))
    residual_GDK = rng.normal(size=(G, D, R)) @ rng.normal(size=(G, R, K))
    turns_GJ = rng.normal(size=(G, J)) + 1j * rng.normal(size=(G, J))
    readers = calibration.of_keys(G), fits.reader_of_values(output_HKD, G)
    return calibration, output_HKD, readers, rng.normal(size=(D, K)), residual_GDK, turns_GJ


def turned(weights_GDK, turns_GJ):
    """Pairs of each group's columns times its complex numbers."""
    z = (weights_GDK[..., :J] + 1j * weights_GDK[..., J:]) * turns_GJ[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def key_error(drawn, family_GDK, **how):
    calibration, _, (reader_GK, _), *_ = drawn
    reduced = fits.Reduced.of(calibration.moment_DD, family_GDK)
    fit = fits.shared_keys(reduced.parts[0], reduced.back_DM, reader_GK, R, **how)
    reader_GKK = reader_GK[:, :, None] * np.eye(K)
    error = fits.relative_error(family_GDK, fit.total_GDK, calibration.moment_DD, reader_GKK)
    return error, fit


@pytest.mark.parametrize("free", ["nothing", "phase", "any"])
def test_keys_of_one_shared_matrix_are_found_in_each_head_s_own_gauge(drawn, free):
    *_, shared_DK, residual_GDK, turns_GJ = drawn
    gauge = {"nothing": np.ones_like(turns_GJ), "phase": turns_GJ / abs(turns_GJ), "any": turns_GJ}
    family_GDK = turned(shared_DK + residual_GDK, gauge[free])
    error, fit = key_error(drawn, family_GDK, free=free)
    assert error < 2e-3
    # What queries are multiplied by commutes with every rotation of pairs.
    angle = np.exp(1j * np.linspace(0, 2, J))[None].repeat(G, axis=0)
    rotation_GKK = fits._as_matrices(angle)
    both = fit.gauge_GKK @ rotation_GKK, rotation_GKK @ fit.gauge_GKK
    assert np.allclose(*both, atol=1e-12)
    if free == "phase":
        assert np.allclose(fit.gauge_GKK @ fit.gauge_GKK.swapaxes(1, 2), np.eye(K), atol=1e-12)
    if free != "nothing":
        assert key_error(drawn, family_GDK, free="nothing")[0] > 20 * error


def test_values_of_one_shared_matrix_are_found_in_any_basis_of_each_group(drawn):
    calibration, _, (_, reader_GKK), shared_DK, residual_GDK, _ = drawn
    basis_GKK = np.random.default_rng(1).normal(size=(G, K, K))
    family_GDK = (shared_DK + residual_GDK) @ basis_GKK
    reduced = fits.Reduced.of(calibration.moment_DD, family_GDK)
    fit = fits.shared_values(reduced.parts[0], reduced.back_DM, reader_GKK, R)
    found = fits.relative_error(family_GDK, fit.total_GDK, calibration.moment_DD, reader_GKK)
    assert found < 2e-3


def test_a_direction_that_a_group_hardly_has_is_left_to_its_residual(drawn):
    calibration, _, (_, reader_GKK), shared_DK, residual_GDK, _ = drawn
    basis_GKK = np.stack([np.eye(K)] * G)
    basis_GKK[0, 0] *= 1e-9
    family_GDK = (shared_DK + 0 * residual_GDK) @ basis_GKK
    reduced = fits.Reduced.of(calibration.moment_DD, family_GDK)
    fit = fits.shared_values(reduced.parts[0], reduced.back_DM, np.stack([np.eye(K)] * G), R)
    assert fit.condition < 2 / fits.CONDITION
    assert fits.relative_error(family_GDK, fit.total_GDK, calibration.moment_DD, reader_GKK) < 1e-8


@pytest.mark.parametrize("rank", [0, R])
def test_one_latent_is_the_best_of_its_width_and_private_ones_lower_its_error(drawn, rank):
    calibration, _, (keys_GK, values_GKK), *_ = drawn
    rng = np.random.default_rng(2)
    families = rng.normal(size=(2, G, D, K))
    readers = keys_GK[:, :, None] * np.eye(K), values_GKK
    reduced = fits.Reduced.of(calibration.moment_DD, *families)
    fit = fits.joint(reduced, readers, 9, rank, weights=(3.0, 1.0))
    root_DD = fits.root(calibration.moment_DD, fits.FLOOR)
    read = [root_DD @ family @ N for family, N in zip(families, readers, strict=True)]
    left = [root_DD @ (f - t) @ N for f, t, N in zip(families, fit.total, readers, strict=True)]
    error = sum(
        (w * np.linalg.norm(a) / np.linalg.norm(b)) ** 2
        for w, a, b in zip((3, 1), left, read, strict=True)
    )
    scaled = [w * y / np.linalg.norm(y) for w, y in zip((3, 1), read, strict=True)]
    columns = np.concatenate([one.transpose(1, 0, 2).reshape(D, -1) for one in scaled], axis=1)
    best = np.sum(np.linalg.svd(columns, compute_uv=False)[9:] ** 2)
    assert error == pytest.approx(best) if not rank else error < 0.9 * best


def test_the_metric_is_the_error_of_what_heads_write_and_of_logits(drawn):
    """Of values exactly; of logits as a mean over all rotations, here all of a grid of phases."""
    calibration, output_HKD, (keys_GK, values_GKK), *_ = drawn
    rng = np.random.default_rng(3)
    family, other = rng.normal(size=(2, G, D, K))
    root_DD = fits.root(calibration.moment_DD, fits.FLOOR)

    def written(weights_GDK):
        each = np.repeat(root_DD @ weights_GDK, H // G, axis=0) @ output_HKD
        return np.sum(each**2)

    share = written(family - other) / written(family)
    moment = calibration.moment_DD
    assert fits.relative_error(family, other, moment, values_GKK) == pytest.approx(share)

    # Queries of one magnitude per pair, at every relative phase of four values a pair.
    q_HJ = np.sqrt(calibration.energy_HJ)
    phases = np.array(list(itertools.product(np.exp(0.5j * np.pi * np.arange(4)), repeat=J)))

    def logits(weights_GDK):
        k = np.repeat(root_DD @ weights_GDK, H // G, axis=0)
        k_HDJ = k[..., :J] + 1j * k[..., J:]
        return np.sum(np.einsum("PJ,HJ,HDJ->PHD", phases, q_HJ, k_HDJ.conj()).real ** 2)

    reader_GKK = keys_GK[:, :, None] * np.eye(K)
    share = logits(family - other) / logits(family)
    assert fits.relative_error(family, other, moment, reader_GKK) == pytest.approx(share)
