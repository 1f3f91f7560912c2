"""docs/paper.md names tests and scripts: they exist, and every script of an artefact is named."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
GUIDE = (ROOT / "docs/paper.md").read_text(encoding="utf-8")


def test_every_test_that_the_guide_names_is_there():
    named = set(re.findall(r"`(test_\w+)`", GUIDE))
    there = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        there |= set(re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M))
    assert len(named) > 30
    assert not named - there


def test_every_file_that_the_guide_names_is_there():
    for name in re.findall(r"(?:experiments|tests|configs|lrkv_jax)/[\w/.]+\.\w+", GUIDE):
        assert (ROOT / name).exists() or name == "experiments/NAME.py", name
    for name in re.findall(r"\]\((\w+\.md)\)", GUIDE):
        assert (ROOT / "docs" / name).exists()


def test_every_artefacts_script_is_in_the_guide():
    for path in (ROOT / "experiments").glob("*.py"):
        if "\nARTEFACT = " in path.read_text(encoding="utf-8"):
            assert f"`{path.stem}`" in GUIDE
