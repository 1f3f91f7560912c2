"""Table 2: the five benchmarks, by variant, from each run's `evaluation.json`.

It shows runs evaluated with `lrkv evaluate RUN --tasks arc_easy,...`; midtrained ones first.
"""

from lrkv_jax.artefacts.artefact import artefact
from lrkv_jax.artefacts.looks import name_of
from lrkv_jax.artefacts.printed import KINDS, SCALES, printed
from lrkv_jax.artefacts.table import Cell, Column, Row, Table, no_run
from lrkv_jax.comparison import settings

TASKS = {
    "arc_easy": "ARC-E", "arc_challenge": "ARC-C", "mmlu": "MMLU", "gsm8k": "GSM8K",
    "humaneval": "HumanEval", "combined": "combined",
}  # fmt: skip
COLUMNS = [Column("variant")] + [Column(name, "%", "higher", 1) for name in TASKS.values()]


@artefact("Table 2", "Downstream tasks")
def table02_downstream(runs):
    asked = [run for run in runs if any(task in (run.evaluation or {}) for task in TASKS)]
    rows = []
    for midtrained in (True, False):
        for setting in settings(asked, midtrained=midtrained):
            rows += _block(setting, setting.name + ("" if midtrained else ", pretrained alone"))
    note = (
        "Mean ± standard deviation over seeds; a rate p of n examples has itself a standard "
        "error of √(p (1 − p) / n) for one model. Combined: the mean of the five."
    )
    missing = [] if rows else ["no run was evaluated on a benchmark"]
    return [Table("Downstream tasks", COLUMNS, rows, [note], missing=missing), _as_printed()]


def _block(setting, name):
    for label, seeds in setting.beside.items():
        line = label if seeds else name_of(label)
        yield Row.of(line, *(_cell(seeds, task, name, line) for task in TASKS), block=name)


def _cell(seeds, task, block, line):
    if not seeds:
        return no_run(f"{block} {line}")
    answers = {s: run.evaluation[task] for s, run in seeds.items() if task in run.evaluation}
    if not answers:
        return Cell(gap=f"not evaluated: {block} {line} {task}")
    if task == "combined":
        return Cell.over({s: 100 * score for s, score in answers.items()})
    example = next(iter(answers.values()))
    note = f"{TASKS[task]}: {example['examples']:,} examples, in the style {example['style']}."
    return Cell.over({s: 100 * answer["score"] for s, answer in answers.items()}, note=note)


def _as_printed():
    rows = []
    for scale in SCALES:
        for kind in KINDS:
            values = [printed("table02", scale, kind, task) for task in TASKS]
            if all(values):
                block = f"{SCALES[scale]}: paper, printed"
                rows.append(Row.of(name_of(kind), *map(Cell.of_paper, values), block=block))
    columns = [Column("variant")] + [Column(name, "%") for name in TASKS.values()]
    return Table("The paper's values, printed", columns, rows, name="printed")
