"""A process's place among others, from what each launcher leaves in the environment."""

import pytest

from lrkv_jax.errors import LrkvError
from lrkv_jax.runtime.hosts import Place, find, first_host, left_out, share_of_devices

# As `srun --ntasks-per-node=1` of a job on four nodes leaves it in the third.
SLURM = {
    "SLURM_JOB_ID": "812345", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "gpu[007-009,012]", "SLURM_JOB_NODELIST": "gpu[007-009,012]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}  # fmt: skip


def host(place):
    return place.coordinator.rpartition(":")[0]


def port(place):
    return int(place.coordinator.rpartition(":")[2])


def test_slurm_says_all_of_it():
    place = find(SLURM)
    assert (place.process, place.processes, place.local_processes) == (2, 4, 1)
    assert host(place) == "gpu007" and 61440 <= port(place) < 65536
    peers = [find({**SLURM, "SLURM_PROCID": str(p), "SLURM_NODEID": str(p)}) for p in range(4)]
    assert {peer.coordinator for peer in peers} == {place.coordinator}
    # Another job, or another step of this one, does not meet at the same port.
    assert find({**SLURM, "SLURM_STEP_ID": "1"}).coordinator != place.coordinator


def test_slurm_tells_how_many_tasks_a_node_has():
    eight = {**SLURM, "SLURM_STEP_NUM_TASKS": "17", "SLURM_STEP_TASKS_PER_NODE": "8(x2),1",
             "SLURM_PROCID": "13", "SLURM_LOCALID": "5", "SLURM_NODEID": "1"}  # fmt: skip
    assert (find(eight).local_process, find(eight).local_processes) == (5, 8)
    last = {**eight, "SLURM_PROCID": "16", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"}
    assert (find(last).local_process, find(last).local_processes) == (0, 1)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node001,host2", "node001"),
        ("node[001-0015],host2", "node001"),
        ("node[7,9-15]", "node7"),
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
        {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"JOB_COMPLETION_INDEX": "0"},  # a Job of one pod
        {"LRKV_PROCESSES": "1"},
    ],
)
def test_a_process_alone_joins_nothing(environment):
    assert find(environment) is None


def test_a_run_of_one_process_can_be_asked_for():
    asked = {"LRKV_PROCESSES": "1", "LRKV_COORDINATOR": "127.0.0.1:5000"}
    assert find(asked) == Place("LRKV_PROCESSES", 0, 1, "127.0.0.1:5000")


def test_a_batch_script_that_forgot_srun_is_told():
    assert "srun" in left_out({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert left_out(SLURM) is None and left_out({"SLURM_NTASKS": "1"}) is None


@pytest.mark.parametrize(
    ("known", "coordinator"),
    [
        ({"OMPI_MCA_orte_hnp_uri": "15315.0;tcp://10.96.0.1,10.148.0.1:34911"}, "10.96.0.1"),
        ({"OMPI_MCA_orte_hnp_uri": "13145.0;tcp6://[fe80::b9b:ac5d]:43370"}, "[fe80::b9b:ac5d]"),
        ({"PMIX_NAMESPACE": "prterun-gpu-007-4711@1"}, "gpu-007"),
        # mpirun's daemons are tasks of a step of their own: it says nothing about the ranks.
        ({**SLURM, "SLURM_STEP_NODELIST": "gpu[008-012]", "SLURM_STEP_NUM_TASKS": "3"}, "gpu007"),
    ],
)
def test_open_mpi_without_mpi4py(known, coordinator):
    place = find({**OPEN_MPI, **known})
    assert (place.process, place.processes, host(place)) == (9, 16, coordinator)
    assert (place.local_process, place.local_processes) == (1, 8)


def test_ranks_of_mpirun_agree_on_the_port_whether_in_slurms_step_or_beside_it():
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "PMIX_NAMESPACE": "prterun-n1-7@1"}
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n2", "SLURM_PROCID": "0"}
    beside, inside = ({**OPEN_MPI, **job, **more} for more in ({}, step))
    assert find(beside).coordinator == find(inside).coordinator


def test_mpi_on_one_host_meets_there():
    place = find({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "16"})
    assert host(place) == "127.0.0.1"


def test_pmi_counts_and_srun_names_the_host():
    pmi = {"PMI_RANK": "3", "PMI_SIZE": "4"}
    place = find({**SLURM, **pmi})
    assert (place.process, host(place)) == (3, "gpu007")
    hydra = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "LRKV_COORDINATOR": "n1:5000"}
    assert find({**pmi, **hydra}) == Place("PMI", 3, 4, "n1:5000", 1, 2)


def test_a_kubernetes_pod_knows_its_number_and_the_manifest_the_rest():
    given = {"LRKV_COORDINATOR": "lrkv-0.lrkv:8476", "LRKV_PROCESSES": "2"}
    for index in ("0", "1"):
        place = find({"JOB_COMPLETION_INDEX": index, **given})
        assert place == Place("Kubernetes", int(index), 2, "lrkv-0.lrkv:8476")


def test_plain_variables_override_the_launcher():
    plain = {"LRKV_COORDINATOR": "here:5", "LRKV_PROCESSES": "2", "LRKV_PROCESS": "1"}
    place = find({**SLURM, **plain})
    assert (place.process, place.processes, place.coordinator) == (1, 2, "here:5")
    assert find({**SLURM, "LRKV_COORDINATOR": "here:5"}).coordinator == "here:5"


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"LRKV_PROCESS": "1"}, "LRKV_PROCESS is set and LRKV_PROCESSES is not"),
        ({"LRKV_COORDINATOR": "a:1"}, "LRKV_COORDINATOR is set and LRKV_PROCESSES is not"),
        ({"LRKV_PROCESSES": "2", "LRKV_COORDINATOR": "a:1"}, "set LRKV_PROCESS"),
        ({"LRKV_PROCESSES": "two"}, "LRKV_PROCESSES = 'two': use a whole number"),
        ({"LRKV_PROCESSES": "2", "LRKV_PROCESS": "2", "LRKV_COORDINATOR": "a:1"}, "from 0 to 1"),
        ({"LRKV_PROCESSES": "2", "LRKV_PROCESS": "0"}, "set LRKV_COORDINATOR=HOST:PORT"),
        ({"LRKV_PROCESSES": "2", "LRKV_PROCESS": "0", "LRKV_COORDINATOR": "a"}, "write HOST:PORT"),
        ({**SLURM, "LRKV_PROCESSES": "8"}, "LRKV_PROCESSES = 8 and Slurm started 4"),
        ({**SLURM, "SLURM_PROCID": "4"}, "process 4 of 4"),
        ({**SLURM, "SLURM_PROCID": "-1"}, "SLURM_PROCID = '-1'"),
        (OPEN_MPI, "set LRKV_COORDINATOR=HOST:PORT"),
        ({"JOB_COMPLETION_INDEX": "1"}, "set LRKV_PROCESSES"),
        ({"JOB_COMPLETION_INDEX": "0", "LRKV_PROCESSES": "2"}, "set LRKV_COORDINATOR"),
    ],
)
def test_what_does_not_fit_together_is_one_line(environment, message):
    with pytest.raises(LrkvError, match=message.replace("(", r"\(")) as error:
        find(environment)
    assert "\n" not in str(error.value)


EIGHT = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}


def at(local_process, local_processes):
    return Place("Slurm", 0, 16, "a:1", local_process, local_processes)


def test_one_process_a_host_drives_all_its_devices():
    assert share_of_devices(at(0, 1), EIGHT) is None


@pytest.mark.parametrize(("processes", "share"), [(8, [3]), (4, [6, 7]), (2, None)])
def test_processes_of_a_host_share_what_they_see_in_common(processes, share):
    if share:
        assert share_of_devices(at(3, processes), EIGHT) == share
    shares = [share_of_devices(at(p, processes), EIGHT) for p in range(processes)]
    assert sum(shares, []) == list(range(8))


@pytest.mark.parametrize(
    "given", [{"CUDA_VISIBLE_DEVICES": "3"}, {**EIGHT, "SLURM_GPUS_PER_TASK": "1"}]
)
def test_what_the_launcher_gave_each_process_is_not_shared_again(given):
    assert share_of_devices(at(3, 8), given) is None


def test_processes_that_cannot_share_a_hosts_devices_are_refused():
    with pytest.raises(LrkvError, match="3 processes on a host of 8 GPUs"):
        share_of_devices(at(0, 3), EIGHT)
