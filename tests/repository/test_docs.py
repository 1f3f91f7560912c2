"""What the pages name exists: commands, options, settings, links, pictures and packages."""

import json
import re
import runpy
import shlex
import statistics
from pathlib import Path

import pytest
import typer
from support.tiny import TINY
from typer.testing import CliRunner

import lrkv_jax
from lrkv_jax.cli import app
from lrkv_jax.config import load_config
from lrkv_jax.models.accounting.counts import cache_allocated_bytes_per_token

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
COMMAND = typer.main.get_command(app)
# What stands for something of the reader's: a configuration of his, or the rest of a line.
LEFT_OUT = re.compile(r"\.\.\.|…|\bCONFIG\b|\bSETTINGS\b|\bMY_FOLDER\b")

PATH = r"(?<![\w/.])(?:experiments|tests|configs|lrkv_jax|launch|docs)/[\w/.-]+\.\w+"
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
}

# Private words and others for which the field, or American English, has its own.
PRIVATE = (
    r"amiss|analys(e|ing)|artefacts?|behaviour|beside|but for|colours?|crowd|foresight|gave way"
    r"|incidents|in turns?|licence|mend(s|ed)?|neighbou?r(ing)? request|objection|own|peers"
    r"|read again|remarks?|rhythm|shelf|told|whole cache|\w+([ai]l|im|an)is(e|ed|ing)"
)


def blocks(page, *languages):
    """The fenced blocks of a page that are in one of these languages; "" is none."""
    text = page.read_text(encoding="utf-8")
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)
    return [body for language, body in fences if language in languages]


def prose(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def sentence_lengths(page):
    """The words of each sentence, without code blocks, tables, headings, pictures and formulas."""
    text = re.sub(r"<!--.*-->|^(!\[| {4}|#|\|).*$", "\n\n", prose(page), flags=re.M)
    text = re.sub(r"^(- |\d+\. )", "\n\n", re.sub(r"`[^`]*`", "code", text), flags=re.M)
    sentences = re.split(r"(?<=[.!?])[*)\"]*\s|\n\s*\n", text)
    return [words for one in sentences if (words := len(re.findall(r"\S*\w\S*", one)))]


def commands(page):
    """(words after `lrkv`, whether it is a whole line) of a page's commands."""
    for block in blocks(page, "sh", "bash", ""):
        for line in block.replace("\\\n", " ").splitlines():
            if re.match(r"(\S+ )*(\S*/)?lrkv ", line):
                yield from ((words, True) for words in parts(shlex.split(line, comments=True)))
    for code in re.findall(r"`((?:\.venv/bin/)?lrkv [^`]*)`", prose(page).replace("\n", " ")):
        yield from ((words, False) for words in parts(shlex.split(code)))


def parts(words):
    """Each command line of a list of words, without redirections and environment."""
    while words:
        cut = next((i for i, w in enumerate(words) if w in (";", "&&", "|", ">")), len(words))
        one, words = [w.removesuffix(";") for w in words[:cut]], words[cut + 1 :]
        for place, word in enumerate(one):
            if word == "lrkv" or word.endswith("/bin/lrkv"):
                yield one[place + 1 :]
                break


def parsed(words):
    """The context of a command line; fails as the command does for an unknown verb or option."""
    command = COMMAND
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"lrkv {' '.join(words)}: no such command"
        command, words = command.commands[words[0]], words[1:]
    if not hasattr(command, "commands") and not command.context_settings:
        context = COMMAND.make_context("lrkv", [], resilient_parsing=True)
        command.make_parser(type(context)(command)).parse_args(list(words))
    return command, words


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_in_the_pages_exist_with_their_options_and_settings(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a plan's Slurm job
    for words, whole in commands(page):
        command, rest = parsed([w for w in words if w != "--debug"])
        if not whole or words[0] not in ("train", "plan") or LEFT_OUT.search(" ".join(words)):
            continue
        config, *more = [w for w in rest if not w.startswith("-")] or [""]
        settings = [w for w in more if "=" in w]
        if config and not any(w.startswith("init_from=") for w in settings):  # a run's model
            config_path = str(ROOT / config) if "/" in config else config
            load_config(config_path, settings)
            if words[0] == "plan":  # the mesh must divide the batch, too
                line = [config_path if w == config else w for w in words]
                CliRunner().invoke(app, [*line, "--no-compile"], catch_exceptions=False)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_files_and_tests_that_the_pages_name_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not target.startswith("http"):
            path, _, anchor = target.partition("#")
            there = page.parent / path if path else page
            headings = re.findall(r"^#+ (.*)$", prose(there), re.M) if anchor else []
            anchors = {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}
            assert there.exists() and (not anchor or anchor in anchors), target
    text = page.read_text(encoding="utf-8")
    for name in set(re.findall(PATH, text)):
        assert (ROOT / name).exists(), name
    for name in set(re.findall(r"`(test_\w+\.py)`", text)):
        assert any((ROOT / "tests").rglob(name)), name
    assert set(re.findall(r"`(test_\w+)`", text)) <= TESTS


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_sentences_are_short_and_words_are_the_fields(page):
    assert statistics.mean(sentence_lengths(page)) <= 18
    words = re.sub(r"`[^`]*`|\"[^\"]*\"", "", prose(page))
    assert [found[0] for found in re.finditer(rf"\b({PRIVATE})\b", words, re.I)] == []


def test_the_first_pages_result_is_that_of_the_runs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")  # the variants of that result
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= 110
    table = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    found = r"1\.\d{4} ± 0\.\d{4}|[+-]0\.\d{4} \([+-]0\.\d{4} to [+-]0\.\d{4}\)"
    shown = re.findall(found, page.split("## Two commands")[0])
    assert len(shown) == 16 and all(figure in table for figure in shown)

    def cached(scale):
        models = (
            load_config(scale, [f"attention={name}"]).model for name in ("lrkv_latent", "mha")
        )
        return [cache_allocated_bytes_per_token(model) for model in models]

    lrkv, mha = cached(ROOT / "experiments/mechanism/mechanism.yaml")
    assert f"| `lrkv_latent`: LRKV, latents rotated (ours) | {100 * lrkv / mha:.1f} |" in page
    first_hour = (ROOT / "docs/first_hour.md").read_text(encoding="utf-8")
    assert all(f"| {nbytes:,} |" in first_hour for nbytes in cached("quickstart"))


def test_the_estimates_of_memory_are_those_of_the_kept_runs():
    rows = json.loads((ROOT / "experiments/results/plan_cpu.json").read_text())["rows"]
    planning, readme = ((ROOT / page).read_text() for page in ("docs/planning.md", "README.md"))
    least, *_, most = sorted(100 * row["difference"] for row in rows)
    said = f"{-least:.1f} % below to {most:.1f} % above"
    assert said in readme and said in planning and f"In {len(rows)} runs" in planning
    lines = [
        f"| `{row['program']}` | {row['estimate'] / 1e9:.1f} | {row['total'] / 1e9:.1f} "
        f"| {100 * row['difference']:+.1f} % |"
        for row in rows
    ]
    assert sum(line in planning for line in lines) == 3


def test_the_pages_are_few_and_the_index_and_the_table_of_packages_leave_nothing_out():
    pages = [page.read_text(encoding="utf-8") for page in ROOT.glob("docs/*.md")]
    words = re.findall(r"\S*\w\S*", " ".join(pages))  # a table's lines are none
    assert len(pages) <= 23 and len(words) <= 29_410
    linked = set(re.findall(r"\]\((\w+\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert {path.name for path in ROOT.glob("docs/*.md")} - {"README.md"} == linked
    packages = {path.parent.name for path in Path(lrkv_jax.__file__).parent.glob("*/__init__.py")}
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert packages == set(re.findall(r"^\| `(\w+)/`", page, re.M))


def test_the_glossary_has_every_letter_of_an_axis():
    code = "\n".join(path.read_text() for path in Path(lrkv_jax.__file__).parent.rglob("*.py"))
    letters = set("".join(re.findall(r"\b[a-z]\w*_([A-Z]{1,6})\b", code)))
    page = (ROOT / "docs/glossary.md").read_text().partition("## Attention")[0]
    assert letters <= set(re.findall(r"\b[A-Z]\b", page))


def test_the_pictures_are_what_their_script_draws():
    path = ROOT / "docs/pictures/draw.py"
    for name, make in runpy.run_path(str(path))["PICTURES"].items():
        assert (path.parent / name).read_text(encoding="utf-8") == make()


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_the_page_on_python_runs(tmp_path, monkeypatch, pages):
    monkeypatch.chdir(tmp_path)
    settings = [*TINY, *pages, "attention=lrkv", "train.seq_len=128"]
    code = "\n".join(blocks(ROOT / "docs/python.md", "python"))
    # Both engines of one small shape, so that the second finds the first one's programs.
    for page, here in (
        ('{"attention": "lrkv"}', repr(settings)),
        ("length=256", "length=128"),
        ("batch=8, length=1024, pages=64", "batch=2, length=128, pages=4"),
    ):
        assert page in code
        code = code.replace(page, here)
    exec(compile(code, "docs", "exec"), {})
