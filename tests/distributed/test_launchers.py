"""The launchers say what the code understands, and the Slurm one does what it promises."""

import functools
import math
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from jax.sharding import AbstractMesh
from support.command import lrkv

from lrkv_jax.config import load_config
from lrkv_jax.distributed.cluster_env import find
from lrkv_jax.distributed.mesh import AXES, check_mesh
from lrkv_jax.errors import EXIT_BAD_INPUT, EXIT_START_AGAIN

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "launch" / "slurm.sbatch"
ARRAY = ROOT / "launch" / "sweep.sbatch"
MANIFEST = ROOT / "launch" / "kubernetes.yaml"
DATA_MANIFEST = ROOT / "launch" / "build_data.yaml"
GUIDE = ROOT / "docs" / "parallelism.md"


def names(text: str) -> set[str]:
    return set(re.findall(r"\bLRKV_[A-Z_]+\b", text))


def test_the_guide_lists_every_variable_that_is_read_and_the_launchers_set_no_other():
    package = "".join(path.read_text() for path in (ROOT / "lrkv_jax").rglob("*.py"))
    listed = names("".join(re.findall(r"^\| `LRKV_.*$", GUIDE.read_text(), re.M)))
    assert listed == names(package)
    for path in (SBATCH, ARRAY, MANIFEST, GUIDE):
        assert names(path.read_text()) <= listed


def slurm(tmp_path, code, *arguments, script=SBATCH, **more):
    """Run a batch script with an `srun` that ends with `code`; (its code, what was called)."""
    calls = tmp_path / "calls"
    for name, does in (
        ("srun", f"env | grep -e ^LRKV_ -e ^SRUN_ >> {calls}\nexit {code}"),
        ("scontrol", ""),
    ):
        stub = tmp_path / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*" >> {calls}\n{does}\n')
        stub.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42", **more}
    if script == ARRAY:
        environment |= {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}
    run = subprocess.run(
        ["bash", script, *arguments], env=environment, capture_output=True, text=True, timeout=30,
        cwd=tmp_path,
    )  # fmt: skip
    return run.returncode, calls.read_text().splitlines()


@pytest.mark.parametrize(("mesh", "nodes", "gpus"), [("mesh.fsdp=16", 2, 8), ("mesh.fsdp=4", 1, 4)])
def test_plan_writes_the_job_of_the_step_that_it_planned(
    tmp_path, capsys, monkeypatch, mesh, nodes, gpus
):
    """And of none that does not fit: its argument is quoted, its time is the estimate's."""
    script = tmp_path / "job.sbatch"
    given = ["6.3b", "run_dir=a b", "train.grad_accum_steps=1"]
    plan = functools.partial(lrkv, capsys, monkeypatch, "plan", *given, "--no-compile")
    assert plan(mesh, f"--sbatch={script}")[0] == 0
    code, calls = slurm(tmp_path, 0, "train.seed=1", script=script)
    split = f"mesh.data=1 {mesh} mesh.context=1 mesh.tensor=1"
    command = f"lrkv train {' '.join(given)} {split} train.seed=1"
    assert code == 0 and calls[0] == f"srun --kill-on-bad-exit=1 {command}"
    assert f"LRKV_LOCAL_DEVICES={gpus}" in calls
    options = re.findall(r"^#SBATCH --(.*)$", script.read_text(), re.M)
    assert {f"nodes={nodes}", f"gpus-per-node={gpus}", "time=24:00:00"} <= {*options}
    assert ("exclusive" in options) == (gpus == 8) and "requeue" in options
    script.unlink()
    code, _, err = plan("mesh.fsdp=1", "--hardware=h100", f"--sbatch={script}")
    assert code == 2 and "--sbatch is for a step that fits" in err and not script.exists()
    code, _, err = plan("mesh.fsdp=1", f"--sbatch={tmp_path}/absent/job")  # said before it plans
    assert code == 2 and f"{tmp_path}/absent/job cannot be written (No such file" in err


# A save; an error, a task that was killed, and one that JAX's service ended.
@pytest.mark.parametrize("ended", [EXIT_START_AGAIN, 1, 137, 134])
def test_a_job_that_has_not_finished_goes_back_into_the_queue(tmp_path, ended):
    code, calls = slurm(tmp_path, ended, "configs/128m.yaml", "run_dir=a b")
    assert code == ended
    assert calls[0].startswith("srun --kill-on-bad-exit=1 ")
    assert calls[0].endswith("lrkv train configs/128m.yaml run_dir=a b")
    assert "LRKV_LOCAL_DEVICES=8" in calls and calls[-1] == "scontrol requeue 42"


@pytest.mark.parametrize(
    ("ended", "vain"), [(0, 0), (EXIT_BAD_INPUT, 0), (1, 20), (EXIT_START_AGAIN, 20)]
)
def test_a_job_that_finished_or_is_wrong_or_often_saved_nothing_stays_ended(tmp_path, ended, vain):
    """However often it was started: Slurm's own count is of planned stops too."""
    (tmp_path / "lrkv-42.failures").write_text("1\n" * vain)
    code, calls = slurm(tmp_path, ended, "configs/128m.yaml", SLURM_RESTART_COUNT="99")
    assert code == ended and not any(call.startswith("scontrol") for call in calls)
    assert not (tmp_path / "lrkv-42.failures").exists()


def test_a_start_that_saves_is_not_counted(tmp_path):
    often = {"SLURM_RESTART_COUNT": "99", "MAX_RESTARTS": "1"}
    for _ in range(3):
        _, calls = slurm(tmp_path, 137, "configs/128m.yaml", **often)
        assert calls[-1] == "scontrol requeue 42"
        (line,) = [call for call in calls if call.startswith("LRKV_FAILURES=")][-1:]
        (tmp_path / "calls").unlink()
        os.unlink(line.partition("=")[2])  # as a checkpoint does


def test_a_task_of_an_array_is_one_run_of_the_sweep(tmp_path):
    arguments = ("nano", "seed=0,1", "train.sample_prompts=[a b]")
    cores = {"SLURM_CPUS_PER_TASK": "96"}  # srun takes no --cpus-per-task from sbatch
    code, calls = slurm(tmp_path, EXIT_START_AGAIN, *arguments, script=ARRAY, **cores)
    assert "SRUN_CPUS_PER_TASK=96" in calls
    assert code == EXIT_START_AGAIN and calls[-1] == "scontrol requeue 40_2"
    assert calls[0] == "srun lrkv sweep nano seed=0,1 train.sample_prompts=[a b] --only 2"


def test_the_manifest_makes_a_run_of_all_pods_that_their_devices_can_hold():
    service, job = yaml.safe_load_all(MANIFEST.read_text())
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert all(isinstance(value, str) for value in given.values())
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(given["LRKV_PROCESSES"])
    # A headless service gives each pod the name that the coordinator's address uses.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    places = [find({**given, "JOB_COMPLETION_INDEX": str(n)}) for n in range(spec["completions"])]
    assert [place.process for place in places] == list(range(len(places)))
    host = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert {place.coordinator.partition(":")[0] for place in places} == {host}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(given["LRKV_LOCAL_DEVICES"])
    assert pod["restartPolicy"] == "Never", "podFailurePolicy asks for it"
    actions = {}
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            actions |= dict.fromkeys(rule["onExitCodes"]["values"], rule["action"])
    assert actions == {EXIT_START_AGAIN: "Ignore", EXIT_BAD_INPUT: "FailJob"}
    words = container["args"][0].split()
    assert words[:3] == ["exec", "lrkv", "train"]
    check_splits(words[3:], spec["completions"] * int(given["LRKV_LOCAL_DEVICES"]))
    for path in (SBATCH, GUIDE):
        text = path.read_text().replace("\\\n#", "")
        nodes, command = re.search(r"sbatch --nodes=(\d) launch/slurm\.sbatch (.*)", text).groups()
        check_splits(command.split(), 8 * int(nodes))
    for more in re.findall(r"need\n`(mesh\.[^`]*)`", GUIDE.read_text()):
        check_splits(["6.3b", "train.grad_accum_steps=1", *more.split()], 32)


def check_splits(words, devices):
    config = load_config(words[0], words[1:])
    check_mesh(config, AbstractMesh(tuple(vars(config.mesh).values()), AXES))
    assert math.prod(vars(config.mesh).values()) == devices


def test_the_data_job_builds_what_the_run_reads_where_it_reads_it():
    pods = []
    for path in (DATA_MANIFEST, MANIFEST):
        *_, job = yaml.safe_load_all(path.read_text())
        pods.append(job["spec"]["template"]["spec"])
    build, run = (pod["containers"][0]["args"][0].split() for pod in pods)
    assert build[:4] == ["exec", "lrkv", "data", "build"]
    built, read = load_config(build[4], build[5:]), load_config(run[3], run[4:])
    assert built.data == read.data and built.train.seq_len == read.train.seq_len
    mounts = [pod["containers"][0]["volumeMounts"][0] for pod in pods]
    assert mounts[0] == mounts[1] and pods[0]["volumes"][0] == pods[1]["volumes"][0]
    for place in (read.data.source, read.data.directory, str(read.directory)):
        assert place.startswith(f"{mounts[0]['mountPath']}/")
