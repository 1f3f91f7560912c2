"""The commands of docs/results.md and its contrasts name the runs they publish, and no others."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from lrkv_jax.config.attention import RETIRED
from lrkv_jax.config.differences import differences
from lrkv_jax.lab.report.comparison.files import archived_by_name, read_archive
from lrkv_jax.lab.sweep.grid import grid
from lrkv_jax.lab.sweep.work import state_of

ROOT = Path(__file__).parents[3]


def sweeps():
    """(archive, points, tasks) of each `lrkv sweep` of these pages that has one."""
    pages = ("docs/results.md", "experiments/results/family/contrasts.md")
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in pages)
    text = text.replace("\\\n", " ")
    for line in re.findall(r"^(?:\w+=\S+ )?lrkv sweep (.*)$", text, re.MULTILINE):
        words = shlex.split(line, comments=True)
        options = {name: words[words.index(name) + 1] for name in ("--archive", "--tasks")
                   if name in words}  # fmt: skip
        config, *settings = [
            word for at, word in enumerate(words)
            if not word.startswith("--") and words[at - 1] not in options
        ]  # fmt: skip
        if "--archive" in options:
            points = grid(str(ROOT / config), settings)
            yield ROOT / options["--archive"], points, options["--tasks"].split(",")


@pytest.fixture
def controls(monkeypatch):
    """The variants of experiments/controls.py, which the page's PYTHONPATH finds."""
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    monkeypatch.delitem(sys.modules, "controls", raising=False)
    yield
    sys.modules.pop("controls", None)


@pytest.mark.usefixtures("controls")
def test_the_published_commands_name_the_published_runs():
    points: dict[Path, list] = {}
    for file, some, tasks in sweeps():
        archived = archived_by_name(file)
        new = [point.name for point in some if state_of(point, tasks, archived).name != "done"]
        assert not new, f"lrkv sweep --archive {file.name} would train {', '.join(new)}"
        points[file] = points.get(file, []) + some
    assert len(points) == 2
    for file, of_file in points.items():
        for run in read_archive(file):
            alike = (p.config for p in of_file if p.config.attention == run.config.attention
                     and p.config.train.seed == run.config.train.seed)  # fmt: skip
            # Runs of variants that were given up cannot be made again.
            assert run.kind in RETIRED or any(not differences(run.config, one) for one in alike)
            assert run.finished and run.history[0]["device"] and run.history[0]["cores"] == 1
            evaluated = run.evaluation["bpb"]["bits_per_byte"]
            assert evaluated == pytest.approx(run.bits_per_byte, rel=1e-6)
