"""The benchmarks' sets, as published: layouts, texts, answers, and the calculator of GSM8K."""

from fractions import Fraction
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lrkv_jax.data.calculator import MAX_LENGTH, calculate
from lrkv_jax.data.conversation import Conversation, Part, exchange
from lrkv_jax.data.tasks import choices, gsm8k, humaneval
from lrkv_jax.data.tasks.choices import Choices
from lrkv_jax.data.tasks.gsm8k import WordProblem
from lrkv_jax.data.tasks.humaneval import Program
from lrkv_jax.data.tasks.registry import TASKS, load
from lrkv_jax.errors import LrkvError

SPLITS = [(task.name, split) for task in TASKS.values() for split in task.files]
ROWS = {
    "smoltalk": {"messages": [{"role": r, "content": r} for r in ("user", "assistant")]},
    "mmlu": {"question": "q", "choices": list("wxyz"), "answer": 3, "subject": "virology"},
    "arc_easy": {
        "id": "Mercury_1", "question": "q", "answerKey": "4",
        "choices": {"text": list("wxyz"), "label": list("1234")},
    },
    "gsm8k": {"question": "q", "answer": "<<1+1=2>>2\n#### 2,000"},
    "humaneval": {
        "task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f",
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
    },
}  # fmt: skip
ROWS["arc_challenge"] = ROWS["arc_easy"]


def put(folder: Path, name: str, split: str, rows):
    """The rows where the hub's layout has them."""
    path = folder / name / TASKS[name].files[split].replace("*", "00000-of-00001")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(("name", "split"), SPLITS)
def test_the_hubs_layout_and_each_demonstration_set_are_read_and_rendered(tmp_path, name, split):
    put(tmp_path, name, split, [ROWS[name]] * 3)
    assert len(load(name, split, tmp_path)) == 3
    rendered = [TASKS[name].conversation(example) for example in load(name, split)]
    assert all(isinstance(conversation, Conversation) for conversation in rendered)
    assert all(c.messages[-1].role == "assistant" for c in rendered)
    assert len(set(rendered)) == len(rendered), "an example comes twice"


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


def test_rows_are_read_as_their_sets_have_them(tmp_path):
    empty = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]}
    put(tmp_path, "mmlu", "auxiliary_train", [{"train": {**ROWS["mmlu"], "subject": ""}}])
    put(tmp_path, "arc_easy", "test", [ROWS["arc_easy"]])
    put(tmp_path, "gsm8k", "test", [ROWS["gsm8k"]])
    put(tmp_path, "smoltalk", "train", [empty, ROWS["smoltalk"]])
    (got,) = load("mmlu", "auxiliary_train", tmp_path)
    assert (got.subject, got.answer, got.choices) == (None, 3, ("w", "x", "y", "z"))
    (choices,) = load("arc_easy", "test", tmp_path)
    assert (choices.id, choices.labels, choices.answer) == ("Mercury_1", tuple("1234"), 3)
    (problem,) = load("gsm8k", "test", tmp_path)
    assert problem.answer == "2000"
    assert len(load("smoltalk", "train", tmp_path)) == 1, "one with an empty turn is left out"


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
    for name, split, line in (
        ("arc_eazy", "test", "'arc_eazy': did you mean arc_easy"),
        ("gsm8k", "dev", "gsm8k has no split 'dev': use train, test"),
    ):
        with pytest.raises(LrkvError, match=line):
            load(name, split)


def test_choices_are_asked_as_the_recipe_asks_them():
    example = Choices("d", "How many?", ("1,000", "-2.5", "日本"), tuple("123"), 2)
    lettered = (
        "Multiple Choice question: How many?\n- 1,000=1\n- -2.5=2\n- 日本=3\n\n"
        "Respond only with the letter of the correct answer."
    )
    assert choices.question(example) == lettered
    assert choices.conversation(example) == exchange(lettered, "3")


SPANS = [
    ("Weng earns 12/60 = $<<12/60=0.2>>0.2 per minute.\nShe earned $<<0.2*50=10>>10.\n#### 10",
     [("text", "Weng earns 12/60 = $"), ("python", "12/60"), ("output", "0.2"),
      ("text", "0.2 per minute.\nShe earned $"), ("python", "0.2*50"), ("output", "10"),
      ("text", "10.\n#### 10")]),
    # at the start, two in a row: no empty text
    ("<<1+1=2>><<2*3=6>>6\n#### 6",
     [("python", "1+1"), ("output", "2"), ("python", "2*3"), ("output", "6"),
      ("text", "6\n#### 6")]),
    # cut at the last "="
    ("<<x=1-1=0>>0", [("python", "x=1-1"), ("output", "0"), ("text", "0")]),
    # no "=": a call without an output
    ("<<7>>7\n#### 7", [("python", "7"), ("text", "7\n#### 7")]),
    ("1 < 2 << 3, 日本\n#### 1", [("text", "1 < 2 << 3, 日本\n#### 1")]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "parts"), SPANS)
def test_spans_become_tool_calls(answer, parts):
    got = gsm8k.conversation(WordProblem("x", "How many?", answer, "?"))
    assert got.messages[0].parts == (Part("text", "How many?"),)
    assert got.messages[1].parts == tuple(Part(*part) for part in parts)


ANSWERS = [
    ("So 9 + 9.\n#### 18", "18"),
    ("#### 1,234,567", "1234567"),
    ("#### -1,000.25", "-1000.25"),
    ("#### $18", None),
    ("####18", None),
    ("#### 4\nQuestion: 7?\n#### 9", "4"),
    ("", None),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_answers_are_extracted_as_published(text, answer):
    assert gsm8k.extract_answer(text) == answer


def test_numbers_are_compared_as_published():
    problem = gsm8k.example({"question": "q", "answer": "x\n#### 1,800"}, "id")
    assert gsm8k.is_correct("#### 1800", problem) is True
    assert gsm8k.is_correct("#### 1800.0", problem) is False  # strings, not numbers


PROMPT = '# adds\nimport math\nfrom typing import List\n\n\ndef add(a, b):\n    """Sum."""\n'


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("Sure:\n```python\nx = 1\n```\nand\n```\ny = 2\n```", "x = 1"),
        ("```\nx = 1\n\ny = 2\n```", "x = 1\n\ny = 2"),
        ("```python\nx = 1", "```python\nx = 1"),  # never closed: all of it
        ("", ""),
    ],
)
def test_a_completions_code_is_its_first_block(completion, code):
    assert humaneval.extract_program(completion) == code


def test_a_chats_program_is_imports_code_test_and_check_and_taught_whole():
    check = "def check(f):\n    assert f(1, 2) == 3"
    program = Program("p", PROMPT, "    return a + b\n", check, "add")
    got = humaneval.whole_program(program, "```python\ndef add(a, b):\n    return a + b\n```")
    assert got == (
        "import math\nfrom typing import List\n\ndef add(a, b):\n    return a + b\n\n"
        f"{check}\ncheck(add)"
    )
    taught = exchange(PROMPT, PROMPT + "\n    return a + b\n")
    assert humaneval.conversation(program) == taught


@pytest.mark.parametrize(
    ("prompt", "imports"),
    [
        (PROMPT, "import math\nfrom typing import List"),
        ("def f():\n    import os\n", ""),
        ("\n\nimport a\nx = 1\nimport b\n", "import a"),
        ("", ""),
    ],
)
def test_only_leading_imports_are_taken(prompt, imports):
    assert humaneval.leading_imports(prompt) == imports


# Sums as (text, value), value None where a division by zero is in them.
NUMBERS = st.one_of(
    st.integers(0, 99_999).map(lambda n: (str(n), Fraction(n))),
    st.integers(1000, 99_999).map(lambda n: (f"{n:,}", Fraction(n))),
    st.decimals(0, 999, places=2).map(lambda d: (str(d), Fraction(d))),
)


def joined(pair, sign, space):
    (left, a), (right, b) = pair
    text = f"({left}){space}{sign}{space}({right})"
    if a is None or b is None or (sign == "/" and b == 0):
        return text, None
    return text, {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else None}[sign]


SUMS = st.recursive(
    NUMBERS,
    lambda inner: st.builds(
        joined, st.tuples(inner, inner), st.sampled_from("+-*/"), st.sampled_from(["", " "])
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(SUMS)
def test_a_sum_is_its_exact_value_to_a_doubles_digits(pair):
    text, value = pair
    if len(text.replace(",", "")) > MAX_LENGTH or value is None:
        assert calculate(text) is None
        return
    got = calculate(text)
    if value.denominator == 1:
        assert got == str(int(value))  # never 24.0
    else:
        assert "e" not in got
        assert float(got) == float(value)


@settings(max_examples=200, deadline=None)
@given(
    st.text("0123456789+-*/.() ,", max_size=250) | st.text("12+*/().,e_x=<>'\n\0é日", max_size=20)
)
def test_nothing_that_is_written_raises(text):
    got = calculate(text)
    assert got is None or Fraction(got) is not None


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("48/2", "24"),
        ("0.1+0.2", "0.3"),
        ("1/100000", "0.00001"),
        ("1,200 * 3", "3600"),
        ("-1/4", "-0.25"),
        ("7//2", "3"),
    ],
)
def test_results_are_written_as_gsm8k_writes_them(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        *("", " ", ",", "()", "...", "(", "1+", "1 2", "1(2)", "(1)(2)", "007", "1..2"),
        *("1/0", "1//0", "0/(3-3)", "2**3", "9*(9**9)", "2*\n3", "1\x00", "１+１"),
        *("x", "1e9", "0x10", "1_000", "1j", "5%", "1<<9", "[1]", "1;2", "1=1", "1 if 1 else 2"),
        *("__import__('os')", "'a'.count('a')", "(1).real", "(1,2)"[:1] + "lambda:0)"),
        "1+" * (MAX_LENGTH // 2) + "1",
        "(" * 150 + "1" + ")" * 150,
        "9" * 10_000,
    ],
)
def test_what_is_not_a_short_sum_has_no_result(expression):
    assert calculate(expression) is None
