"""A run starts from the parameters of another, grown where its chat needs ids."""

import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from lrkv_jax.config import load_config
from lrkv_jax.data.loader import Records
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.checkpointing import Checkpointer
from lrkv_jax.training.init_from import initial_state, with_teacher
from lrkv_jax.training.loop import train
from lrkv_jax.training.metrics import read_metrics
from lrkv_jax.training.restore import load_run
from lrkv_jax.training.run_dir import open_run
from lrkv_jax.training.state import checkpoint_items, init_state, resolve

ONE = {"devices": jax.devices()[:1]}


@pytest.fixture
def pretrained(tiny):
    """A run of tiny's model with a saved step, made without training: seed 5 is what it learnt."""
    config = resolve(tiny("attention=lrkv", "train.seed=5"))
    mesh = make_mesh(config.mesh, **ONE)
    with jax.set_mesh(mesh):
        state = init_state(config, mesh)
        run_dir = open_run(config)
        with Checkpointer(run_dir / "checkpoints") as checkpoints:
            checkpoints.save(3, checkpoint_items(state), {})
    return run_dir, jax.tree.map(np.asarray, state.params)


def midtraining(pretrained, tmp_path, *overrides):
    return load_config(
        "configs/quickstart_midtrain.yaml",
        [f"init_from={pretrained[0]}", "train.seq_len=64", f"data.directory={tmp_path / 'mixed'}",
         f"run_dir={tmp_path / 'mid'}", *overrides],
    )  # fmt: skip


@pytest.mark.slow
def test_the_parameters_are_the_runs_and_the_vocabulary_grows(pretrained, tmp_path):
    config = resolve(midtraining(pretrained, tmp_path, "train.steps=4"))
    assert config.name == "quickstart-midtrain" and config.model.width == 32
    assert config.data.tokenizer == "sotu-4096" and config.train.total_steps == 4
    for mesh in (make_mesh(config.mesh, **ONE), make_mesh(config.mesh)):
        with jax.set_mesh(mesh):
            state = initial_state(config, mesh)
            fresh = init_state(config, mesh)
        old, new = pretrained[1], state.params
        np.testing.assert_array_equal(new["embedding"]["table"][:4096], old["embedding"]["table"])
        added = new["embedding"]["table"][4096:]
        np.testing.assert_array_equal(added, fresh.params["embedding"]["table"][4096:])
        assert added.shape[0] == 128 and np.std(added) > 0.5
        np.testing.assert_array_equal(new["head"]["kernel"][:, :4096], old["head"]["kernel"])
        blocks = jax.tree.map(np.array_equal, new["blocks"], old["blocks"])
        assert all(jax.tree.leaves(blocks))
        assert new["head"]["kernel"].sharding == fresh.params["head"]["kernel"].sharding
        assert int(state.step) == 0 and not np.any(jax.tree.leaves(state.opt_state)[-1])


@pytest.mark.slow
def test_another_model_or_tokenizer_is_refused_before_it_trains(pretrained, tmp_path):
    for override, message in (
        ("model.rope_base=500.0", "has model.rope_base = 10000.0, and this run has 500.0"),
        ("attention.rank=2", "has model.attention = "),
        ("model.vocabulary=4000", "has model.vocabulary = 4096, and this run has 4000"),
        ("data.tokenizer=gpt2", "was trained with tokenizer sotu-4096"),
        ("init_step=9", "no checkpoint of step 9 in .*/run/checkpoints: there are 3"),
    ):
        config = midtraining(pretrained, tmp_path, "train.steps=4", override)
        with pytest.raises(LrkvError, match=message):
            train(config, console=Console(file=io.StringIO()), **ONE)
    with pytest.raises(LrkvError, match="nowhere is not a run: it has no config.yaml"):
        load_config("configs/quickstart_midtrain.yaml", ["init_from=nowhere"])
    with pytest.raises(LrkvError, match="lists no variants.*init_from=RUN"):
        load_config("configs/quickstart_midtrain.yaml")
    config = midtraining(pretrained, tmp_path, "model.vocabulary=4096")
    with pytest.raises(LrkvError, match="4096 has no ids for the chat's tokens.*=4224"):
        train(config, console=Console(file=io.StringIO()), **ONE)
    config = midtraining(pretrained, tmp_path, 'train.sample_prompts=["My", ""]')
    with pytest.raises(LrkvError, match="train.sample_prompts: the user message is empty"):
        train(config, console=Console(file=io.StringIO()), **ONE)
    assert not (tmp_path / "mid").exists()


@pytest.mark.slow
def test_midtraining_learns_its_epoch_and_resumes_to_the_same_bits(pretrained, tmp_path):
    console = Console(file=io.StringIO(), width=400)

    def run(*overrides, **how):
        config = midtraining(pretrained, tmp_path, "train.epochs=1", *overrides)
        return train(config, console=console, **ONE, **how)

    whole = run()
    assert whole.finished
    rows = read_metrics(whole.run_dir)
    assert rows[-1]["validation_bpb"] < rows[0]["bpb"]
    other = f"run_dir={tmp_path / 'again'}"
    assert not run(other, until=whole.step // 2).finished
    rest = run(other)
    now = read_metrics(rest.run_dir)
    for key in ("step", "loss", "bpb", "grad_norm", "batch", "validation_bpb"):
        assert [row.get(key) for row in now] == [row.get(key) for row in rows], key
    ends = [load_run(result.run_dir).params for result in (whole, rest)]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, *ends)))
    assert load_run(whole.run_dir).config.train.steps == whole.step
    # The change that its last line names is the one that is let through.
    assert run().step == whole.step
    said = r"raise train.epochs, with --allow-change (\S+),"
    (allow,) = re.findall(said, console.file.getvalue())
    longer = run("train.epochs=2", allow=[allow], until=whole.step + 1)
    assert longer.step == whole.step + 1
    (folder,) = (tmp_path / "mixed").glob("mixture-*")
    batch = load_run(whole.run_dir).config.train.global_batch_size
    filled = whole.step * batch - len(Records(folder, "train"))
    assert 0 < filled and f"behind its first {filled} records" in console.file.getvalue()


def test_a_run_keeps_its_teacher_s_step_when_the_teacher_trains_on(pretrained, tiny, tmp_path):
    teacher, pupil = f"train.teacher={pretrained[0]}", f"run_dir={tmp_path / 'pupil'}"
    config = resolve(tiny("attention=lrkv", teacher, pupil))
    open_run(with_teacher(config))
    with Checkpointer(pretrained[0] / "checkpoints") as checkpoints:
        checkpoints.save(5, {"params": {"w": jnp.ones(2)}}, {})
    assert with_teacher(config).train.teacher_step == 3
    assert with_teacher(resolve(tiny("attention=lrkv", teacher))).train.teacher_step == 5


@pytest.mark.slow
def test_a_run_learns_from_a_teacher_and_resumes_to_the_same_bits(tiny, tmp_path):
    def run(config, folder, **how):
        config = config.model_copy(update={"run_dir": str(tmp_path / folder)})
        return train(config, console=Console(file=io.StringIO(), width=200), **ONE, **how)

    def heal(*overrides):
        given = f"init_from={tmp_path / 'pupil'}", f"train.teacher={tmp_path / 'teacher'}"
        steps = "train.steps=6", "train.save_every=2", "train.log_every=1"
        batch = "train.seq_len=64", "train.global_batch_size=8"
        learns = "train.trainable=all", "optimizer.matrix_lr=0.02"
        return load_config("configs/heal.yaml", [*given, *steps, *batch, *learns, *overrides])

    run(tiny("train.steps=6", "attention=lrkv"), "teacher")
    no_prompt = "train.sample_prompts=[]", "train.sample_tokens=8"  # which ended the last step
    run(tiny("train.steps=1", "attention=gqa", *no_prompt), "pupil")
    whole = run(heal(), "healed")
    rows = read_metrics(whole.run_dir)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[0] > losses[-1] > 0 and rows[-1]["validation_loss"] > losses[0]
    run(heal(), "again", until=3)
    again = read_metrics(run(heal(), "again").run_dir)
    assert [row.get("loss") for row in again] == [row.get("loss") for row in rows]
    saved = load_run(whole.run_dir).config.train
    assert saved.teacher_model.attention.kind == "lrkv" and saved.teacher_step == 6
    for override, message in (
        ("train.teacher_step=3", "no checkpoint of step 3"),
        ("train.teacher=nowhere", "nowhere is not a run: it has no config.yaml"),
        ("model.vocabulary=4224", "has model.vocabulary = 4096, and this run has 4224"),
        ("train.trainable=keys_and_values", "train.trainable"),
    ):
        with pytest.raises(LrkvError, match=message):
            run(heal(override), "healed")
