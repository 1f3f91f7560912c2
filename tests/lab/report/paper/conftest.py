"""Runs for all tests of this folder, written once by hand, and what is made of them, made once."""

import functools

import pytest
from support.paper_cases import H, analyzed, report_item
from support.written_analyses import alike
from support.written_runs import write_sweep

from lrkv_jax.lab.report.comparison.files import read_runs


@pytest.fixture(scope="session")
def sweep(tmp_path_factory):
    """The folder of five variants and two more ranks, three seeds each."""
    return write_sweep(tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="session")
def runs(sweep):
    return read_runs([sweep])


@pytest.fixture(scope="session")
def heads(tmp_path_factory):
    """MHA's heads are orthogonal, MQA's identical, LRKV's have cosines of 0.1 times the layer."""
    folder = tmp_path_factory.mktemp("heads")
    for seed in (0, 1):
        analyzed(folder, "mha", lambda layer: alike(H, 0.0), seed=seed, ranks=(1, 2, 4))
        analyzed(folder, "mqa", lambda layer: alike(H, 1.0), seed=seed)
        analyzed(folder, "lrkv", lambda layer: alike(H, 0.1 * (layer + 1)), seed=seed, norm=9.0)
    return read_runs([folder])


@pytest.fixture(scope="session")
def of_sweep(runs):
    """A function from an item's name to its tables and pictures of the sweep."""
    return functools.cache(lambda name: report_item(name).made(runs))


@pytest.fixture(scope="session")
def of_heads(heads):
    """A function from an item's name to its tables and pictures of the analyzed runs."""
    return functools.cache(lambda name: report_item(name).made(heads))
