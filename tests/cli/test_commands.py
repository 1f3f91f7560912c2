"""The command line: bad input is one line and exit code 2; the verbs do what they say."""

import errno
import html
import io
import json
import lzma
import shutil
import sys
import time
from unittest.mock import Mock

import absl.logging
import pytest
import typer
from support.command import lrkv

from lrkv_jax import __version__
from lrkv_jax.cli import app, main
from lrkv_jax.cli.shared import working
from lrkv_jax.config import load_config
from lrkv_jax.data.assets import read_asset
from lrkv_jax.data.records.folders import quiet
from lrkv_jax.data.sources import documents
from lrkv_jax.distributed.processes import HERE
from lrkv_jax.errors import EXIT_UNAVAILABLE, LrkvError
from lrkv_jax.training.checkpointing import Checkpointer


@pytest.fixture(scope="module")
def trained(tmp_path_factory, finished_run):
    """A tiny finished run's directory, to write into."""
    directory = tmp_path_factory.mktemp("cli") / "run"
    return shutil.copytree(finished_run.directory, directory)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train quickstart model.layer=3", "model.layer: did you mean layers?"),
        ("train quickstart mesh.data=3 mesh.fsdp=1", "devices, 8: set one of them to -1"),
        ("quickstart attention=mla", "trains mha and lrkv_latent, in two directories"),
        ("train quickstart --until 0", "0: use a whole number from 1 on"),
        ("train quickstart data.tokenizer=gpt3", "gpt3"),
        ("train quickstart --steps 3", "settings have no dashes, as in train.steps=100"),
        ("train --nonsense", "no such option: --nonsense"),
        ("train", "missing argument 'CONFIG': see lrkv train --help"),
        ("plan 128m --devices -3", "'--devices': Input should be greater than or equal to 1"),
        ("plan 128m --length 1.5", "1.5: use a whole number from 1 on"),
        ("plan 128m mesh.fsdp=8 --utilization 40 50", "--utilization: use two shares"),
        ("quickstart --run-model-code", "--run-model-code is for --chat"),
        ("settings train --markdown", "--markdown is the page of all settings"),
        ("sweep nano --list --only 0", "--only with --list"),
        ("tokenizer train TEXTS", "change --heldout = 0.01 or add documents"),
        ("evaluate RUN --tasks gsm8k", "max_new_tokens (--tokens) = 512: use 1 to"),
        ("evaluate runs/none", "runs/none is not a run"),
        ("evaluate RUN --tasks bpb,poetry", "unknown task poetry"),
        ("evaluate RUN --step 99", "/checkpoints: there are 6"),
        ("evaluate RUN train.seq_len=1 --tasks agreement", "train.seq_len = 1: agreement needs 2"),
        ("generate RUN --prompt x --top-p 2", "top_p = 2.0"),
        ("generate RUN --prompt x --seed 4294967296", "'--seed': Input should be less than or"),
        ("generate RUN --prompt x --step last", "'--step': last: use a number, or best"),
        ("generate RUN --prompt x --step ²", "'--step': ²: use a number, or best"),
        ("chat RUN", "has not been midtrained: run lrkv train configs/quickstart_midtrain.yaml"),
    ],
)
def test_a_wrong_command_is_one_line_that_names_the_mend(
    capsys, monkeypatch, tmp_path, pages, trained, line, message
):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("My fellow Americans")
    named = {"RUN": str(trained), "TEXTS": str(tmp_path / "texts")}
    verb, *rest = [named.get(word, word) for word in line.split()]
    if "quickstart" in rest:
        rest += [f"run_dir={tmp_path / 'run'}", *pages]
    code, out, err = lrkv(capsys, monkeypatch, verb, *rest)
    assert code == 2 and err.count("\n") == 1 and err.startswith("lrkv: ")
    assert message in err and "Traceback" not in err + out
    assert not (tmp_path / "run").exists()


def test_what_another_host_may_have_is_no_wrong_command(capsys, monkeypatch, trained):
    monkeypatch.setenv("LRKV_LOCAL_DEVICES", "9")
    code, _, err = lrkv(capsys, monkeypatch, "evaluate", trained)
    assert code == EXIT_UNAVAILABLE and "LRKV_LOCAL_DEVICES plans 9" in err


def test_a_time_limit_that_is_none_is_refused(monkeypatch, capsys):
    for limit in ("1", "0:00", "1:2:3:4", "-1:00", "²:00"):
        code, _, err = lrkv(capsys, monkeypatch, "train", "quickstart", "--time-limit", limit)
        assert code == 2 and ("write HH:MM:SS" in err or "No such option" in err)


@pytest.mark.parametrize("terminal", ["", "1"])
def test_what_a_command_does_is_said_on_stderr_before_two_seconds(capsys, monkeypatch, terminal):
    """In a changing line with the time that is left, or in one plain line an activity."""
    monkeypatch.setenv("FORCE_COLOR", terminal)
    with working("too short to be said"):
        pass
    with working("reading") as show:
        for done in range(3):
            show("evaluating", done, 4)
            time.sleep(0.6)
    out, err = capsys.readouterr()
    assert out == ""
    if terminal:
        assert "evaluating, 2 of 4, 0:00:01 left" in err
    else:
        assert err == "lrkv: evaluating, 0 of 4\n"


def test_train_ends_with_the_page_of_its_run(capsys, monkeypatch, trained, one_device):
    sample = trained / "samples/step-00000006.txt"
    sample.parent.mkdir()
    sample.write_text("My fellow <b>Americans")
    again = "train", trained / "config.yaml", f"run_dir={trained}"
    code, out, _ = lrkv(capsys, monkeypatch, *again)
    assert code == 0 and [line.split() for line in out.splitlines()[-3:]] == [
        ["report", str(trained / "report.html")],
        ["next", "lrkv", "evaluate", str(trained)],
        ["lrkv", "generate", str(trained), "--prompt", "'My", "fellow", "Americans,'"],
    ]
    page = html.unescape((trained / "report.html").read_text())
    (start,) = map(json.loads, (trained / "history.jsonl").read_text().splitlines())
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    for said in (
        sample.read_text(), f"1 × {start['device']}", f"jax {start['versions']['jax']}",
        f"{last['validation_loss']:.4f} nats/token", f"{6 * 8 * 32:,}", "train.seq_len",
    ):  # fmt: skip
        assert said in page
    assert page.count("data:image/svg+xml") == 3, "loss, learning rate and speed"
    monkeypatch.setattr("lrkv_jax.lab.report.page.svg", lambda _: 1 / 0)
    code, _, err = lrkv(capsys, monkeypatch, *again)
    why = "ZeroDivisionError: division by zero"
    assert code == 0 and err.splitlines()[-1] == f"the run is saved, but not its report ({why})"


@pytest.mark.slow
def test_evaluate_gives_the_same_numbers_whatever_the_batch(
    capsys, monkeypatch, trained, one_device
):
    results = []
    for batch, tasks in ((1, "bpb"), (37, "bpb,docstrings,agreement"), (64, "bpb,docstrings")):
        how = "--batch", batch, "--tasks", tasks
        code, out, _ = lrkv(capsys, monkeypatch, "evaluate", trained, *how)
        assert code == 0 and "bits per byte" in out
        results.append(json.loads((trained / "evaluation.json").read_text()))
    one, saved, other = results
    for result in (saved, other):
        for name in ("tokens", "bytes"):
            assert result["bpb"][name] == one["bpb"][name]
        for name in ("cross_entropy", "bits_per_byte"):
            assert result["bpb"][name] == pytest.approx(one["bpb"][name], rel=1e-6)
    docstrings = [result["docstrings"] for result in (saved, other)]
    assert docstrings[0]["bits_per_byte"] == pytest.approx(docstrings[1]["bits_per_byte"], rel=1e-6)
    # Every byte of the texts counts once: specials and padding excluded.
    data = load_config(trained / "config.yaml").data
    held_out = documents(data.source, "heldout", heldout=data.heldout)
    assert one["bpb"]["bytes"] == sum(len(text.encode()) for text in held_out)
    lines = lzma.decompress(read_asset("stdlib.jsonl.xz")).decode().splitlines()
    text_bytes = sum(len(json.loads(line)["text"].encode()) for line in lines)
    assert saved["docstrings"]["bytes"] == text_bytes
    assert saved["agreement"]["max_relative_error"] < 1e-5
    assert saved["agreement"]["same_greedy_token"] == 1.0
    # Two layers of 2 (K + H R) float32 values, rank 3 padded to 8, and H float32 norms.
    assert saved["kv_cache_bytes_per_token"] == 2 * (2 * (8 + 4 * 8) * 4 + 4 * 4)
    assert saved["kv_cache_dtype"] == "float32"
    assert saved["kv_cache_bytes_per_token_bfloat16"] == 2 * (2 * (8 + 4 * 8) * 2 + 4 * 4)


@pytest.mark.slow
def test_analyze_writes_what_the_report_draws(capsys, monkeypatch, trained, one_device):
    code, out, _ = lrkv(capsys, monkeypatch, "analyze", trained, "--ranks", "1,2", "--batches", 1)
    assert code == 0 and out.strip() == str(trained / "analysis.json")
    analysis = json.loads((trained / "analysis.json").read_text())
    assert analysis["weighted"] and analysis["logits"]
    assert [fit["rank"] for fit in analysis["factorisation"]] == [1, 2]
    page = trained / "page"
    names = "table03,fig06"
    assert lrkv(capsys, monkeypatch, "report", trained, "--only", names, "--out", page)[0] == 0
    report = (page / "report.html").read_text()
    assert "<img" in report and "Effective rank" in report
    assert "http" not in report.split("<body>")[1]
    assert {path.suffix for path in page.iterdir()} >= {".png", ".svg", ".md", ".json"}


@pytest.mark.slow
def test_generate_takes_prompts_settings_and_a_seed(capsys, monkeypatch, trained, one_device):
    how = ("generate", trained, "model.decode_kernel=xla", "--prompt", "My fellow Americans,")
    how = (*how, "--prompt", "We", "--tokens", "8")
    said = [lrkv(capsys, monkeypatch, *how, "--seed", seed) for seed in ("3", "3", "4")]
    first, again, other = said
    assert first[:2] == again[:2] and first[0] == 0
    assert first[1] != other[1] and first[1].startswith("My fellow") and "\nWe" in first[1]
    how = [str(word).replace("=xla", "=mosaic") for word in how]
    code, _, err = lrkv(capsys, monkeypatch, *how)
    assert code == 2 and "cannot run as mosaic: the backend is cpu, not a GPU; use xla" in err


def test_data_build_prints_where_the_records_are(capsys, monkeypatch, pages, tmp_path):
    code, out, _ = lrkv(capsys, monkeypatch, "data", "build", "quickstart", *pages,
                       f"data.directory={tmp_path / 'data'}", "train.seq_len=32")  # fmt: skip
    assert code == 0 and out.startswith(str(tmp_path / "data"))
    assert any((tmp_path / "data").rglob("*")), "and they are there"


COMMAND = typer.main.get_command(app)


def every(command=COMMAND, path=()):
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from every(below, (*path, name))


ALL = dict(every())


@pytest.mark.parametrize("path", ALL, ids=lambda path: " ".join(path) or "lrkv")
def test_a_help_page_says_what_each_thing_is_and_cuts_no_purpose(capsys, monkeypatch, path):
    monkeypatch.setenv("COLUMNS", "80")
    code, page, _ = lrkv(capsys, monkeypatch, *path, "-h")
    assert code == 0 and max(map(len, page.splitlines())) <= 80
    words, command = " ".join(page.split()), ALL[path]
    assert " ".join(command.help.split("\n\n")[0].split()) in words
    for name, below in getattr(command, "commands", {}).items():
        assert f"{name} {below.help.split(chr(10))[0]}" in words
    for param in command.params:
        assert param.help, f"{path} {param.name} says nothing"


def test_a_group_without_a_verb_shows_its_page_and_the_version_is_the_packages(capsys, monkeypatch):
    code, out, err = lrkv(capsys, monkeypatch, "bench")
    assert code == 2 and "decode" in out + err and "lrkv:" not in err
    assert lrkv(capsys, monkeypatch, "--version") == (0, f"lrkv {__version__}\n", "")


def test_what_orbax_logs_is_left_out_by_a_command_and_not_by_python(
    capsys, monkeypatch, caplog, tmp_path
):
    def says(text):
        with quiet(), Checkpointer(tmp_path):  # both have set the logger's level
            pass
        absl.logging.error(text)

    monkeypatch.setattr("lrkv_jax.cli.app", lambda **_: says("from a command"))
    assert lrkv(capsys, monkeypatch) == (0, "", "")
    says("from Python")
    assert caplog.messages == ["from Python"]


def test_what_prints_and_ends_a_process_has_streams_where_the_caller_closed_them(
    capsys, monkeypatch
):
    for name in ("stdin", "stdout", "stderr", "__stdout__", "__stderr__"):
        monkeypatch.setattr(sys, name, None)  # as Python does for `<&- >&- 2>&-`
    assert lrkv(capsys, monkeypatch, "--version")[0] == 0
    assert not any(s.isatty() for s in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__))
    assert sys.stdin.read() == ""


def test_what_is_typed_in_another_encoding_ends_no_chat(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9\n"), "utf-8"))
    monkeypatch.setattr("lrkv_jax.cli.app", lambda **_: sys.exit(input() == "caf\udce9"))
    monkeypatch.setattr(sys, "argv", ["lrkv"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code is True


@pytest.mark.parametrize(
    ("error", "option", "code"),
    [
        (LrkvError("a setting"), "train", 2), (LrkvError("a setting"), "--debug", 1),
        (FileNotFoundError(2, "No such file", "x"), "train", 2), (OSError("no number"), "train", 1),
        (OSError(errno.ENOSPC, "No space left"), "train", 69),
        (ValueError("a fault"), "train", 1),
    ],
)  # fmt: skip
def test_one_of_several_processes_leaves_at_once_whatever_ends_it(monkeypatch, error, option, code):
    """With --debug, or an OSError without a number, it waited in JAX's exit for the others."""
    monkeypatch.setattr("lrkv_jax.cli.app", Mock(side_effect=error))
    monkeypatch.setattr(HERE, "count", 2)
    monkeypatch.setattr(HERE, "leave", leave := Mock(side_effect=SystemExit("left")))
    monkeypatch.setattr(sys, "argv", ["lrkv", option])
    with pytest.raises(SystemExit, match="left"):
        main()
    leave.assert_called_once_with(code)
