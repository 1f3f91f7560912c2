"""A variant from outside the package: docs/new_variant.md's own example, end to end."""

import json
import re
import sys
from pathlib import Path

import jax
import pytest
from support.command import lrkv
from support.tiny import TINY, few_pages

from lrkv_jax.config import load_config
from lrkv_jax.errors import LrkvError
from lrkv_jax.lab.bench import clock, decode
from lrkv_jax.lab.bench import train as train_bench
from lrkv_jax.lab.bench.report import MEASURED
from lrkv_jax.lab.plan.report import plan_report
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token, parameter_counts
from lrkv_jax.models.attention import abstract_layer
from lrkv_jax.models.attention.base import Attention
from lrkv_jax.models.transformer import abstract_parameters
from lrkv_jax.training.loop import train

PAGE = Path(__file__).parents[3] / "docs" / "new_variant.md"
SMALL = tuple(text for text in TINY if not text.startswith("variants."))


def block(language):
    """The page's one code block in a language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that holds what the page tells its reader to save, on the path and entered."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "tied_groups.py").write_text(block("python"))
    (folder / "tied.yaml").write_text(block("yaml"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield folder
    sys.modules.pop("tied_groups", None)


def test_it_is_planned_beside_the_others(folder, capsys, monkeypatch):
    code, out, err = lrkv(capsys, monkeypatch, "plan", "tied.yaml", "--all", "--json")
    assert code == 0 and "tied" in json.dumps(json.loads(out)), err
    model = load_config("tied.yaml").model
    # 2 groups of one vector, where MHA's 4 heads leave two each.
    assert cache_allocated_bytes_per_token(model, 2) == model.layers * 2 * model.head_width * 2
    leaves = jax.tree.leaves(abstract_parameters(model))
    assert parameter_counts(model).total == sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("kv_parameters", lambda *_: 7, "131,100 parameters over all layers, .* have 163,840"),
        ("cache_values", lambda *_: 9, "TIED-2 counts 72 cache bytes .* have 512: correct"),
        ("layer", "TiedAttentio", "layer = TiedAttentio: .* did you mean TiedAttention"),
    ],
)
def test_what_it_counts_is_held_against_its_layer(folder, attribute, value, message, monkeypatch):
    config = load_config("tied.yaml", ["model.vocabulary=4352"])  # a model that is not cached
    monkeypatch.setattr(type(config.model.attention), attribute, value)
    for use in (lambda: plan_report(config, ["tied"]), lambda: train(config)):
        with pytest.raises(LrkvError, match=message):
            use()
    assert not Path(config.directory).exists()


@pytest.mark.slow
def test_it_trains_decodes_as_it_was_trained_and_stands_in_tables(
    folder, capsys, monkeypatch, caplog
):
    settings = (*SMALL, *few_pages(folder), "train.steps=3", "optimizer.muon.iterations=1")
    assert train(load_config("tied.yaml", settings), devices=jax.devices()[:1]).step == 3
    run = folder / "runs" / "quickstart-tied"
    config = load_config(run / "config.yaml")
    assert config.model.attention.label == "TIED-2"
    code, out, _ = lrkv(capsys, monkeypatch, "evaluate", run, "--tasks", "bpb,agreement")
    assert code == 0 and "WRONG" not in out
    result = json.loads((run / "evaluation.json").read_text())
    assert result["attention"] == "tied_groups:Tied" and 0 < result["bpb"]["bits_per_byte"] < 20
    assert result["agreement"]["max_relative_error"] < 1e-5
    assert result["agreement"]["same_greedy_token"] == 1
    assert result["kv_cache_bytes_per_token"] == result["kv_cache_bytes_per_token_formula"]
    layer = config.model.attention.layer_class()
    with monkeypatch.context() as patch:  # it now trains otherwise than it decodes
        patch.setattr(layer, "attend_full", lambda *args: 1.5 * Attention.attend_full(*args))
        code, out, _ = lrkv(capsys, monkeypatch, "evaluate", run, "--tasks", "agreement")
    assert code == 0 and "WRONG, above 1e-05" in out and "rounding explains 1e-05" in caplog.text
    where = ("--only", "table01,fig02", "--out", folder / "out")
    assert lrkv(capsys, monkeypatch, "report", run, *where)[0] == 0
    (table,) = (folder / "out").rglob("table01*[!d].md")
    assert "TIED-2" in table.read_text() and "25.0" in table.read_text()
    assert "TIED" in (folder / "out" / "report.html").read_text()


@pytest.mark.slow
def test_its_decoding_and_its_training_step_are_measured(folder, monkeypatch):
    monkeypatch.setattr(decode, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(clock, "ROTATED_BYTES", 1 << 16)
    monkeypatch.setattr(clock, "SIDE", 16)
    settings = decode.DecodeBenchmark(
        scales=("tied.yaml",), batches=(2,), lengths=(32,), implementations=("xla",),
        samples=2,
    )  # fmt: skip
    rows = decode.run(settings)["rows"]
    assert [row.variant for row in rows if row.status == MEASURED] == ["mha", "tied"]
    assert rows[-1].bytes_over_mha == 0.25 and rows[-1].error < 1e-5
    settings = train_bench.TrainBenchmark(
        scales=("tied.yaml",), variants=("tied",), samples=1, depth=1,
        overrides=(*(s for s in SMALL if "layers" not in s), "model.vocabulary=64"),
    )  # fmt: skip
    (row,) = train_bench.run(settings, devices=jax.devices()[:1])["rows"]
    assert row.status == MEASURED and row.variant == "tied"


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("tied_groups:Tide", "tied_groups has no variant Tide: did you mean Tied?"),
        ("tied_gruops:Tied", "there is no module tied_gruops: install it, or put its folder on"),
        ("broken_line:Any", "importing broken_line raises ZeroDivisionError: division by zero"),
        ("json:Any", "json has no variant Any: it defines no AttentionConfig with a name"),
        ("tide", "kind tide is unknown: use one of mha, gqa, mqa, mla, lrkv"),
    ],
)
def test_a_kind_that_is_not_there_is_one_line(folder, kind, message):
    (folder / "broken_line.py").write_text("1 / 0")
    with pytest.raises(LrkvError, match=re.escape(message)) as error:
        load_config("tied.yaml", [f"variants.tied.kind={kind}"])
    assert "\n" not in str(error.value)


def test_a_layer_that_knows_no_windows_is_refused_one(folder):
    model = load_config("tied.yaml", ["model.window=8"]).model
    with pytest.raises(LrkvError, match=r"window = 8, and \w+.attend_cached takes no first_B1"):
        abstract_layer(model)
