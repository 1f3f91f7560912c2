"""Promise of the Beam build: the records and counts of the local one."""

import fineweb
import numpy as np
import pytest

from lrkv_jax.config.schema import DataConfig
from lrkv_jax.data.records.builder import build_dataset, open_dataset


@pytest.mark.slow
def test_beams_direct_runner_builds_what_this_machine_does(tmp_path):
    pytest.importorskip("apache_beam")
    from lrkv_jax.data.records.beam import beam_stages

    fineweb.make(tmp_path / "source", files=2, rows=60)
    config = DataConfig(source=str(tmp_path / "source"), heldout=0.2, directory=str(tmp_path / "a"))
    other = config.model_copy(update={"directory": str(tmp_path / "b")})
    local = open_dataset(build_dataset(config, 64))
    options = ["--runner=DirectRunner", "--direct_num_workers=1"]
    clustered = open_dataset(build_dataset(other, 64, stages=beam_stages(options)))
    assert clustered.info.metadata == local.info.metadata
    assert clustered.info.features["tokens"].np_dtype == np.uint16
    for split in ("train", "heldout"):
        ours, theirs = local.as_data_source(split), clustered.as_data_source(split)
        assert len(ours) == len(theirs) > 10
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one["tokens"], other["tokens"])
