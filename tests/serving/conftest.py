import pytest
from support.planted_models import plant


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """The directory of a run that nobody trained, which reads 256 tokens."""
    directory = tmp_path_factory.mktemp("served") / "run"
    plant(directory, "train.seq_len=256")
    return directory
