"""A process's place among others, from what each launcher leaves in the environment."""

import pytest

from lrkv_jax.distributed.cluster_env import find, first_host, left_out
from lrkv_jax.errors import LrkvError

# As `srun --ntasks-per-node=1` of a job on four nodes leaves it in the third.
SLURM = {
    "SLURM_JOB_ID": "812345", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[007-009,012]", "SLURM_JOB_NODELIST": "gpu[007-009,012]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip


def test_slurm_says_all_of_it():
    place = find(SLURM)
    assert (place.launcher, place.process, place.processes) == ("Slurm", 2, 4)
    host, _, port = place.coordinator.rpartition(":")
    assert host == "gpu007" and 61440 <= int(port) < 65536
    peers = [find({**SLURM, "SLURM_PROCID": str(p), "SLURM_NODEID": str(p)}) for p in range(4)]
    assert {peer.coordinator for peer in peers} == {place.coordinator}
    # Another job, or another step of this one, does not meet at the same port.
    assert find({**SLURM, "SLURM_STEP_ID": "1"}).coordinator != place.coordinator


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node[001-0015],host2", "node001"),
        ("gpu-a[2-3]-ib,gpu-b1", "gpu-a2-ib"),
        ("rack[0-1]node[4-7]", "rack0node4"),
        ("10.0.0.7", "10.0.0.7"),
    ],
)
def test_the_first_of_slurms_hosts(nodes, first):
    assert first_host(nodes) == first


@pytest.mark.parametrize(
    "environment",
    [
        {},
        # One task.
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        # The shell of `salloc -n 4`, and an interactive step in it.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "n[1-4]"},
        {**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        # A batch script outside srun.
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        {"JOB_COMPLETION_INDEX": "0"},  # a Job of one pod
        {"LRKV_PROCESSES": "1", "LRKV_PROCESS": "0", "LRKV_COORDINATOR": "127.0.0.1:5000"},
    ],
)
def test_a_process_alone_joins_nothing(environment):
    assert find(environment) is None


def test_a_batch_script_that_forgot_srun_is_told():
    assert "srun" in left_out({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert left_out(SLURM) is None and left_out({"SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LRKV_PROCESS": "1"}, "LRKV_PROCESS is set and LRKV_PROCESSES is not"),
        ({"LRKV_PROCESSES": "two"}, "LRKV_PROCESSES = 'two': use a whole number"),
        ({"LRKV_PROCESSES": "2", "LRKV_PROCESS": "2", "LRKV_COORDINATOR": "a:1"}, "from 0 to 1"),
        ({"LRKV_PROCESSES": "2", "LRKV_PROCESS": "0"}, "write the HOST:PORT where process 0 of 2"),
        ({"LRKV_PROCESSES": "0", "LRKV_PROCESS": "0"}, "LRKV_PROCESSES = '0': use .* from 1"),
        ({**SLURM, "LRKV_PROCESSES": "8"}, "LRKV_PROCESSES = 8 and nothing says which"),
        ({**SLURM, "SLURM_PROCID": "4"}, "process 4 of 4"),
        ({"JOB_COMPLETION_INDEX": "1"}, "set LRKV_PROCESSES"),
    ],
)
def test_what_does_not_fit_together_is_one_line(environment, message):
    with pytest.raises(LrkvError, match=message.replace("(", r"\(")) as error:
        find(environment)
    assert "\n" not in str(error.value)
