"""Benchmark scores: Table 2."""

from collections.abc import Mapping

from lrkv_jax.lab.report.comparison import RunRecord, settings
from lrkv_jax.lab.report.paper import report_item
from lrkv_jax.lab.report.tables import Cell, Column, Table, TableRow, table_of_paper

TASKS = {
    "arc_easy": "ARC-E", "arc_challenge": "ARC-C", "mmlu": "MMLU", "gsm8k": "GSM8K",
    "humaneval": "HumanEval", "combined": "combined",
}  # fmt: skip


@report_item("Table 2", "Downstream tasks")
def table02_downstream(runs):
    """The five benchmarks, by variant, from each run's `evaluation.json`.

    It shows runs evaluated with `lrkv evaluate RUN --tasks arc_easy,...`; midtrained ones first.
    """
    evaluated = [run for run in runs if any(task in (run.evaluation or {}) for task in TASKS)]
    rows = []
    for midtrained in (True, False):
        for setting in settings(evaluated, midtrained=midtrained):
            block = setting.name + ("" if midtrained else ", pretrained alone")
            for label, seeds in setting.beside.items():
                cells = [_score(seeds, task) for task in TASKS]
                rows.append(TableRow.of(label, *cells, block=block))
    columns = [Column("variant"), *(Column(name, "%", "higher", 1) for name in TASKS.values())]
    note = (
        "Mean ± standard deviation over seeds; a rate p of n examples has itself a standard "
        "error of √(p (1 − p) / n) for one model. Combined: the mean of the five."
    )
    ours = [Table("Downstream tasks", columns, rows, [note])] if rows else []
    printed = {task: Column(name, "%") for task, name in TASKS.items()}
    return [*ours, table_of_paper("table02", printed)]


def _score(seeds: Mapping[int, RunRecord], task: str) -> Cell:
    answers = {s: run.evaluation[task] for s, run in seeds.items() if task in run.evaluation}
    if task == "combined":
        return Cell.over({s: 100 * score for s, score in answers.items()})
    scores = {s: 100 * answer["score"] for s, answer in answers.items()}
    if not answers:
        return Cell()
    example = next(iter(answers.values()))
    # Evaluations of earlier versions could be asked as the lm-evaluation-harness asks.
    where = "as the harness asks" if example.get("style") == "harness" else "in a chat"
    note = f"{TASKS[task]}: {example['examples']:,} examples, asked {where}."
    return Cell.over(scores, note=note)
