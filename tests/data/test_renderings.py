"""Renderings and answer extraction against hand-written text: what was published, letter by letter.

No function of the package makes the expected text here.
"""

import pytest

from lrkv_jax.data.conversation import Part, conversation_from, exchange
from lrkv_jax.data.tasks import choices, gsm8k, humaneval
from lrkv_jax.data.tasks.choices import Choices
from lrkv_jax.data.tasks.gsm8k import WordProblem
from lrkv_jax.data.tasks.humaneval import Program

LETTERS = "Multiple Choice question: {}\n\nRespond only with the letter of the correct answer."
NUMERIC = Choices("b", "Which is hot?", ("ice", "fire", "snow", "rain"), tuple("1234"), 1)
THREE = Choices("d", "How many?", ("1,000", "-2.5", "日本"), tuple("ABC"), 2)
ASKED = [
    (NUMERIC, "Which is hot?\n- ice=1\n- fire=2\n- snow=3\n- rain=4", "2"),
    (THREE, "How many?\n- 1,000=A\n- -2.5=B\n- 日本=C", "C"),
]


@pytest.mark.parametrize(("example", "lettered", "answer"), ASKED)
def test_choices_are_asked_as_the_recipe_asks_them(example, lettered, answer):
    lettered = LETTERS.format(lettered)
    assert choices.question(example) == lettered
    assert choices.conversation(example) == exchange(lettered, answer)


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
    ("#### 18.", "18."),  # the full stop stays, as published
    ("#### $18", None),
    ("####18", None),
    ("#### 4\nQuestion: 7?\n#### 9", "4"),
    ("", None),
    ("日本 ８", None),  # a full-width eight
    ("#### 12日", "12"),
]


@pytest.mark.parametrize(("text", "answer"), ANSWERS)
def test_answers_are_extracted_as_published(text, answer):
    assert gsm8k.extract_answer(text) == answer


@pytest.mark.parametrize(
    ("gold", "text", "right"),
    [
        ("x\n#### 18", "#### 18.0", False),  # strings, not numbers
        ("x\n#### 1,800", "#### 1800", True),
    ],
)
def test_numbers_are_compared_as_published(gold, text, right):
    problem = gsm8k.example({"question": "q", "answer": gold}, "id")
    assert gsm8k.is_correct(text, problem) is right


PROMPT = '# adds\nimport math\nfrom typing import List\n\n\ndef add(a, b):\n    """Sum."""\n'
PROGRAM = Program(
    "p", PROMPT, "    return a + b\n", "def check(f):\n    assert f(1, 2) == 3", "add"
)


@pytest.mark.parametrize(
    ("completion", "code"),
    [
        ("Sure:\n```python\nx = 1\n```\nand\n```\ny = 2\n```", "x = 1"),
        ("```\nx = 1\n\ny = 2\n```", "x = 1\n\ny = 2"),
        ("```python   \n  x = 1\n```", "x = 1"),
        ("```python\nx = 1", "```python\nx = 1"),  # never closed: all of it
        ("```js\nx\n```", "```js\nx\n```"),  # another language's is not found
        ("", ""),
    ],
)
def test_a_completions_code_is_its_first_block(completion, code):
    assert humaneval.extract_program(completion) == code


def test_a_chats_program_is_imports_code_test_and_check():
    got = humaneval.whole_program(PROGRAM, "```python\ndef add(a, b):\n    return a + b\n```")
    assert got == (
        "import math\nfrom typing import List\n\ndef add(a, b):\n    return a + b\n\n"
        "def check(f):\n    assert f(1, 2) == 3\ncheck(add)"
    )


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


def test_a_program_is_taught_whole():
    assert humaneval.conversation(PROGRAM) == conversation_from(
        [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": PROMPT + "\n    return a + b\n"},
        ]
    )
