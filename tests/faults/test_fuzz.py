"""Hostile and broken input is refused in one line or worked on rightly, never anything else."""

import io
import json
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.command import lrkv
from support.full import full_output

from lrkv_jax.cli import commands, main
from lrkv_jax.config import RunConfig, load_config
from lrkv_jax.data.sources import documents
from lrkv_jax.errors import LrkvError
from lrkv_jax.training.metrics import read_metrics

pytestmark = pytest.mark.slow

fuzz = settings(
    max_examples=300, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

KEYS = [
    "attention", "name", "model", "model.layers", "model.width", "model.head_width", "train",
    "train.steps", "train.tokens", "train.global_batch_size", "mesh.fsdp", "attention.rank",
    "attention.kind",
    "variants", "variants.lrkv", "variants.lrkv.rank", "model.attention", "guard.spike", "data",
    "optimizer.muon.dtype", "watchdog.warn_after", "run_dir", "", ".", "..", "model.", ".layers",
]  # fmt: skip
VALUES = st.one_of(
    st.integers(), st.floats(), st.text(max_size=20), st.none(), st.booleans(),
    st.sampled_from(["{}", "[]", "{a: 1}", "*x", "&x [*x]", "!!python/object:os.system x",
                     "1e999", "-1", "0", "9" * 5000, "[" * 2000, "0000-00-00",
                     "null", "{mha: {}}", "'", "\\x00", "~"]),
)  # fmt: skip


def one_line(error):
    assert str(error) and "\n" not in str(error)


@fuzz
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), VALUES), max_size=4).map(
        lambda pairs: [f"{key}={value}" for key, value in pairs]
    )
    | st.text(max_size=60).map(lambda text: [text])
)
def test_overrides_make_a_configuration_or_one_line(overrides):
    try:
        config = load_config("configs/quickstart.yaml", overrides)
    except LrkvError as error:
        one_line(error)
    else:
        assert isinstance(config, RunConfig)
        assert "/" not in config.name and ".." not in config.directory.split("/")[:-1]


@fuzz
@given(st.binary(max_size=300), st.integers(0, 10**6), st.integers(0, 3))
def test_any_file_is_a_configuration_or_one_line(tmp_path, noise, where, how):
    data = Path("configs/quickstart.yaml").read_bytes()
    where %= len(data)
    data = [
        noise,
        data[:where],
        data[:where] + noise + data[where:],
        data[:where] + noise + data[where + len(noise) :],
    ][how]
    path = tmp_path / "fuzzed.yaml"
    path.write_bytes(data)
    try:
        load_config(path)
    except LrkvError as error:
        one_line(error)


def test_yaml_that_would_run_code_does_not(tmp_path):
    mark = tmp_path / "mark"
    for kind in ("apply", "new"):
        text = f"a: !!python/object/{kind}:os.system ['touch {mark}']"
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(LrkvError):
            load_config(tmp_path / "x.yaml")
        with pytest.raises(LrkvError):
            load_config("configs/quickstart.yaml", [f"name={text}"])
    assert not mark.exists()


# Half a billion laughs: aliases of aliases.
LAUGHS = "\n".join(
    ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
)


def test_yaml_that_would_fill_the_memory_is_refused_soon(tmp_path):
    (tmp_path / "x.yaml").write_text(LAUGHS + "\nvariants: {mha: {}}\nattention: mha\nmodel: *a8\n")
    with pytest.raises(LrkvError) as error:
        load_config(tmp_path / "x.yaml")
    one_line(error.value)
    assert len(str(error.value)) < 1000


def read(folder):
    """All documents of both splits, or the one line that says why not."""
    found = []
    for split in ("train", "heldout"):
        try:
            found += documents(str(folder), split, heldout=0.5)
        except LrkvError as error:
            one_line(error)
            if "has no document in its" not in str(error):
                return str(error)
    return found


ODD = st.one_of(
    st.text(max_size=50),
    st.sampled_from(["", "\0", "a\0b", "\ud800", "\ufeffx", "é" * 1000, "\r\n", "\u2028"]),
)


@fuzz
@given(
    st.lists(ODD, max_size=8), st.integers(0, 10**6), st.sampled_from(["no", "cut", "flip"]),
    st.sampled_from(["x.jsonl", "x.parquet"]),
)  # fmt: skip
def test_documents_are_read_whole_or_refused_by_their_place(tmp_path, texts, where, damage, name):
    folder = tmp_path / name.replace(".", "-")
    folder.mkdir(exist_ok=True)
    if name == "x.jsonl":
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / name).write_text("".join(lines))
        texts = [t.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
                 for t in texts]  # fmt: skip
    else:
        texts = [text.encode("utf-8", "ignore").decode() for text in texts]
        table = pa.table({"text": pa.array(texts, pa.string())})
        pq.write_table(table, folder / name, write_page_checksum=True)
    data = bytearray((folder / name).read_bytes())
    if data and damage == "cut":
        del data[where % len(data) :]
    if data and damage == "flip":
        data[where % len(data)] ^= 1 << (where % 8)
    (folder / name).write_bytes(data)
    found = read(folder)
    if damage == "no":
        assert sorted(found) == sorted(filter(None, texts)), "nothing is lost, nothing is made up"


@fuzz
@given(st.binary(max_size=200), st.integers(0, 10**6))
def test_metrics_are_rows_or_one_line(tmp_path, noise, where):
    data = b"".join(json.dumps({"step": s, "loss": 1.0}).encode() + b"\n" for s in range(1, 9))
    where %= len(data)
    (tmp_path / "metrics.jsonl").write_bytes(data[:where] + noise + data[where:])
    try:
        rows = read_metrics(tmp_path)
    except LrkvError as error:
        one_line(error)
    else:
        assert all("step" in row for row in rows)


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "/etc/x", "..", ".", "", "a\0b", "~root", "x" * 300, "con\n"]
)
def test_no_name_leads_out_of_the_runs_directory(name):
    for key in ("name", "attention"):
        with pytest.raises(LrkvError) as error:
            overrides = [f"{key}={json.dumps(name)}"]
            if key == "attention":
                overrides.append(f"variants={json.dumps({name: {'kind': 'mha'}})}")
            load_config("configs/quickstart.yaml", overrides)
        one_line(error.value)


@pytest.mark.parametrize("verb", ["evaluate", "checkpoint list", "train", "plan"])
@pytest.mark.parametrize("name", ["\udcff", "[/b]", "a/" * 3000, "/dev/null", "/dev/null/x", "-"])
def test_a_run_or_file_of_any_name_is_one_line(monkeypatch, capsys, verb, name):
    code, out, err = lrkv(capsys, monkeypatch, *verb.split(), name)
    assert code == 2 and out == "" and err.startswith("lrkv: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "error", [OSError(36, "File name too long", "x" * 300), LrkvError("seed = x: use a number")]
)
def test_what_is_refused_is_one_line_unless_debugged(monkeypatch, capsys, error):
    monkeypatch.setattr("lrkv_jax.cli.app", Mock(side_effect=error))
    code, _, said = lrkv(capsys, monkeypatch)
    text = getattr(error, "strerror", str(error))
    assert code == 2 and text in said and said.startswith("lrkv: ") and said.count("\n") == 1
    monkeypatch.setattr("sys.argv", ["lrkv", "--debug"])
    with pytest.raises(type(error), match=text):
        main()


@pytest.mark.parametrize("names", [["stdout"], ["stderr"], ["stdout", "stderr"]])
def test_an_output_that_takes_nothing_is_an_exit_code(monkeypatch, capfd, names):
    with full_output() as full:
        for name in names:
            monkeypatch.setattr(f"sys.{name}", full)
        arguments = ["plan", "quickstart"] if "stdout" in names else ["plan"]
        code, _, err = lrkv(capfd, monkeypatch, *arguments)
    # A device that is full may have room later; a wrong command stays one.
    assert code == (69 if "stdout" in names else 2) and "Traceback" not in err


def test_what_an_encoding_does_not_have_is_escaped(monkeypatch, capsys):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, "ascii"))
    monkeypatch.setattr("lrkv_jax.cli.app", lambda **how: print("caf\u00e9 \ud800", flush=True))
    assert lrkv(capsys, monkeypatch)[0] == 0
    assert raw.getvalue() == b"caf\\xe9 \\ud800\n"


def test_ctrl_c_is_one_line_and_130(monkeypatch, capsys):
    @commands.app.command("endless")
    def endless():
        raise KeyboardInterrupt

    assert lrkv(capsys, monkeypatch, "endless") == (130, "", "lrkv: interrupted\n")
    commands.app.registered_commands.pop()


def test_nothing_here_reads_what_could_run():
    """Pickles, and YAML's full loaders, run code of those who wrote them.

    One file may: what the sandbox's walled-off process runs is a model's program.
    """
    may = {Path("lrkv_jax/evaluation/sandbox/inside/program.py"): [" exec("]}
    risky = ("pickle.load", "yaml.unsafe", "yaml.full_load", "allow_pickle=True", "torch.load",
             "joblib", " eval(", " exec(")  # fmt: skip
    for path in Path("lrkv_jax").rglob("*.py"):
        found = [call for call in risky if call in path.read_text()]
        assert found == may.get(path, []), (path, found)
