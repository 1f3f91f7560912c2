"""The sets: the hub's layouts are read, bad rows are named, the demonstration sets are sound."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrkv_jax.data.conversation import Conversation
from lrkv_jax.data.tasks.registry import TASKS, fingerprint, load
from lrkv_jax.errors import LrkvError

SPLITS = [(task.name, split) for task in TASKS.values() for split in task.splits]
ROWS = {
    "smoltalk": {"messages": [{"role": r, "content": r} for r in ("user", "assistant")]},
    "mmlu": {"question": "q", "choices": list("wxyz"), "answer": 3, "subject": "virology"},
    "arc_easy": {
        "id": "Mercury_1",
        "question": "q",
        "choices": {"text": list("wxyz"), "label": list("1234")},
        "answerKey": "4",
    },
    "gsm8k": {"question": "q", "answer": "<<1+1=2>>2\n#### 2,000"},
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "f",
    },
}
ROWS["arc_challenge"] = ROWS["arc_easy"]


def put(folder: Path, name: str, split: str, rows):
    """The rows where the hub's layout has them."""
    path = folder / name / TASKS[name].files[split].replace("*", "00000-of-00001")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_the_hubs_layout_is_read(tmp_path, name, split):
    put(tmp_path, name, split, [ROWS[name]] * 3)
    assert len(load(name, split, tmp_path)) == 3


def test_shards_are_read_in_order_and_all_must_be_there(tmp_path):
    rows = [{**ROWS["gsm8k"], "question": str(n)} for n in range(2)]
    first = put(tmp_path, "gsm8k", "test", rows[:1])
    for shard in range(2):
        pq.write_table(
            pa.Table.from_pylist(rows[shard : shard + 1]),
            first.with_name(f"test-{shard:05d}-of-00002.parquet"),
        )
    first.unlink()
    problems = load("gsm8k", "test", tmp_path)
    assert [(p.question, p.id) for p in problems] == [("0", "gsm8k/test/0"), ("1", "gsm8k/test/1")]
    first.with_name("test-00001-of-00002.parquet").unlink()
    with pytest.raises(LrkvError, match="1 of the 2 files of test: .*lrkv data fetch gsm8k"):
        load("gsm8k", "test", tmp_path)


def test_auxiliary_train_is_read_out_of_its_struct(tmp_path):
    nested = [{"train": {**ROWS["mmlu"], "subject": ""}}]
    put(tmp_path, "mmlu", "auxiliary_train", nested)
    (got,) = load("mmlu", "auxiliary_train", tmp_path)
    assert (got.subject, got.answer, got.choices) == (None, 3, ("w", "x", "y", "z"))


def test_numeric_labels_stay_and_commas_leave_the_number(tmp_path):
    put(tmp_path, "arc_easy", "test", [ROWS["arc_easy"]])
    put(tmp_path, "gsm8k", "test", [ROWS["gsm8k"]])
    (choices,) = load("arc_easy", "test", tmp_path)
    (problem,) = load("gsm8k", "test", tmp_path)
    assert (choices.id, choices.labels, choices.answer) == ("Mercury_1", tuple("1234"), 3)
    assert problem.answer == "2000"


def test_a_conversation_with_an_empty_turn_is_left_out(tmp_path):
    empty = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}
    put(tmp_path, "smoltalk", "train", [empty, ROWS["smoltalk"]])
    assert len(load("smoltalk", "train", tmp_path)) == 1


def arc(text, label, key):
    return {"choices": {"text": text, "label": label}, "answerKey": key}


@pytest.mark.parametrize(
    ("name", "split", "change", "line"),
    [
        ("arc_easy", "test", {"answerKey": "E"}, "not in tuple"),
        ("arc_easy", "test", arc(["a", "b"], ["A", "A"], "A"), "labels A, A .* disagree"),
        ("arc_challenge", "train", {"choices": {"text": ["a"]}}, "KeyError: 'label'"),
        ("mmlu", "test", {"answer": 4}, "answer 4 disagree"),
        ("mmlu", "dev", {"answer": "D"}, "TypeError"),
        ("gsm8k", "train", {"answer": "It is 7."}, "column 'answer' has no final number"),
        ("smoltalk", "test", {"messages": [{"role": "user"}]}, "KeyError: 'content'"),
        ("smoltalk", "test", {"messages": [{"role": "user", "content": "x"}]}, "without an answer"),
    ],
)
def test_a_bad_row_is_named_with_its_place(tmp_path, name, split, change, line):
    path = put(tmp_path, name, split, [{**ROWS[name], **change}])
    with pytest.raises(LrkvError, match=f"^{path}:1 is no row of {name} .*{line}") as error:
        load(name, split, tmp_path)
    assert "\n" not in str(error.value)


def test_what_is_missing_comes_with_the_command_that_fetches_it(tmp_path):
    for folder in (tmp_path, "/dev/null", "a\0b", "x" * 5000, "\ud800"):
        with pytest.raises(LrkvError, match=r"holds no all/test-.*`lrkv data fetch mmlu`"):
            load("mmlu", "test", folder)
    put(tmp_path, "mmlu", "test", [ROWS["mmlu"]])
    with pytest.raises(LrkvError, match=r"holds no all/dev-\*.parquet: .*`lrkv data fetch mmlu`"):
        load("mmlu", "dev", tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "line"),
    [
        ("arc_eazy", "test", "'arc_eazy': did you mean arc_easy"),
        ("zzz", "test", "use one of smoltalk, mmlu"),
        ("gsm8k", "dev", "gsm8k has no split 'dev': use train, test"),
    ],
)
def test_another_name_or_split_is_refused_with_what_there_is(name, split, line):
    with pytest.raises(LrkvError, match=line):
        load(name, split)


def test_a_fingerprint_hangs_on_every_example_and_their_order():
    examples = load("mmlu", "test")
    same = fingerprint(load("mmlu", "test"))
    assert fingerprint(examples) == same
    assert len({same, fingerprint(examples[1:]), fingerprint(examples[::-1])}) == 3


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_each_demonstration_set_reads_and_renders(name, split):
    examples = load(name, split)
    rendered = [TASKS[name].conversation(example) for example in examples]
    assert all(isinstance(conversation, Conversation) for conversation in rendered)
    assert all(c.messages[-1].role == "assistant" for c in rendered)
    assert len(set(rendered)) == len(rendered), "an example comes twice"
