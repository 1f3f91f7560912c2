"""A compiled decode kernel is tried on the device before it decodes for a user.

There is no GPU here: the process under test is made to believe in one, and what it would compile
is planted where the compiled kernel is. All else is as on a GPU, the trial in its own process too.
"""

import logging
import os
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from support import planted, targets
from support.decode_cases import compare, grouped_case, latent_case, lrkv_case
from support.engines import PROMPTS, engine_of
from support.variants import FIVE

from lrkv_jax.errors import LrkvError
from lrkv_jax.kernels import dispatch, grouped_decode, proof, trial
from lrkv_jax.kernels.split_kv import plan as plans

RIGHT = proof.Verdict(proof.RIGHT, "it is equal")
BAD = proof.Verdict(proof.BAD, "it is off")
UNKNOWN = proof.Verdict(proof.UNKNOWN, "the device is busy")


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    """A small GPU that is not there, and nothing known of it; the folder of verdicts."""
    monkeypatch.setattr(dispatch, "_missing_gpu", lambda: None)
    monkeypatch.setattr(plans, "MULTIPROCESSORS", 4)
    monkeypatch.setattr(proof, "directory", lambda: tmp_path / "kernels")
    monkeypatch.setitem(proof.SECONDS, "run", 20)
    start_again(monkeypatch)
    return tmp_path / "kernels"


def start_again(monkeypatch):
    """Forget what a new process would not know."""
    monkeypatch.setattr(proof, "_verdicts", {})
    dispatch._say.cache_clear()


@pytest.fixture
def plant(monkeypatch):
    """Put one of `support.planted` in the place of the compiled kernel."""
    return lambda kernel: monkeypatch.setattr(grouped_decode, "_mosaic", kernel)


@pytest.fixture
def stand_in(monkeypatch):
    """The verdict to give without a trial, and the trials that were asked for."""
    given = SimpleNamespace(verdict=RIGHT, trials=[])

    def attempt(trial, device_kind):
        given.trials.append(trial)
        return given.verdict

    monkeypatch.setattr(proof, "attempt", attempt)
    return given


def case_of(**changes):
    shape = {"S": 16, "H": 4, "G": 2, "K": 16, **changes}
    return grouped_case([5, 16], **shape).astype("bfloat16")


CASE = case_of()


def differs(impl="auto"):
    """How far the call is from the oracle; rounding alone makes it 1e-3."""
    return max(compare(CASE.poisoned().run(impl=impl), CASE.oracle()))


def loud(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


PLANTED = {
    "never_ends": "it does not end within 1 s",
    "reads_a_slot_past_the_length": "it gives values that are not numbers",
    "off_by_one_percent": "it differs from XLA by 1.*e-02",
    "forgets_the_last_partial_tile": "it differs from XLA by",
    "raises": "it fails with NotImplementedError: no such instruction",
    "ends_its_process": r"it ends its process \(SIGSEGV\)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_kernel_never_runs(name, plant, caplog, kept, monkeypatch):
    monkeypatch.setitem(proof.SECONDS, "run", 1 if name == "never_ends" else 20)
    plant(getattr(planted, name))
    assert differs() < 4e-3
    (line,), (file,) = loud(caplog), kept.iterdir()
    assert line.startswith("grouped_decode runs on xla: the compiled kernel failed its check on ")
    assert "please report it" in line
    assert str(file) in line
    says = f"cannot run as mosaic: .*{PLANTED[name]}.*; use xla"
    with pytest.raises(LrkvError, match=says) as error:
        differs(impl="mosaic")
    assert "\n" not in str(error.value)


def check_text(name, length, plant, caplog, monkeypatch):
    """`length` is of a cache that no other test has: each engine compiles a program of its own."""
    monkeypatch.setitem(proof.SECONDS, "run", 1 if name == "never_ends" else 20)

    def text(kernel):
        model = {"dtype": "bfloat16", "decode_kernel": kernel}
        engine = engine_of(FIVE["gqa"], length=length, model=model)
        return engine.generate(PROMPTS[1:2], 6), engine.report().kernels["grouped_decode"]

    plant(getattr(planted, name))
    found, why = text("auto")
    assert why.startswith("xla: the compiled kernel failed its check")
    assert len(loud(caplog)) == 1
    assert found == text("xla")[0]


def test_a_planted_wrong_kernel_never_reaches_a_users_text(plant, caplog, monkeypatch):
    check_text("off_by_one_percent", 72, plant, caplog, monkeypatch)


@pytest.mark.slow
def test_a_planted_hanging_kernel_never_reaches_a_users_text(plant, caplog, monkeypatch):
    check_text("never_ends", 80, plant, caplog, monkeypatch)


def test_who_checks_kernels_in_a_process_of_its_own_meets_them_untried(plant, kept):
    plant(planted.off_by_one_percent)
    with proof.unneeded():
        assert differs(impl="mosaic") > 4e-3
    with pytest.raises(LrkvError, match="failed its check"):
        differs(impl="mosaic")


def test_what_is_tried_is_what_runs(plant, stand_in, caplog):
    """The planted kernel is in the place of the compiled one: a verdict that lies lets it run."""
    plant(planted.off_by_one_percent)
    assert differs() > 8e-3
    assert stand_in.trials[0].mosaic is planted.off_by_one_percent
    assert not loud(caplog)
    assert dispatch.choices()["grouped_decode"] == "mosaic: it equals XLA on this GPU"


def test_a_right_kernel_is_tried_once_and_its_verdict_is_kept(plant, stand_in, monkeypatch):
    plant(planted.right)
    for _ in range(2):  # the second time in a new process
        start_again(monkeypatch)
        assert differs() < 4e-3
        assert dispatch.choices()["grouped_decode"].startswith("mosaic")
    assert len(stand_in.trials) == 1


def test_a_bad_verdict_is_kept_and_said_in_each_process(plant, stand_in, monkeypatch, caplog):
    plant(planted.off_by_one_percent)
    stand_in.verdict = BAD
    for _ in range(2):
        start_again(monkeypatch)
        differs()
    first, second = loud(caplog)
    assert first == second
    assert len(stand_in.trials) == 1


@pytest.mark.parametrize("changed", ["device", "platform", "libraries", "sources"])
def test_a_verdict_of_another_device_or_version_is_ignored(
    changed, stand_in, monkeypatch, kept, plant
):
    plant(planted.right)
    differs()
    (file,) = kept.iterdir()
    other = {**proof.platform(), changed: "another"}
    monkeypatch.setattr(proof, "platform", lambda: other)
    start_again(monkeypatch)
    stand_in.verdict = BAD
    differs()
    assert dispatch.choices()["grouped_decode"].startswith("xla")
    # Even under the name that is looked for.
    (mine,) = set(kept.iterdir()) - {file}
    mine.write_bytes(file.read_bytes())
    start_again(monkeypatch)
    differs()
    assert dispatch.choices()["grouped_decode"].startswith("xla")
    assert len(stand_in.trials) == 3


DAMAGE = {
    "empty": lambda text: "",
    "half": lambda text: text[: len(text) // 2],
    "no_mapping": lambda text: "[1]",
    "another_word": lambda text: text.replace('"right"', '"fine"'),
    "another_plan": lambda text: text.replace("heads=2", "heads=4"),
    "no_result": lambda text: text.replace('"result"', '"answer"'),
    "not_text": lambda text: text.replace('"it is equal"', "7"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_verdict_is_made_again(damage, stand_in, monkeypatch, kept, plant):
    plant(planted.right)
    differs()
    (file,) = kept.iterdir()
    whole = file.read_text()
    file.write_text(DAMAGE[damage](whole))
    assert file.read_text() != whole
    start_again(monkeypatch)
    differs()
    assert len(stand_in.trials) == 2
    assert file.read_text() == whole


def test_a_disk_that_cannot_be_written_costs_the_memory_alone(
    plant, stand_in, monkeypatch, kept, caplog
):
    plant(planted.right)
    kept.write_text("a file where the folder should be")
    for _ in range(2):
        start_again(monkeypatch)
        assert differs() < 4e-3
        assert dispatch.choices()["grouped_decode"].startswith("mosaic")
    assert len(stand_in.trials) == 2
    assert all("is not kept" in line for line in loud(caplog))
    stand_in.verdict = BAD
    start_again(monkeypatch)
    differs()
    assert loud(caplog)[-1].endswith("report it to this project with this line")


def test_a_kernel_that_could_not_be_tried_does_not_run_and_is_tried_again(
    plant, stand_in, monkeypatch, kept, caplog
):
    plant(planted.off_by_one_percent)
    stand_in.verdict = UNKNOWN
    for _ in range(2):
        start_again(monkeypatch)
        assert differs() < 4e-3
    assert "could not be checked on this cpu: the device is busy" in loud(caplog)[0]
    assert len(stand_in.trials) == 2
    assert not kept.exists()


def test_verdicts_lie_beside_the_compiled_programs(monkeypatch):
    monkeypatch.undo()
    programs = jax.config.jax_compilation_cache_dir
    assert str(proof.directory()) == os.path.join(programs, "kernels")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert proof.directory() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def traced(batch=2, slots=16, *, scale=0.5, q="bfloat16", **shape):
    """Trace a call whose arrays do not exist."""
    size = {"T": 1, "H": 4, "G": 2, "K": 16, "dtype": "bfloat16", **shape}
    kv = jax.ShapeDtypeStruct((batch, slots, size["G"], size["K"]), size["dtype"])
    jax.eval_shape(
        partial(grouped_decode.grouped_decode, scale=scale),
        jax.ShapeDtypeStruct((batch, size["T"], size["H"], size["K"]), q), kv, kv,
        jax.ShapeDtypeStruct((batch,), "int32"),
    )  # fmt: skip


def test_a_family_is_what_changes_the_kernel_and_nothing_else(stand_in):
    stand_in.verdict = BAD
    traced()
    for same in ({"batch": 3}, {"slots": 4096}, {"batch": 1, "slots": 64}):
        traced(**same)
        assert len(stand_in.trials) == 1, same
    others = (
        {"T": 3}, {"T": 4}, {"H": 8}, {"G": 1}, {"K": 24}, {"scale": 0.25}, {"q": "float32"},
        {"dtype": "float16"},
    )  # fmt: skip
    for count, other in enumerate(others):
        traced(**other)
        assert len(stand_in.trials) == count + 2, other


def test_the_modes_ranks_and_pages_are_families(stand_in):
    stand_in.verdict = BAD
    shape = {"S": 64, "H": 2, "K": 16}
    cases = [
        *(lrkv_case([9, 4], mode, R=R, **shape) for mode in ("full", "shared") for R in (5, 16)),
        lrkv_case([9, 4], R=0, **shape), lrkv_case([9, 4], R=5, norm=False, **shape),
        latent_case([9, 4], S=64, H=2, C=24, P=8), latent_case([9, 4], S=64, H=2, C=24, P=0),
        latent_case([9, 4], "latent", S=64, H=2, C=128),
    ]  # fmt: skip
    cases += [case.paged() for case in cases]
    for count, case in enumerate(cases):
        case = case.astype("bfloat16")
        jax.eval_shape(lambda case=case: case.run(impl="auto"))
        assert len(stand_in.trials) == count + 1
    longer = lrkv_case([9, 4, 200], **{**shape, "S": 256}).astype("bfloat16").paged()
    jax.eval_shape(lambda: longer.run(impl="auto"))
    assert len(stand_in.trials) == len(cases), "another batch, pool and length of table"


class Service(dict):
    """The coordination service's client, as far as a verdict needs it."""

    def key_value_set(self, key, value, allow_overwrite=False):
        self[key] = value

    def blocking_key_value_get(self, key, milliseconds):
        return self[key]


def test_all_processes_of_a_run_take_the_first_ones_verdict(stand_in, monkeypatch, plant):
    plant(planted.right)
    monkeypatch.setattr(proof.distributed.global_state, "client", Service())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process, verdict in enumerate((BAD, RIGHT)):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        monkeypatch.setattr(proof, "directory", lambda: None)
        start_again(monkeypatch)
        stand_in.verdict = verdict
        traced()
        assert dispatch.choices()["grouped_decode"].startswith("xla")
    assert len(stand_in.trials) == 1
    monkeypatch.setattr(proof, "platform", lambda: {"device": "another"})
    with pytest.raises(LrkvError, match="another kind of device, .* than process 1 has: set"):
        traced()


def tried(case):
    """The trial of a call, as `dispatch` makes it."""
    found = []

    def note(trial):
        found.append(trial)
        return "it is only wanted"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "doubt", note)
        jax.eval_shape(lambda: case.run(impl="auto"))
    return found[0]


@pytest.mark.slow
def test_another_device_in_the_other_process_says_nothing_about_the_kernel():
    result, says = proof.attempt(tried(CASE), "NVIDIA H200")
    assert result == proof.UNKNOWN
    assert "another process finds a cpu in place of the NVIDIA H200" in says


REAL = {
    "mla-8_queries": lambda: latent_case([8], S=16, T=8, H=2, C=128, P=64),
    "lrkv-shared": lambda: lrkv_case([8], "shared", S=16, H=2, K=128, R=46),
    "lrkv-rank_0": lambda: lrkv_case([8], S=16, H=2, K=64, R=0),
    "mla-latent-pages": lambda: latent_case([8], "latent", S=64, H=2, C=128).paged(),
    "lrkv-full-pages": lambda: lrkv_case([8], "full", S=64, H=2, K=128, R=46).paged(),
}


@pytest.fixture
def two_multiprocessors(monkeypatch):
    """The fewest of which one begins inside a sequence."""
    monkeypatch.setattr(plans, "MULTIPROCESSORS", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_the_interpreted_kernels_pass_the_trial(name, two_multiprocessors):
    """In this process: the next test has another one's."""
    made = tried(REAL[name]().astype("bfloat16"))
    arrays, lengths_B = jax.jit(partial(trial.problem, made))(0)
    got = jax.jit(partial(trial.tried, made))(arrays, lengths_B)
    assert trial.error(got, trial.expected(made, arrays, lengths_B)) <= trial.TOLERANCE


@pytest.mark.slow
def test_an_interpreted_kernel_passes_the_trial_in_a_process_of_its_own(
    two_multiprocessors, monkeypatch
):
    monkeypatch.setitem(proof.SECONDS, "run", 300)
    case = grouped_case([8], S=16, T=3, H=4, G=2, K=64)
    result, says = proof.attempt(tried(case.astype("bfloat16")), "cpu")
    assert result == proof.RIGHT, says


@pytest.mark.slow
@pytest.mark.parametrize("variant", targets.VARIANTS)
def test_a_trial_of_the_scales_lowers_for_cuda(variant, monkeypatch):
    """What a GPU's trial compiles; the interpreter does not see a layout that a GPU refuses."""
    found = []
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "_missing_gpu", lambda: None)
    monkeypatch.setattr(proof, "doubt", found.append)
    # Eight queries for every other one: `.ci/run cuda` compiles all kernels for both.
    queries = 1 + 7 * (targets.VARIANTS.index(variant) % 2)
    call, arguments = targets.case("2.5b", variant, queries, jax.ShapeDtypeStruct)
    jax.eval_shape(call, *arguments)
    (made,) = found
    lengths_B = jax.ShapeDtypeStruct((len(made.lengths),), "int32")

    def tried(arrays, lengths_B):
        return made.mosaic(made.plan, *arrays, lengths_B, made.scale, False)

    lowered = jax.jit(tried).trace(made.arrays, lengths_B).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()
