"""Table 2: the five benchmarks, by variant, from each run's `evaluation.json`.

    python experiments/table02_downstream.py RUN... --out DIR

Of runs that were evaluated with `lrkv evaluate RUN --tasks arc_easy,...`; midtrained ones first.
"""

from lrkv_jax.artefacts import (
    SCALES,
    Artefact,
    Cell,
    Column,
    Row,
    Table,
    command,
    name_of,
    no_run,
    printed,
)  # fmt: skip
from lrkv_jax.comparison import KINDS, settings

TASKS = {
    "arc_easy": "ARC-E", "arc_challenge": "ARC-C", "mmlu": "MMLU", "gsm8k": "GSM8K",
    "humaneval": "HumanEval", "combined": "combined",
}  # fmt: skip
COLUMNS = [Column("variant")] + [Column(name, "%", "higher", 1) for name in TASKS.values()]


def make(runs):
    asked = [run for run in runs if any(task in (run.evaluation or {}) for task in TASKS)]
    rows = []
    for midtrained in (True, False):
        for setting in settings(asked, midtrained=midtrained):
            how = "midtrained" if midtrained else "pretrained alone"
            rows += block(setting, f"{setting.name}, {how}")
    rows = rows or [Row.of("any variant", *[no_run("one asked the benchmarks")] * len(TASKS))]
    note = (
        "Mean ± standard deviation over seeds; a rate p of n examples is itself known to "
        "± √(p (1 − p) / n) of one model. Combined: the mean of the five."
    )
    return [Table("Downstream tasks", COLUMNS, rows, notes=[note]), as_printed()]


def block(setting, name):
    for kind in KINDS:
        seeds = setting.main(kind)
        yield Row.of(name_of(kind), *(cell(seeds, task, name, kind) for task in TASKS), block=name)


def cell(seeds, task, block, kind):
    if not seeds:
        return no_run(f"{block} {kind}")
    answers = {s: run.evaluation[task] for s, run in seeds.items() if task in run.evaluation}
    if not answers:
        return Cell(gap=f"not asked: {block} {kind} {task}")
    if task == "combined":
        return Cell.over({s: 100 * score for s, score in answers.items()})
    example = next(iter(answers.values()))
    note = f"{TASKS[task]}: {example['examples']:,} examples, in the style {example['style']}."
    return Cell.over({s: 100 * answer["score"] for s, answer in answers.items()}, note=note)


def as_printed():
    rows = []
    for scale in SCALES:
        for kind in KINDS:
            values = [printed("table02", scale, kind, task) for task in TASKS]
            if all(values):
                cells = [Cell(value.text, note=value.verdict) for value in values]
                block = f"{SCALES[scale]}: paper, printed"
                rows.append(Row.of(name_of(kind), *cells, block=block))
    columns = [Column("variant")] + [Column(name, "%") for name in TASKS.values()]
    return Table("The paper's values, printed", columns, rows, name="printed")


ARTEFACT = Artefact("table02_downstream", "Downstream tasks", "Table 2", make)

if __name__ == "__main__":
    command(ARTEFACT)
