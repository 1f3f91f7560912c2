"""The mechanism's tables, from planted runs whose effects are known."""

import json
import re
import shutil
import sys
from dataclasses import replace
from math import log
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy.stats import t, ttest_1samp, ttest_rel
from support.served import random_run

from lrkv_jax.config import load_config
from lrkv_jax.config.schema import MeshConfig
from lrkv_jax.distributed.mesh import make_mesh
from lrkv_jax.inference.language_model import LanguageModel
from lrkv_jax.lab.report.comparison.runs import Curve, steps_saved
from lrkv_jax.models.accounting.counts import parameter_counts

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def test_a_part_says_its_runs_and_asks_of_means_that_it_has(pages):
    """First all rates; an end of them asks for the next; then a seed of all variants at a time."""
    for part in pages.design.PARTS.values():
        path, configs, sizes = EXPERIMENTS / "mechanism" / part.config, set(), []
        for variant in part.variants:
            run = pages.design.Planned(variant, 0.02, 0, part.steps)
            changed = pages.design.settings(part, run)
            config = load_config(path, [f"{name}={value}" for name, value in changed.items()])
            configs.add((config.model.attention, config.optimizer))
            sizes.append(parameter_counts(config.model).total / 1e6)
        assert len(configs) == len(part.variants)
        if part is pages.design.FACTORIAL:
            page = (EXPERIMENTS.parent / "docs/results.md").read_text()
            assert f"{min(sizes):.1f} to {max(sizes):.1f}M parameters" in page
        if part.averaged:  # all checkpoints of the last tenth are there to be averaged
            saved = [*range(0, part.steps, config.train.save_every), part.steps]
            tenth = [step for step in saved if step > 0.9 * part.steps]
            assert len(tenth) == config.train.max_checkpoints
        assert part.equal_within.keys() <= part.contrasts.keys()
        for weights in part.contrasts.values():
            assert sum(weights.values()) == 0 and weights.keys() <= set(part.names)
        made, best = [], {variant: 0.014 for variant in part.variants} | {"mha": 0.01}
        while run := pages.runs.next_run(part, made):
            loss = abs(log(run.rate / best[run.variant]))
            tune = {"a": [(log(2) * 100 * (2 + loss), 50, 100)]}
            made.append({**vars(run), "documents": {"tune": tune}})
        rates = [(r["rate"], r["seed"]) for r in made if r["steps"] < part.steps]
        whole = [(r["variant"], r["rate"]) for r in made if r["steps"] == part.steps]
        assert len(rates) == 6 * len(part.variants) + 2 and (0.0071, 101) in rates
        assert whole == len(part.seeds) * [(v, best[v]) for v in part.variants]


@pytest.fixture
def pages(monkeypatch):
    monkeypatch.syspath_prepend(EXPERIMENTS)
    yield __import__("mechanism.pages").pages
    for name in [name for name in sys.modules if name.partition(".")[0] == "mechanism"]:
        sys.modules.pop(name)


def test_runs_are_kept_behind_a_line_that_was_cut_off(pages, tmp_path):
    for seed in range(3):
        pages.runs.keep(tmp_path / "new/runs.jsonl", [{"seed": seed}])
        with (tmp_path / "new/runs.jsonl").open("a") as file:
            file.write('{"seed": 9' * (seed == 1))
    assert pages.runs.kept(tmp_path / "new/runs.jsonl") == [{"seed": seed} for seed in range(3)]


def test_kinds_of_text_are_checked_before_a_download(pages, monkeypatch, capsys):
    text = __import__("mechanism.text").text
    monkeypatch.setattr(text.subprocess, "run", None)
    monkeypatch.setattr("sys.argv", ["text.py", "out", "manual"])
    with pytest.raises(SystemExit):
        text.main()
    assert "invalid choice: 'manual' (choose from 'definitions'" in capsys.readouterr().err


def test_the_page_is_what_the_kept_runs_give(pages, tmp_path):
    page, kept = EXPERIMENTS.parent / "docs/results.md", EXPERIMENTS / "results/mechanism"
    shutil.copytree(kept, tmp_path / "kept")
    shutil.copy(page, tmp_path)
    pages.write(tmp_path, tmp_path / "kept")
    assert (tmp_path / page.name).read_text() == page.read_text()
    assert (tmp_path / "kept/contrasts.json").read_text() == (kept / "contrasts.json").read_text()


def test_of_the_runs_of_a_quarter_the_page_says_what_survives_on_both_splits(pages):
    page = (EXPERIMENTS.parent / "docs/results.md").read_text()

    def losses(part, steps=None, seeds=(100, 101)):
        every = pages.runs.kept(EXPERIMENTS / "results/mechanism" / part.runs)
        found = {"tune": {}, "test": {}}
        for run in every:
            if run["steps"] == (steps or part.rate_steps) and run["seed"] in seeds:
                for split, of in found.items():
                    losses = of.setdefault(run["variant"], {}).setdefault(run["rate"], {})
                    losses[run["seed"]] = pages.design.bits_per_byte(run["documents"][split])
        best = {}  # of the rates that both seeds have
        for name, rates in found["tune"].items():
            best[name] = min((sum(bits.values()), r) for r, bits in rates.items() if len(bits) > 1)
        for of in found.values():
            yield {name: rates[best[name][1]] for name, rates in of.items()}

    def to_mha(*asked):
        return map(pages.to_mha, losses(*asked))

    tune, test = to_mha(pages.design.FACTORIAL)
    below = [v for v in tune if tune[v].verdict == test[v].verdict == "lower"]
    assert below == ["lrkv_latent"]
    readme = (EXPERIMENTS.parent / "README.md").read_text()
    assert "only rotated latents are below MHA on both held-out splits" in readme
    for name in ("lrkv_latent", "both"):
        assert f"{tune[name].p:.2g} on `tune`, {test[name].p:.2g} on `test`" in page
    seeds = [
        [[*of[v].values()] for v in ("lrkv_latent", "mha")] for of in losses(pages.design.FACTORIAL)
    ]
    alone = " and ".join(f"{ttest_rel(*pair).pvalue:.2g}" for pair in seeds)
    assert f"the two seeds alone give {alone}." in page
    _, whole = to_mha(pages.design.FACTORIAL, 1953, range(6))
    errors = [test["lrkv_latent"].error, whole["lrkv_latent"].error]
    degrees = sum(e**2 for e in errors) ** 2 / sum(
        e**4 / of["lrkv_latent"].degrees for e, of in zip(errors, (test, whole), strict=True)
    )  # Welch and Satterthwaite
    change = whole["lrkv_latent"].difference - test["lrkv_latent"].difference
    p = 2 * t.sf(change / np.hypot(*errors), degrees)
    assert f"That change has p = {p:.2f}" in " ".join(page.split())
    tune, test = to_mha(pages.design.SIZE)
    below = [-of[name].difference for name in ("shared", "lrkv_latent") for of in (tune, test)]
    full = {f"{-of['lrkv_full'].difference:.3f}" for of in (tune, test)}
    told = f"{min(below):.3f} to {max(below):.3f} below MHA, the paper's LRKV {full.pop()}"
    assert told in " ".join(page.split()) and not full
    for found in to_mha(pages.design.HYBRIDS):
        assert len(found) == 4 and max(abs(one.difference) for one in found.values()) < 0.001
    for found in to_mha(pages.design.HYBRIDS, pages.design.HYBRIDS.steps, (0, 1)):
        assert len(found) == 4 and max(abs(one.difference) for one in found.values()) < 0.003
    assert "no head start either: quarters are within 0.001." in " ".join(page.split())


def test_of_what_can_be_copied_the_page_says_what_further_seeds_have(pages):
    results = " ".join((EXPERIMENTS.parent / "docs/results.md").read_text().split())
    kept = pages.runs.kept(EXPERIMENTS / "results/mechanism" / pages.design.LENGTH.runs)
    at = {(r["variant"], r["seed"]): r for r in kept if r["rate"] == 0.01 and r["steps"] == 1953}
    pairs = [(at["lrkv_full", seed], at["mha", seed]) for seed in (100, 101)]

    def copied(run, kind):
        rows = run["documents"]["test"][kind]
        return sum(row[3] for row in rows) / log(2) / sum(row[2] for row in rows)

    def differences(value):
        return " and ".join(f"{value(full) - value(mha):.3f}" for full, mha in pairs)

    of_each = [
        differences(lambda run, kind=kind, value=value: value(run, kind))
        for kind in ("definitions", "manuals")
        for value in (pages.of_test, copied)
    ]
    said = "{} over all kinds) definitions have {}, of which tokens that can be copied give {}, "
    said += "manuals {}, of which they give {}."
    assert said.format(differences(pages.of_test), *of_each) in results


def test_the_page_says_what_rates_found_at_the_whole_length_change(pages):
    results = " ".join((EXPERIMENTS.parent / "docs/results.md").read_text().split())
    folder, part, of_bits = EXPERIMENTS / "results/mechanism", pages.design.LENGTH, {}
    for run in pages.runs.kept(folder / part.runs):
        if run["steps"] == part.rate_steps:
            bits = [
                pages.design.bits_per_byte(run["documents"][split]) for split in ("tune", "test")
            ]
            of_bits.setdefault(run["variant"], {}).setdefault(run["rate"], []).append(bits)
    best, test = {}, {}
    for name in part.variants:
        both = {rate: np.mean(two, axis=0) for rate, two in of_bits[name].items() if len(two) == 2}
        best[name] = min(both, key=lambda rate: both[rate][0])
        assert min(both) < best[name] < max(both), "no end of what was tried"
        test[name] = both[best[name]][1]
    assert best == dict.fromkeys(part.variants, 0.0071) | {"mha": 0.01}
    now = {name: test[name] - test["mha"] for name in part.variants[1:]}
    said = "the shared path is {shared:.3f} above MHA on `test`, the paper's LRKV {lrkv_full:.3f},"
    said = said.format(**now) + f" rotated latents {-now['lrkv_latent']:.3f} below"
    assert f"{said}: all within 0.004 of the table's." in results
    kept = [r for r in pages.runs.kept(folder / "runs.jsonl") if r["steps"] == 1953]
    table = pages.to_mha(pages.values_of(pages.design.FACTORIAL, kept, pages.of_test))
    assert all(abs(now[name] - table[name].difference) < 0.004 for name in now)


def test_of_steps_the_page_says_how_many_longer_runs_saved_some(pages):
    results, saved = (EXPERIMENTS.parent / "docs/results.md").read_text(), []
    for part in (pages.design.FACTORIAL, pages.design.SIZE, pages.design.HYBRIDS):
        curves = {}
        for run in pages.runs.kept(EXPERIMENTS / "results/mechanism" / part.runs):
            if run["steps"] == part.steps:
                steps, losses = zip(*run["validation"], strict=True)
                at = Curve(steps, steps, steps, np.array(losses), losses, heldout_tokens=1)
                curves[run["variant"], run["seed"]] = at
        pairs = [(curves["lrkv_full", seed], curves["mha", seed]) for seed in part.seeds]
        saved += [steps_saved(*pair) for pair in pairs]
    sooner = [100 * share for share in saved if share is not None]
    said = f"of {len(saved)} longer runs {len(sooner)} were there sooner"
    assert f"{said}, by {min(sooner):.1f} to {max(sooner):.1f} %" in results


def test_of_the_hybrids_the_page_says_what_their_seeds_can_find(pages):
    results = " ".join((EXPERIMENTS.parent / "docs/results.md").read_text().split())
    part, kept = pages.design.HYBRIDS, EXPERIMENTS / "results/mechanism"
    runs = [run for run in pages.runs.kept(kept / part.runs) if run["steps"] == part.steps]
    values = pages.values_of(part, runs, pages.of_test)
    over = [c for name, c in pages.combined(values, part.contrasts).items() if "- MHA" in name]
    assert len(over) == 4 and {one.verdict for one in over} == {"not found"}
    low, high = (f"{pick(one.difference for one in over):.4f}" for pick in (min, max))
    least = f"{min(one.detectable for one in over):.2g}"
    assert f"they are {low} to {high} above it, and {least} would be found" in results
    (asked,) = part.equal_within
    equal = json.loads((kept / "contrasts.json").read_text())["hybrids"]["contrasts"][asked]
    assert f"equal within 0.003 (p = {equal['p_equal']:.2g})" in results
    mha, none, mla = (
        json.loads((kept / "hybrids_costs.json").read_text())["variants"][name]
        for name in ("mha", "lrkv_none", "mla_full")
    )
    said = "{:.0%} of MHA's bytes at 131,072 tokens and decodes {:.1f} × as fast; MLA has {:.0%}, "
    said += "at {:.1f} ×."
    costs = [
        share
        for one in (none, mla)
        for share in (
            one["bytes"]["131072"] / mha["bytes"]["131072"],
            mha["ms"][1] / one["ms"][1],
        )
    ]
    assert said.format(*costs).replace("%", " %") in results
    choosing = (EXPERIMENTS.parent / "docs/choosing.md").read_text()
    assert f"`rope: none`: {costs[0]:.0%}".replace("%", " %") in choosing


def test_of_the_larger_models_the_pages_say_what_their_seeds_can_find(pages):
    docs, part = EXPERIMENTS.parent / "docs", pages.design.SIZE
    results, one_page, readme = (
        " ".join(path.read_text().split())
        for path in (docs / "results.md", docs / "summary.md", EXPERIMENTS.parent / "README.md")
    )
    every = pages.runs.kept(EXPERIMENTS / "results/mechanism" / part.runs)
    kept = [run for run in every if run["steps"] == part.steps]

    def of(value):
        return pages.values_of(part, kept, value)

    bits = of(pages.of_test)
    shared, full, latent = (
        [f"{bits[name][seed] - bits['mha'][seed]:+.3f}" for seed in part.seeds]
        for name in ("shared", "lrkv_full", "lrkv_latent")
    )
    said = "a shared path has {}, {} and {}, the paper's LRKV {}, {} and {}, rotated latents {}, {}"
    assert f"{said} and {{}}.".format(*shared, *full, *latent) in results
    few, many = (
        [
            np.ptp([*seeds.values()])
            for seeds in of(lambda run, kind=kind: pages.of_test(run, kind)).values()
        ]
        for kind in ("speeches", "manuals")
    )
    said = f"{min(many):.2f} to {max(many):.2f} apart on manuals, and on speeches at most "
    assert f"{said}{max(few):.3f}." in results
    whole, new = map(pages.to_mha, (bits, of(pages.of_what_cannot_be_copied)))
    assert new["shared"].error / whole["shared"].error == pytest.approx(0.117, abs=0.001)
    for found in (whole, new):
        assert {one.verdict for one in found.values()} == {"not found"}
    assert f"(p {min(one.p for one in new.values()):.2f} and more)" in results
    least = f"{whole['shared'].detectable:.2f}"
    assert f"none below {least} would be" in one_page and f"none below {least} would be" in readme


def test_a_run_is_the_same_on_another_processor(pages):
    page, kept = (
        (EXPERIMENTS.parent / "docs/results.md").read_text(),
        EXPERIMENTS / "results/mechanism",
    )
    runs = {
        tuple(r[k] for k in ("variant", "seed", "steps", "rate")): r
        for r in pages.runs.kept(kept / "runs.jsonl")
    }
    differences = []
    for again in pages.runs.kept(kept / "again.jsonl"):
        run = runs[tuple(again[k] for k in ("variant", "seed", "steps", "rate"))]
        assert again["commit"] == run["commit"] and again["processors"] != run["processors"]
        bits = [pages.design.bits_per_byte(of["documents"]["test"]) for of in (again, run)]
        differences.append(abs(bits[0] - bits[1]))
    assert len(differences) == 2 and f"another differs by {max(differences):.6f})" in page


def test_a_token_can_be_copied_if_it_followed_the_same_token_before(pages):
    again_T = pages.runs.seen_before(np.array([5, 6, 7, 5, 6, 5, 6, 7, 7, 5]))
    assert again_T.tolist() == [False, False, False, True, False, True, True, False, True]


def test_a_document_s_loss_is_what_decoding_says_of_its_windows(pages, tmp_path, monkeypatch):
    run = replace(random_run(), mesh=make_mesh(MeshConfig(), jax.devices()[:1]))
    monkeypatch.setattr("lrkv_jax.load_run", lambda directory: run)
    long = "We the people, the people of the United States, one and all. " * 36
    texts = {"corpus/z-tune.jsonl": [("a", long), ("b", "Öl.")], "test.jsonl": [("a", "My")]}
    (tmp_path / "corpus").mkdir()
    for name, rows in texts.items():
        lines = (json.dumps({"kind": kind, "text": text}) for kind, text in rows)
        (tmp_path / name).write_text("\n".join(lines))
    found = pages.runs.losses_of_documents(tmp_path, tmp_path, average=False)
    model = LanguageModel(run, batch=4)
    for split, rows in zip(("tune", "test"), texts.values(), strict=True):
        for kind, text in rows:
            ((nats, tokens, size, copied, copied_size),) = found[split][kind]
            ids = run.ids(text)
            windows = [ids[at : at + 257] for at in range(0, len(ids) - 1, 256)]
            queries = [(window[:1], [window[1:]]) for window in windows]
            truth = -sum(score.log_p for (score,) in model.log_likelihoods(queries))
            assert nats == pytest.approx(truth, abs=1e-3)
            assert (tokens, size) == (len(ids) - 1, len(text.encode()))
            assert (copied > 0) == (copied_size > 0) == (text == long)
    assert len(windows) == 1 and len(run.ids(long)) > 2 * 256


def planted(part, rng):
    """Runs whose loss is their variant's, their seed's and noise; documents differ in both."""
    sizes = {kind: rng.integers(200, 9000, 60) for kind in ("a", "b", "c")}
    harder = {kind: rng.normal(1, 0.3, 60) for kind in sizes}
    copied = {kind: rng.uniform(0, 0.5, 60) for kind in sizes}
    helped = {
        (v, kind): rng.normal(0, 0.02, 60) + (v == "mqa") * copied[kind]
        for v in part.names
        for kind in sizes
    }
    for v, variant in enumerate(part.names):
        for seed in part.seeds:
            level = 2 + 0.01 * v + 0.05 * seed + rng.normal(0, 0.001)
            test = {
                kind: [
                    (log(2) * size * (level * hard + more), size, int(size), 0, share * size)
                    for size, hard, more, share in zip(
                        sizes[kind], harder[kind], helped[variant, kind], copied[kind], strict=True
                    )
                ]
                for kind in sizes
            }
            curve = [(100, 2 * level), (200, level)]
            yield {"variant": variant, "rate": 0.01, "seed": seed, "steps": part.steps,
                   "validation": curve, "documents": {"test": test}}  # fmt: skip


def test_contrasts_and_both_intervals_are_those_of_the_documents(pages, tmp_path, monkeypatch):
    rng, kept = np.random.default_rng(0), {}
    for name in ("hybrids", "controls", "factorial"):
        part = pages.design.PARTS[name]
        kept = list(planted(part, rng))
        short = [
            {**run, "steps": part.rate_steps, "documents": {"tune": run["documents"]["test"]}}
            for run in kept
        ]
        lines = [json.dumps(run, default=int) for run in (*kept, *short)]
        (tmp_path / part.runs).write_text("\n".join(lines))
    (tmp_path / pages.design.LENGTH.runs).write_text(lines[0])  # the same documents
    costs = __import__("mechanism.costs").costs
    few = replace(pages.design.HYBRIDS, variants=("lrkv_none",))
    monkeypatch.setattr(costs.design, "HYBRIDS", few)
    out = str(tmp_path / "hybrids_costs.json")
    monkeypatch.setattr("sys.argv", ["", "--length", "64", "--rounds", "1", "--out", out])
    costs.main()
    parts = ("factorial", "hybrids", "controls")
    names = [f"{part}{rest}" for part in parts for rest in ("", " contrasts")]
    names += ["hybrids costs", "copying"]
    marks = [f"<!-- {name} -->\n<!-- end of {name} -->" for name in names]
    (tmp_path / "results.md").write_text("\n".join(marks))
    pages.write(tmp_path, tmp_path)

    weights = part.contrasts["both - per head"]
    rows = {  # [seeds, kinds, documents, (nats, tokens, bytes)]
        name: np.array(
            [list(r["documents"]["test"].values()) for r in kept if r["variant"] == name]
        )
        for name in weights
    }
    nats = sum(weight * rows[name][..., 0].mean(0) for name, weight in weights.items())
    size = rows["both"][0, ..., 2]

    def difference(drawn):
        of = np.take_along_axis(nats, drawn, 1).sum(1)
        return (of / np.take_along_axis(size, drawn, 1).sum(1) / log(2)).mean()

    again = [difference(rng.integers(60, size=(3, 60))) for _ in range(2000)]
    found = json.loads((tmp_path / "contrasts.json").read_text())["factorial"]["contrasts"]
    one = found["both - per head"]
    assert one["difference"] == pytest.approx(difference(np.tile(np.arange(60), (3, 1))))
    assert one["error_over_documents"] == pytest.approx(np.std(again), rel=0.1)
    both, seeds = (np.ptp(one[f"interval_over_{over}"]) for over in ("both", "seeds"))
    error = np.hypot(one["error_over_seeds"], one["error_over_documents"])
    assert both / seeds == pytest.approx(error / one["error_over_seeds"])
    assert set(found) == set(part.contrasts) and (tmp_path / "factorial.png").exists()
    total = sum(weight * rows[name][..., 0].sum(2) for name, weight in weights.items())
    by_seed = (total / size.sum(1) / log(2)).mean(1)
    alone = ttest_1samp(by_seed, 0).confidence_interval()
    assert one["interval_of_seeds_alone"] == pytest.approx(alone)
    page = (tmp_path / "results.md").read_text()
    assert f"{one['difference']:+.4f}" in page and "| `lrkv_latent` " in page
    assert len(re.findall(r"\| +0\.01 \|", page)) == 9 + 5 + 8
    last = re.compile(r"\| `(\w+)` .* ([+-][.\d]+) \([^|]*\| *$", re.M)
    slopes = {name: float(slope) for name, slope in last.findall(page.split("copying")[1])}
    assert slopes["mqa"] == pytest.approx(0.1, abs=0.01) and abs(slopes["both"]) < 0.01
    # Of three windows MHA's keys and values; then shared ones, four heads' latents and norms.
    nbytes = 3 * 128 * 2 * 4 * 32 * 2 + 8192 * (2 * (32 + 4 * 8) * 2 + 4 * 4)
    assert f"{nbytes / 2**20:.2f}" in page.split("lrkv_none")[-1]
